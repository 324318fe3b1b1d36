// The forward loop over the steps.
//
// A panel holds the gates of the same W hidden units (RNN: kPanel units) over the whole depth, so that one run of
// register tiles gives all that the cell of these units needs. The cell follows while the products are in L1. If a norm
// needs the whole row, or a projection follows, the products of all panels come first (wide_step).
//
// The next step's h is written beside this step's, as an operand: all workers on the same rows read all of it. c, and h
// where it is added without a product, belong to the worker of their hidden units.
#pragma once

#include "sequence.h"
#if defined(SK_TILES)
#include "input_tiles.h"
#else
#include "input_panels.h"
#endif

namespace seqkern {
namespace SK_TIER {
namespace {

// Vectors of a panel, and of hidden units in it.
template <int G>
constexpr int kGateVecs = G == 1 ? kPanelVecs : G;
template <int G>
constexpr int kUnitVecs = G == 1 ? kPanelVecs : 1;

// Elements of a row of a group's products (Group): eight vectors for one or two rows; for more rows four gates of a
// cache line of hidden units.
template <class A>
constexpr int64_t group_size() {
  const int64_t vectors = 4 * 64 / (W<A> * static_cast<int64_t>(sizeof(A)));
  return (vectors > 8 ? vectors : 8) * W<A>;
}

// Scratch has the products of a group; those with the input, or with matrix tiles those of the next group; a step's
// inputs as an operand; and panels that are packed on the fly.
constexpr int64_t kGroupBuffers = kEveryStepFrom > 0 || kDepthStep > 1 ? 2 : 1;
template <class A>
int64_t staged_inputs(const RnnLayer& l, int64_t rows) {
  return kEveryStepFrom > 0 ? rows * operand_stride<A>(l.inputs) : 0;
}

template <class A>
struct ForwardState {
  int64_t h_stride, plain_stride, c_stride, z_stride, wide_stride, bytes;
  A *h[2], *plain_h, *c;      // h: the operand, this step's and the next's; plain_h: without mask and rounding
  A *zh, *c_new, *o, *h_hat;  // wide_step: products, c~, o and the projection's output
  A* h_wide;                  // wide_step: h~, the projection's operand

  ForwardState(const RnnLayer& l, int64_t rows, void* memory) {
    h_stride = operand_stride<A>(l.width);
    plain_stride = panel_stride<A>(l.width);
    wide_stride = operand_stride<A>(l.hidden);
    c_stride = panel_stride<A>(l.hidden);
    z_stride = padded_stride<A>(gate_count(l.cell) * l.hidden);
    Pieces pieces(memory);
    const auto take = [&](bool needed, int64_t stride)
                          SK_INLINED { return pieces.take<A>(needed ? rows * stride : 0); };
    const bool wide = l.norm || l.project;
    h[0] = take(true, h_stride);
    h[1] = take(true, h_stride);
    plain_h = take(true, plain_stride);
    c = take(true, c_stride);
    zh = take(wide, z_stride);
    c_new = take(wide, c_stride);
    o = take(wide, c_stride);
    h_hat = take(wide, plain_stride);
    h_wide = take(l.project, wide_stride);
    bytes = pieces.bytes();
  }
};

// The addresses of one row at one step, for the cell. Null where nothing is written.
template <class A>
struct ForwardRow {
  const A* zx;
  A *gates, *cells, *c, *h_next, *plain_h;
  const A *h, *mask;  // h: to be added, not multiplied
  int64_t output;     // index of its first element
};

// Plain: no peepholes, zoneout, recurrent mask, norm or projection.
template <class A, Cell kCell, bool Plain>
struct Forward {
  static constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  static constexpr int NV = kGateVecs<G>, kUnits = kUnitVecs<G> * W<A>;
  // A panel is processed in parts as wide as a register tile, whose products are side by side.
  static constexpr int TV = static_cast<int>(tile_vectors(G)), kParts = NV / TV;
  static constexpr bool kLstm = kCell == Cell::lstm;
  static constexpr bool kPlainH = !Plain || kTerms > 1;  // whether the operand is not h itself

  const RnnForward& p;
  const RnnLayer& l;
  const ShareRows rows;
  const ForwardState<A> state;
  const int64_t H, P;
  const Peepholes<A> peepholes;

  Forward(const RnnForward& p_, const RnnShare& share)
      : p(p_),
        l(*p_.layer),
        rows(l, p_.direction, share, p_.step_begin, p_.step_end),
        state(l, share.rows, share.state),
        H(l.hidden),
        P(l.width),
        peepholes{static_cast<const A*>(p_.direction.peephole), l.hidden} {}

  static SK_INLINE A* at(void* base, int64_t offset) { return base ? static_cast<A*>(base) + offset : nullptr; }
  static SK_INLINE const A* at(const void* base, int64_t offset) {
    return base ? static_cast<const A*>(base) + offset : nullptr;
  }
  const A* mask_row(int64_t row) const { return Plain ? nullptr : at(p.direction.mask, row * P); }

  // zx of a row, where it is stored: in the first panel, or the whole row.
  SK_INLINE const A* zx_of(int64_t t, int64_t i) const {
    const A* zx = static_cast<const A*>(p.zx);
    if (every_step()) return nullptr;
    if (!by_panels()) return zx ? zx + rows.token(t, i) * p.zx_stride : nullptr;
    return zx + rows.share.first * p.input.share_stride + (share_token(t) + i) * NV * W<A>;
  }
  // The first of the share's own tokens at t, counted from the first step of this pass.
  SK_INLINE int64_t share_token(int64_t t) const {
    const int64_t first = rows.reverse ? l.steps - p.step_end : p.step_begin;
    return rows.share.starts[t] - rows.share.starts[first];
  }

  SK_INLINE ForwardRow<A> row_at(int64_t t, int64_t i, int parity) const {
    const int64_t row = rows.row(i), place = t * l.batch + row;
    return {.zx = zx_of(t, i),
            .gates = at(p.gates, place * R * H),
            .cells = at(p.cells, place * H),
            .c = state.c + i * state.c_stride,
            .h_next = state.h[parity ^ 1] + i * state.h_stride,
            .plain_h = state.plain_h + i * state.plain_stride,
            .h = kPlainH ? state.plain_h + i * state.plain_stride : state.h[parity] + i * state.h_stride,
            .mask = mask_row(row),
            .output = place * p.output_stride};
  }

  // zx of a gate's W hidden units.
  SK_INLINE Vec<A> input_of(const A* zx, int64_t zx_gate, int g, int64_t u) const {
    const Vec<A> sum = load_upto(zx + g * zx_gate, H - u);
    if (!every_step() || !p.input.bias) return sum;
    return sum + load_upto(static_cast<const A*>(p.input.bias) + g * H + u, H - u);
  }
  // The gates and c~ of W hidden units from the sums. Returns h^ (GRU, RNN), or c~ with o in `o`. zx, zh: of these
  // units, with the gates zx_gate and zh_gate apart.
  SK_INLINE Vec<A> gates_of(const A* zx, int64_t zx_gate, const A* zh, int64_t zh_gate, Vec<A> c_prev, Vec<A> h_prev,
                            int64_t u, A* gates, Vec<A>& o) const {
    const int64_t n = H - u;
    if constexpr (kLstm) {
      Vec<A> z[4];
      for (int g = 0; g < 4; ++g) z[g] = input_of(zx, zx_gate, g, u) + load(zh + g * zh_gate);
      const Vec<A> c_new = lstm_gates<A, Plain>(z, c_prev, peepholes, u);
      if (gates)
        for (int g = 0; g < 4; ++g) store_upto(gates + g * H + u, z[g], n);
      o = z[3];
      return c_new;
    } else if constexpr (kCell == Cell::gru) {
      Vec<A> x[3], h[3], s[4];
      for (int g = 0; g < 3; ++g) x[g] = input_of(zx, zx_gate, g, u), h[g] = load(zh + g * zh_gate);
      if (p.direction.b_hn) h[2] += load_upto(static_cast<const A*>(p.direction.b_hn) + u, n);
      const Vec<A> h_new = gru_state<A>(x, h, h_prev, s);
      if (gates)
        for (int g = 0; g < 4; ++g) store_upto(gates + g * H + u, s[g], n);
      return h_new;
    } else if constexpr (kCell == Cell::interpolated) {
      Vec<A> s[2];
      for (int g = 0; g < 2; ++g) s[g] = input_of(zx, zx_gate, g, u) + load(zh + g * zh_gate);
      const Vec<A> h_new = interpolated_state<A>(s, h_prev);
      if (gates)
        for (int g = 0; g < 2; ++g) store_upto(gates + g * H + u, s[g], n);
      return h_new;
    } else if constexpr (kCell == Cell::additive) {
      const Vec<A> added = tanh<A>(input_of(zx, zx_gate, 0, u) + load(zh));
      if (gates) store_upto(gates + u, added, n);
      return h_prev + added;
    } else {
      const Vec<A> h_new = rnn_state<A>(input_of(zx, zx_gate, 0, u) + load(zh), l.cell == Cell::relu);
      if (gates) store_upto(gates + u, h_new, n);
      return h_new;
    }
  }

  // Stores the cell state of W hidden units, from c~.
  SK_INLINE void keep_c(const ForwardRow<A>& r, Vec<A> c_prev, Vec<A> c_new, int64_t u, ZoneoutRow<A>& zoneout) const {
    if (!Plain && l.zoneout.active) c_new = zoneout.mix(c_prev, c_new, u);
    store(r.c + u, c_new);
    if (r.cells) store_upto(r.cells + u, c_new, H - u);
  }
  // Stores the state of W hidden units, from h^.
  SK_INLINE void keep_h(const ForwardRow<A>& r, Vec<A> h_new, int64_t u, ZoneoutRow<A>& zoneout) const {
    if (!Plain && l.zoneout.active) h_new = zoneout.mix(load(r.plain_h + u), h_new, u);
    if (kPlainH) store(r.plain_h + u, h_new);
    store_as(l.dtype, p.output, r.output + u, h_new, P - u);
    if (!Plain && r.mask) h_new *= load_upto(r.mask + u, P - u);
    store_numbers(r.h_next, u, h_new, P - u);
  }
  SK_INLINE void begin_zoneout(ZoneoutRow<A> (&zoneout)[2], int64_t t, int64_t i) const {
    if (Plain || !l.zoneout.active) return;
    for (int which = 0; which < 2; ++which)
      zoneout[which].begin(l.zoneout, which, rows.random_row(p.direction.index, which, t, i));
  }

  // The rows of the next step: ended sequences leave, new ones enter, and resets take effect. Columns [begin, end) of
  // `width` wide memory; parity is that of the buffer that the next step multiplies.
  void change(int64_t count, int64_t t_next, int64_t next, int parity, int64_t begin, int64_t end, int64_t c_begin,
              int64_t c_end) const {
    for (int64_t i = next; i < count; ++i) {
      const int64_t row = rows.row(i);
      copy_columns(kPlainH ? state.plain_h + i * state.plain_stride : state.h[parity] + i * state.h_stride,
                   at(p.h, row * P), begin, end);
      if (kLstm) copy_columns(state.c + i * state.c_stride, at(p.c, row * H), c_begin, c_end);
    }
    for (int64_t i = count; i < next; ++i) {
      const int64_t row = rows.row(i);
      copy_columns(at(static_cast<const void*>(p.h), row * P), state.plain_h + i * state.plain_stride, begin, end);
      if (kLstm) copy_columns(at(static_cast<const void*>(p.c), row * H), state.c + i * state.c_stride, c_begin, c_end);
      const A *from = state.plain_h + i * state.plain_stride, *mask = mask_row(row);
      A* to = state.h[parity] + i * state.h_stride;
      for (int64_t u = begin; u < end; u += W<A>) {
        const Vec<A> h = load_upto(from + u, end - u);
        store_numbers(to, u, mask ? h * load_upto(mask + u, end - u) : h, P - u);
      }
    }
    if (!l.resets) return;
    for (int64_t i = 0; i < next; ++i) {
      if (!rows.reset(t_next, i)) continue;
      for (int64_t u = begin; u < end; u += W<A>)
        store_numbers(state.h[parity] + i * state.h_stride, u, Vec<A>{}, P - u);
      zero_columns(state.plain_h + i * state.plain_stride, begin, end);
      if (kLstm) zero_columns(state.c + i * state.c_stride, c_begin, c_end);
    }
  }

  // Panels of a group: as many as one or two rows need to keep the multiply-adds busy. For more rows, a cache line of
  // hidden units, so that the cells touch each line once.
  static int64_t unit_group(int64_t count) {
    const int64_t panels =
        count > 2 ? 64 / (kUnits * static_cast<int64_t>(sizeof(A))) : panel_group<TV>(count) / kParts;
    return panels > 1 ? panels : 1;
  }
  // Panels that are processed together, their hidden units, and their products: side by side, in rows `stride` apart.
  struct Group {
    int64_t panel, panels, begin, end;
    A *products, *inputs;  // inputs: products with the input, if made at every step
    int64_t stride, next;  // next: the first panel of the group that follows
  };
  // Elements of a group's products.
  int64_t buffer() const { return rows.share.rows * group_size<A>(); }
  SK_INLINE const A* packed_panel(int64_t panel) const {
    return static_cast<const A*>(p.direction.packed_w_hh) + panel * padded_words(P) * NV * W<A>;
  }
  SK_INLINE const A* packed_inputs(int64_t panel) const {
    return static_cast<const A*>(p.input.packed_w_ih) + panel * padded_words(l.inputs) * NV * W<A>;
  }
  template <class Before>
  SK_INLINE void unit_products(int64_t count, const Group& g, int parity, const Before& before) const {
    if (!p.direction.packed_w_hh)
      return unpacked_products<A, TV>(
          count, p.direction.w_hh, g.panel, g.panels, state.h[parity], state.h_stride, g.products, g.stride,
          g.products + kGroupBuffers * buffer() + staged_inputs<A>(l, rows.share.rows), before);
    panel_products<A, TV>(count, g.panels * kParts, words(P), state.h[parity], state.h_stride, packed_panel(g.panel),
                          g.products, g.stride, TV * W<A>, every_step() ? packed_inputs(g.next) : packed_panel(g.next),
                          before);
  }
  // Whether the loop makes the products with the input; whether at every step, a group at a time, without biases.
  SK_INLINE bool by_panels() const { return p.input.packed_w_ih; }
  SK_INLINE bool every_step() const { return kEveryStepFrom > 0 && p.input.every_step; }

  // A step's inputs as an operand.
  struct StepInputs {
    const A* rows = nullptr;
    int64_t stride = 0;
  };
  StepInputs step_inputs(int64_t t, int64_t count, A* staged) const {
    StepInputs x;
#if !defined(SK_TILES)
    by_element<A>(l.dtype, [&](auto element) {
      const auto* first = static_cast<const decltype(element)*>(p.input.x);
      const auto row = [&](int64_t i) { return first + (t * l.batch + rows.row(i)) * l.inputs; };
      x.rows = as_input_operand<A>(count, l.inputs, row, staged, x.stride);
    });
#endif
    return x;
  }
  // zx of the share's tokens for these panels.
  void input_products(int64_t panel_begin, int64_t panel_end, A* scratch) const {
    const int64_t first = rows.reverse ? l.steps - p.step_end : p.step_begin, past = first + p.step_end - p.step_begin;
    const int64_t tokens = rows.share.starts[past] - rows.share.starts[first];
    int64_t t = first, i = 0;
    const auto begin = [&] { t = first, i = 0; };
    const auto next = [&] {
      while (i == rows.count(t)) ++t, i = 0;
      const int64_t row = t * l.batch + rows.row(i++);
      return static_cast<const char*>(p.input.x) + row * l.inputs * size_of(l.dtype);
    };
    const auto bias_of = [&](int64_t panel, A* sums) {
      for (int v = 0; v < NV; ++v) {
        const int64_t u = panel * kUnits + (G == 1 ? v * W<A> : 0), n = H - u;
        const A* bias = static_cast<const A*>(p.input.bias) + (G == 1 ? 0 : v * H) + u;
        store(sums + v * W<A>, n > 0 ? load_upto(bias, n) : Vec<A>{});
      }
    };
    A* zx = static_cast<A*>(p.zx) + rows.share.first * p.input.share_stride;
    by_element<A>(l.dtype, [&](auto element) {
      panel_input_products<A, NV, TV, decltype(element)>(
          tokens, l.inputs, begin, next, static_cast<const A*>(p.input.packed_w_ih), panel_begin, panel_end,
          p.input.bias != nullptr, bias_of, zx, p.input.panel_stride, scratch);
    });
  }

  RowTiles row_tiles(int64_t count) const { return RowTiles(p.direction.packed_w_hh ? count : kUnpackedRows); }

  void turn(int64_t turn, int64_t panel_begin, int64_t panel_end, A* scratch) const {
    const int64_t step = p.step_begin + turn - 1, steps = p.step_end - p.step_begin;
    const int64_t t = turn > 0 ? rows.time(step) : 0, t_next = turn < steps ? rows.time(step + 1) : 0;
    const int64_t count = turn > 0 ? rows.count(t) : 0, next = turn < steps ? rows.count(t_next) : 0;
    // A step reads the buffer of its parity and writes the other one, which the next step reads.
    const int parity = static_cast<int>(step & 1), next_parity = parity ^ 1;
    using Row = ForwardRow<A>;
    const Row* table = row_table<Row>(scratch, count, [&](int64_t i) { return row_at(t, i, parity); });
    A* products = scratch + row_table_size<Row, A>(rows.share.rows);
    if (!Plain && (l.norm || l.project)) {
      if (count > 0) wide_step(t, count, parity, table, products);
      change(count, t_next, next, next_parity, 0, P, 0, H);
      return;
    }
    if (by_panels() && !every_step() && turn == 0) input_products(panel_begin, panel_end, products);
    const StepInputs x =
        every_step() && count > 0 ? step_inputs(t, count, products + kGroupBuffers * buffer()) : StepInputs{};
    const RowTiles tiles = row_tiles(count);
    const int64_t group = unit_group(count), stride = group * NV * W<A>;
    const int64_t groups = (panel_end - panel_begin + group - 1) / group;
    const auto at_group = [&](int64_t g, A* to) {
      const int64_t panel = panel_begin + zigzag(g, groups, turn) * group;
      const int64_t panels = panel_end - panel < group ? panel_end - panel : group, begin = panel * kUnits;
      const int64_t end = H - begin < panels * kUnits ? H : begin + panels * kUnits;
      const int64_t next = panel_begin + zigzag(g + 1 < groups ? g + 1 : g, groups, turn) * group;
      return Group{panel, panels, begin, end, to, to + buffer(), stride, next};
    };
    const auto ahead = [&](const Group& g) {
      return [&table, &g, this](int64_t i0, int64_t i1) SK_PREFETCHING {
        for (int64_t i = i0; i < i1; ++i) prefetch(table[i], g.begin);
      };
    };
    const auto end = [&](const Group& g) { change(count, t_next, next, next_parity, g.begin, g.end, g.begin, g.end); };
#if defined(SK_TILES)
    if (p.direction.packed_w_hh && count > 0) {
      // A group's cells are interleaved with the next group's products.
      A* const other_products = products + buffer();
      Group now = at_group(0, products);
      unit_products(count, now, parity, ahead(now));
      for (int64_t g = 1; g < groups; ++g) {
        const Group after = at_group(g, g & 1 ? other_products : products);
        const int64_t calls = panel_steps(count, after.panels, words(P));
        int64_t i = 0, credit = 0;
        Vec<A> c_new, o;
        const auto cells = [&] {
          for (credit += count; credit >= calls; credit -= calls, ++i) {
            if constexpr (kLstm) {
              const Vec<A> c_before = c_new, o_before = o;
              first_half(now, t, i, table[i], c_new, o);
              if (i > 0) second_half(now, t, i - 1, table[i - 1], c_before, o_before);
            } else {
              row_cells(now, t, i, table[i]);
            }
            prefetch(table[i], after.begin);
          }
        };
        panel_products_beside<TV>(count, after.panels, words(P), state.h[parity], state.h_stride,
                                  packed_panel(after.panel), after.products, stride, TV * W<A>, cells);
        if constexpr (kLstm) second_half(now, t, count - 1, table[count - 1], c_new, o);
        end(now);
        now = after;
      }
      for (int64_t i = 0; i < count; ++i) row_cells(now, t, i, table[i]);
      end(now);
      return;
    }
#endif
    for (int64_t g = 0; g < groups; ++g) {
      const Group now = at_group(g, products);
      if (x.rows)
        panel_products<A, TV>(count, now.panels * kParts, words(l.inputs), x.rows, x.stride, packed_inputs(now.panel),
                              now.inputs, now.stride, TV * W<A>,
                              p.direction.packed_w_hh ? packed_panel(now.panel) : packed_inputs(now.next),
                              [](int64_t, int64_t) {});
      unit_products(count, now, parity, ahead(now));
      if constexpr (kLstm) {
        // In two passes: a row's tanh of c~ would wait for its gates, with too few rows in flight to hide that.
        for (int64_t i = 0; i < count; ++i) row_gates(now, t, i, table[i]);
        for (int64_t i = 0; i < count; ++i) row_states(now, t, i, table[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) row_cells(now, t, i, table[i]);
      }
      end(now);
    }
  }

  // An LSTM's cell in two halves, up to c~ and from there: the second half of one row and the first half of the next
  // are independent. For groups of one panel.
  SK_INLINE void first_half(const Group& g, int64_t t, int64_t i, const ForwardRow<A>& r, Vec<A>& c_new,
                            Vec<A>& o) const {
    ZoneoutRow<A> zoneout[2];
    begin_zoneout(zoneout, t, i);
    const A* zx = by_panels() ? r.zx + g.panel * p.input.panel_stride : r.zx + g.begin;
    const Vec<A> c_prev = load(r.c + g.begin);
    c_new = gates_of(zx, by_panels() ? W<A> : H, g.products + i * g.stride, W<A>, c_prev, c_prev, g.begin, r.gates, o);
    keep_c(r, c_prev, c_new, g.begin, zoneout[1]);
  }
  SK_INLINE void second_half(const Group& g, int64_t t, int64_t i, const ForwardRow<A>& r, Vec<A> c_new,
                             Vec<A> o) const {
    ZoneoutRow<A> zoneout[2];
    begin_zoneout(zoneout, t, i);
    keep_h(r, o * tanh<A>(c_new), g.begin, zoneout[0]);
  }

  // Where the cells of W hidden units find their products and zx.
  struct Units {
    A* product;
    const A* zx;
  };
  SK_INLINE Units units_of(const Group& g, int64_t i, const ForwardRow<A>& r, int64_t u) const {
    const int64_t q = (u - g.begin) / kUnits, v = G == 1 ? (u - g.begin) % kUnits : 0;
    const int64_t sum = i * g.stride + q * NV * W<A> + v;
    if (every_step()) return {g.products + sum, g.inputs + sum};
    return {g.products + sum, by_panels() ? r.zx + (g.panel + q) * p.input.panel_stride + v : r.zx + u};
  }
  SK_INLINE int64_t zx_gate() const { return by_panels() ? W<A> : H; }

  SK_INLINE void row_cells(const Group& g, int64_t t, int64_t i, const ForwardRow<A>& r) const {
    ZoneoutRow<A> zoneout[2];
    begin_zoneout(zoneout, t, i);
    for (int64_t u = g.begin; u < g.end; u += W<A>) {
      const Units units = units_of(g, i, r, u);
      cell(r, units.zx, zx_gate(), units.product, u, zoneout);
    }
  }
  // An LSTM's cells up to c~, which replaces the products together with o, and from there.
  SK_INLINE void row_gates(const Group& g, int64_t t, int64_t i, const ForwardRow<A>& r) const {
    ZoneoutRow<A> zoneout[2];
    begin_zoneout(zoneout, t, i);
    for (int64_t u = g.begin; u < g.end; u += W<A>) {
      const Units units = units_of(g, i, r, u);
      Vec<A> o;
      const Vec<A> c_prev = load(r.c + u);
      const Vec<A> c_new = gates_of(units.zx, zx_gate(), units.product, W<A>, c_prev, c_prev, u, r.gates, o);
      keep_c(r, c_prev, c_new, u, zoneout[1]);
      store(units.product, c_new);
      store(units.product + W<A>, o);
    }
  }
  SK_INLINE void row_states(const Group& g, int64_t t, int64_t i, const ForwardRow<A>& r) const {
    ZoneoutRow<A> zoneout[2];
    begin_zoneout(zoneout, t, i);
    for (int64_t u = g.begin; u < g.end; u += W<A>) {
      const A* product = units_of(g, i, r, u).product;
      keep_h(r, load(product + W<A>) * tanh<A>(load(product)), u, zoneout[0]);
    }
  }

  SK_INLINE void cell(const ForwardRow<A>& r, const A* zx, int64_t zx_gate, const A* product, int64_t u,
                      ZoneoutRow<A> (&zoneout)[2]) const {
    Vec<A> o;
    if constexpr (kLstm) {
      const Vec<A> c_prev = load(r.c + u);
      const Vec<A> c_new = gates_of(zx, zx_gate, product, W<A>, c_prev, c_prev, u, r.gates, o);
      keep_c(r, c_prev, c_new, u, zoneout[1]);
      keep_h(r, o * tanh<A>(c_new), u, zoneout[0]);
    } else {
      const Vec<A> h_prev = adds_h(kCell) ? load(r.h + u) : Vec<A>{};
      keep_h(r, gates_of(zx, zx_gate, product, W<A>, h_prev, h_prev, u, r.gates, o), u, zoneout[0]);
    }
  }

  // Prefetches what the cell will read and write, while the products are computed.
  SK_INLINE void prefetch(const ForwardRow<A>& r, int64_t u) const {
    if (!by_panels())
      for (int g = 0; g < G; ++g) __builtin_prefetch(r.zx + g * H + u);
#if !defined(SK_TILES)
    else if (!every_step())
      for (int v = 0; v < NV; ++v) __builtin_prefetch(r.zx + u / kUnits * p.input.panel_stride + v * W<A>);
#endif
    if (r.gates)
      for (int g = 0; g < R; ++g) __builtin_prefetch(r.gates + g * H + u, 1);
    if (kLstm && r.cells) __builtin_prefetch(r.cells + u, 1);
    if (kDepthStep == 1) prefetch_as<A>(l.dtype, p.output, r.output + u);
  }

  const A* norm_part(int64_t offset) const { return static_cast<const A*>(p.direction.norm) + offset; }

  // From one row's products, and c_prev or h_prev, to gates, c~ and o, or h^: norm and gates only.
  void wide_gates(const A* zx, A* zh, const A* c_prev, const A* h_prev, A* gates, A* c_new, A* o) const {
    if (l.norm) norm_row(zh, G * H, l.eps, norm_part(0), norm_part(G * H), zh);
    for (int64_t u = 0; u < H; u += W<A>) {
      const Vec<A> none = {};
      Vec<A> out = {};
      const Vec<A> previous_c = c_prev ? load_upto(c_prev + u, H - u) : none;
      const Vec<A> previous_h = h_prev ? load_upto(h_prev + u, H - u) : none;
      store_upto(c_new + u, gates_of_row(zx, zh, previous_c, previous_h, u, gates, out), H - u);
      if (kLstm) store_upto(o + u, out, H - u);
    }
  }
  // gates_of() where the gates of zh are not padded to whole vectors.
  SK_INLINE Vec<A> gates_of_row(const A* zx, const A* zh, Vec<A> c_prev, Vec<A> h_prev, int64_t u, A* gates,
                                Vec<A>& o) const {
    A z[G * W<A>];
    for (int g = 0; g < G; ++g) store(z + g * W<A>, load_upto(zh + g * H + u, H - u));
    return gates_of(zx + u, H, z, W<A>, c_prev, h_prev, u, gates, o);
  }

  void wide_products(int64_t count, int parity, A* products) const {
    const int64_t group = unit_group(count), panels = (H + kUnits - 1) / kUnits, stride = group * NV * W<A>;
    const RowTiles tiles = row_tiles(count);
    for (int64_t panel = 0; panel < panels; panel += group) {
      const int64_t some = panels - panel < group ? panels - panel : group;
      unit_products(count, {panel, some, 0, 0, products, nullptr, stride, panel + group < panels ? panel + group : 0},
                    parity, [](int64_t, int64_t) {});
      for (int64_t q = 0; q < some; ++q)
        for (int64_t i = 0; i < count; ++i)
          for (int v = 0; v < NV; ++v) {
            const int64_t u = (panel + q) * kUnits + (G == 1 ? v * W<A> : 0), gate = G == 1 ? 0 : v;
            if (u < H)
              store_upto(state.zh + i * state.z_stride + gate * H + u,
                         load(products + i * stride + (q * NV + v) * W<A>), H - u);
          }
    }
  }

  void wide_step(int64_t t, int64_t count, int parity, const ForwardRow<A>* table, A* products) const {
    wide_products(count, parity, products);
    for (int64_t i = 0; i < count; ++i) {
      const ForwardRow<A>& r = table[i];
      A *zh = state.zh + i * state.z_stride, *c_new = state.c_new + i * state.c_stride,
        *o = state.o + i * state.c_stride;
      if (p.products) copy_columns(zh, at(p.products, (t * l.batch + rows.row(i)) * G * H), 0, G * H);
      wide_gates(r.zx, zh, kLstm ? r.c : nullptr, kLstm ? nullptr : r.h, r.gates, c_new, o);
      if (!kLstm) continue;
      ZoneoutRow<A> zoneout[2];
      begin_zoneout(zoneout, t, i);
      for (int64_t u = 0; u < H; u += W<A>) keep_c(r, load(r.c + u), load(c_new + u), u, zoneout[1]);
      wide_output(c_new, o);
    }
    // h~, in the memory of c~; or its projection.
    const A* h_hat = state.c_new;
    int64_t h_hat_stride = state.c_stride;
    if (l.project) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t u = 0; u < H; u += W<A>)
          store_numbers(state.h_wide + i * state.wide_stride, u, load_upto(h_hat + i * h_hat_stride + u, H - u), H - u);
      const RowTiles tiles(count);
      packed_rows_product(count, P, words(H), state.h_wide, state.wide_stride,
                          static_cast<const A*>(p.direction.packed_w_hr), state.h_hat, state.plain_stride);
      h_hat = state.h_hat, h_hat_stride = state.plain_stride;
    }
    for (int64_t i = 0; i < count; ++i) {
      const ForwardRow<A>& r = table[i];
      ZoneoutRow<A> zoneout[2];
      begin_zoneout(zoneout, t, i);
      for (int64_t u = 0; u < P; u += W<A>) keep_h(r, load(h_hat + i * h_hat_stride + u), u, zoneout[0]);
    }
  }

  // h~ = o tanh(Nc(c~)) of a row; overwrites c_new.
  void wide_output(A* c_new, const A* o) const {
    if (l.norm) norm_row(c_new, H, l.eps, norm_part(2 * G * H), norm_part(2 * G * H + H), c_new);
    for (int64_t u = 0; u < H; u += W<A>) store(c_new + u, load(o + u) * tanh<A>(load(c_new + u)));
  }
};

template <class A, Cell kCell>
void forward_cell_turn(const RnnForward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end,
                       A* scratch) {
  if (plain(*p.layer, p.direction)) Forward<A, kCell, true>(p, share).turn(turn, begin, end, scratch);
  else Forward<A, kCell, false>(p, share).turn(turn, begin, end, scratch);
}

// Recomputes the gates of tokens.
template <class A>
int64_t activate_scratch(const RnnLayer& l) {
  return padded_stride<A>(gate_count(l.cell) * l.hidden) + 2 * padded_stride<A>(l.hidden);
}
template <class A, Cell kCell>
void activate_tokens(const RnnActivate& p, int64_t begin, int64_t end, A* scratch) {
  const RnnLayer& l = *p.layer;
  const RnnShare share{.first = 0, .stride = 1, .rows = 1, .state = scratch, .starts = l.starts};
  const RnnForward forward{.layer = p.layer, .direction = p.direction};
  const Forward<A, kCell, false> f(forward, share);
  constexpr int64_t G = gate_count(kCell), R = saved_count(kCell);
  A *zh = scratch, *c_new = zh + padded_stride<A>(G * l.hidden), *o = c_new + padded_stride<A>(l.hidden);
  for (int64_t token = begin; token < end; ++token) {
    copy_columns(static_cast<const A*>(p.zh) + token * G * l.hidden, zh, 0, G * l.hidden);
    f.wide_gates(static_cast<const A*>(p.zx) + token * p.zx_stride, zh,
                 p.c_prev ? static_cast<const A*>(p.c_prev[token]) : nullptr, nullptr,
                 static_cast<A*>(p.gates) + token * R * l.hidden, c_new, o);
  }
}

template <class A>
int64_t forward_panels(const RnnLayer& l) {
  const int64_t units = gate_count(l.cell) == 1 ? kPanel<A> : W<A>;
  return (l.hidden + units - 1) / units;
}
template <class A>
int64_t forward_scratch(const RnnLayer& l, int64_t rows) {
  const int64_t packed = packs_on_the_fly(l) ? unpacked_scratch<A>(rows, l.width, group_size<A>()) : 0;
  const int64_t products = kGroupBuffers * rows * group_size<A>() + staged_inputs<A>(l, rows) + packed;
  const int64_t inputs = input_scratch<A>(l.inputs);
  return row_table_size<ForwardRow<A>, A>(rows) + (products > inputs ? products : inputs);
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
