// The loop over the steps, forward.
//
// A panel holds the gates of the same W units (RNN: kPanel units) over the whole depth, so that one run of tiles gives
// all that the cell of these units needs; the cell follows while it is in L1. Where a norm needs the whole row, or a
// projection follows, the products of all panels come first (wide_turn).
//
// The state h is written for the next step beside that of this one, as an operand: workers on the same rows read all of
// it. c, and h as it is added without a product, belong to the worker of their units.
#pragma once

#include "rnn_sequence.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Vectors of a panel, and of units in it.
template <int G>
constexpr int kPanelVecs = G == 1 ? kGemmVecs : G;
template <int G>
constexpr int kUnitVecs = G == 1 ? kGemmVecs : 1;

// Of a row, the products of panels that are worked on together: eight vectors for one or two rows, four gates of a
// cache line of units for more.
template <class A>
constexpr int64_t group_size() {
  const int64_t vectors = 4 * 64 / (W<A> * static_cast<int64_t>(sizeof(A)));
  return (vectors > 8 ? vectors : 8) * W<A>;
}

template <class A>
struct ForwardState {
  int64_t h_stride, plain_stride, c_stride, z_stride, wide_stride, elements;
  A *h[2], *plain_h, *c;      // h: the operand, of this step and the next; plain_h: h without mask and rounding
  A *zh, *c_new, *o, *h_hat;  // wide_turn: products, c~, o and what is projected
  A* h_wide;                  // wide_turn: h~, the operand of the projection

  ForwardState(const RnnLayer& l, int64_t rows, void* memory) {
    h_stride = operand_stride<A>(l.width);
    plain_stride = panel_stride<A>(l.width);
    wide_stride = operand_stride<A>(l.hidden);
    c_stride = panel_stride<A>(l.hidden);
    z_stride = padded_stride<A>(gate_count(l.cell) * l.hidden);
    A* const base = static_cast<A*>(memory);
    A* next = base;
    const auto take = [&](bool needed, int64_t stride) {
      A* const at = next;
      if (needed) next += rows * stride;
      return at;
    };
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
    elements = next - base;
  }
};

// One row at one step, as the cell sees it. Null where there is nothing to write.
template <class A>
struct ForwardRow {
  const A* zx;
  A *gates, *cells, *c, *h_next, *plain_h;
  const A *h, *mask;  // h: as it is added
  int64_t output;     // its first element
};

// Plain: no peepholes, no zoneout, no recurrent mask, no norm, no projection.
template <class A, Cell kCell, bool Plain>
struct Forward {
  static constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  static constexpr int NV = kPanelVecs<G>, kUnits = kUnitVecs<G> * W<A>;
  // A panel is worked on in parts as wide as a tile: their products come to lie side by side.
  static constexpr int TV = static_cast<int>(tile_vectors(G)), kParts = NV / TV;
  static constexpr bool kLstm = kCell == Cell::lstm;
  static constexpr bool kPlainH = !Plain || kTerms > 1;  // whether the operand is not h itself

  const RnnForward& p;
  const RnnLayer& l;
  const Rows rows;
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

  SK_INLINE ForwardRow<A> row_at(int64_t t, int64_t i, int parity) const {
    const int64_t row = rows.row(i), place = t * l.batch + row;
    return {at(p.zx, rows.token(t, i) * p.zx_stride),
            at(p.gates, place * R * H),
            at(p.cells, place * H),
            state.c + i * state.c_stride,
            state.h[parity ^ 1] + i * state.h_stride,
            state.plain_h + i * state.plain_stride,
            kPlainH ? state.plain_h + i * state.plain_stride : state.h[parity] + i * state.h_stride,
            mask_row(row),
            place * p.output_stride};
  }

  // The gates and c~ of W units from the sums; returns h^ (GRU, RNN), or c~ with o in `o`.
  SK_INLINE Vec<A> gates_of(const A* zx, const A* zh, int64_t zh_gate, Vec<A> c_prev, Vec<A> h_prev, int64_t u,
                            A* gates, Vec<A>& o) const {
    const int64_t n = H - u;
    if constexpr (kLstm) {
      Vec<A> z[4];
      for (int g = 0; g < 4; ++g) z[g] = load_upto(zx + g * H + u, n) + load(zh + g * zh_gate);
      const Vec<A> c_new = lstm_gates<A, Plain>(z, c_prev, peepholes, u);
      if (gates)
        for (int g = 0; g < 4; ++g) store_upto(gates + g * H + u, z[g], n);
      o = z[3];
      return c_new;
    } else if constexpr (kCell == Cell::gru) {
      Vec<A> x[3], h[3], s[4];
      for (int g = 0; g < 3; ++g) x[g] = load_upto(zx + g * H + u, n), h[g] = load(zh + g * zh_gate);
      if (p.direction.b_hn) h[2] += load_upto(static_cast<const A*>(p.direction.b_hn) + u, n);
      const Vec<A> h_new = gru_state<A>(x, h, h_prev, s);
      if (gates)
        for (int g = 0; g < 4; ++g) store_upto(gates + g * H + u, s[g], n);
      return h_new;
    } else {
      const Vec<A> h_new = rnn_state<A>(load_upto(zx + u, n) + load(zh), l.cell == Cell::relu);
      if (gates) store_upto(gates + u, h_new, n);
      return h_new;
    }
  }

  // The cell state of W units, from c~.
  SK_INLINE void keep_c(const ForwardRow<A>& r, Vec<A> c_prev, Vec<A> c_new, int64_t u, ZoneoutRow<A>& zoneout) const {
    if (!Plain && l.zoneout.active) c_new = zoneout.mix(c_prev, c_new, u);
    store(r.c + u, c_new);
    if (r.cells) store_upto(r.cells + u, c_new, H - u);
  }
  // The state of W units, from h^.
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

  // The rows of the next step: those that have ended leave, those that begin enter, and resets take effect. Columns
  // [begin, end) of what is `width` wide; parity is that of the buffer that the next step multiplies.
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

  // Panels that are worked on together: what one or two rows need to keep the multiply-adds busy; of more rows a cache
  // line of units, so that what the cells read and write is touched once.
  static int64_t unit_group(int64_t count) {
    const int64_t panels =
        count > 2 ? 64 / (kUnits * static_cast<int64_t>(sizeof(A))) : panel_group<TV>(count) / kParts;
    return panels > 1 ? panels : 1;
  }
  // The products of `panels` panels, at most unit_group(count), side by side in rows that are `stride` apart.
  template <class Before>
  SK_INLINE void unit_products(int64_t count, int64_t panel, int64_t panels, int parity, A* products, int64_t stride,
                               const Before& before) const {
    const A* packed = static_cast<const A*>(p.direction.packed_w_hh);
    if (!packed)
      return unpacked_products<A, TV>(count, p.direction.w_hh, panel, panels, state.h[parity], state.h_stride, products,
                                      stride, products + rows.share.rows * group_size<A>(), before);
    panel_products<A, TV>(count, panels * kParts, units(P), state.h[parity], state.h_stride,
                          packed + panel * padded_units(P) * NV * W<A>, products, stride, TV * W<A>, before);
  }

  RowTiles row_tiles(int64_t count) const { return RowTiles(p.direction.packed_w_hh ? count : kUnpackedRows); }

  void turn(int64_t turn, int64_t panel_begin, int64_t panel_end, A* scratch) const {
    const int64_t step = p.step_begin + turn - 1, steps = p.step_end - p.step_begin;
    const int64_t t = turn > 0 ? rows.time(step) : 0, t_next = turn < steps ? rows.time(step + 1) : 0;
    const int64_t count = turn > 0 ? rows.count(t) : 0, next = turn < steps ? rows.count(t_next) : 0;
    // A step reads the buffer of its parity and writes the other one, which the step after it reads.
    const int parity = static_cast<int>(step & 1), next_parity = parity ^ 1;
    using Row = ForwardRow<A>;
    const Row* table = row_table<Row>(scratch, count, [&](int64_t i) { return row_at(t, i, parity); });
    A* products = scratch + row_table_size<Row, A>(rows.share.rows);
    if (!Plain && (l.norm || l.project)) {
      if (count > 0) wide_step(t, count, parity, table, products);
      change(count, t_next, next, next_parity, 0, P, 0, H);
      return;
    }
    const RowTiles tiles = row_tiles(count);
    const int64_t group = unit_group(count), stride = group * NV * W<A>;
    const int64_t groups = (panel_end - panel_begin + group - 1) / group;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t panel = panel_begin + zigzag(g, groups, turn) * group;
      const int64_t panels = panel_end - panel < group ? panel_end - panel : group;
      const int64_t begin = panel * kUnits, end = H - begin < panels * kUnits ? H : begin + panels * kUnits;
      unit_products(count, panel, panels, parity, products, stride, [&](int64_t i0, int64_t i1) SK_PREFETCHING {
        for (int64_t i = i0; i < i1; ++i) fetch(table[i], begin);
      });
      for (int64_t i = 0; i < count; ++i) {
        const ForwardRow<A>& r = table[i];
        ZoneoutRow<A> zoneout[2];
        begin_zoneout(zoneout, t, i);
        for (int64_t u = begin; u < end; u += W<A>) {
          const int64_t q = (u - begin) / kUnits, v = G == 1 ? (u - begin) % kUnits : 0;
          cell(r, products + i * stride + q * NV * W<A> + v, u, zoneout);
        }
      }
      change(count, t_next, next, next_parity, begin, end, begin, end);
    }
  }

  SK_INLINE void cell(const ForwardRow<A>& r, const A* product, int64_t u, ZoneoutRow<A> (&zoneout)[2]) const {
    Vec<A> o;
    if constexpr (kLstm) {
      const Vec<A> c_prev = load(r.c + u);
      const Vec<A> c_new = gates_of(r.zx, product, W<A>, c_prev, c_prev, u, r.gates, o);
      keep_c(r, c_prev, c_new, u, zoneout[1]);
      keep_h(r, o * tanh<A>(c_new), u, zoneout[0]);
    } else {
      const Vec<A> h_prev = kCell == Cell::gru ? load(r.h + u) : Vec<A>{};
      keep_h(r, gates_of(r.zx, product, W<A>, h_prev, h_prev, u, r.gates, o), u, zoneout[0]);
    }
  }

  // What the cell will read and write arrives while the products are computed.
  SK_INLINE void fetch(const ForwardRow<A>& r, int64_t u) const {
    for (int g = 0; g < G; ++g) __builtin_prefetch(r.zx + g * H + u);
    if (r.gates)
      for (int g = 0; g < R; ++g) __builtin_prefetch(r.gates + g * H + u, 1);
    if (kLstm && r.cells) __builtin_prefetch(r.cells + u, 1);
    fetch_as<A>(l.dtype, p.output, r.output + u);
  }

  const A* norm_part(int64_t offset) const { return static_cast<const A*>(p.direction.norm) + offset; }

  // One row's products, and c_prev or h_prev, to gates, c~ and o, or h^; the norm and the gates only.
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
    return gates_of(zx, z, W<A>, c_prev, h_prev, u, gates, o);
  }

  void wide_products(int64_t count, int parity, A* products) const {
    const int64_t group = unit_group(count), panels = (H + kUnits - 1) / kUnits, stride = group * NV * W<A>;
    const RowTiles tiles = row_tiles(count);
    for (int64_t panel = 0; panel < panels; panel += group) {
      const int64_t some = panels - panel < group ? panels - panel : group;
      unit_products(count, panel, some, parity, products, stride, [](int64_t, int64_t) {});
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
    // h~, where c~ was; or its projection.
    const A* h_hat = state.c_new;
    int64_t h_hat_stride = state.c_stride;
    if (l.project) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t u = 0; u < H; u += W<A>)
          store_numbers(state.h_wide + i * state.wide_stride, u, load_upto(h_hat + i * h_hat_stride + u, H - u), H - u);
      const RowTiles tiles(count);
      few_rows_product(count, P, units(H), state.h_wide, state.wide_stride,
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

  // h~ = o tanh(Nc(c~)) of a row, which overwrites c_new.
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

// Gates of tokens again.
template <class A>
int64_t activate_scratch(const RnnLayer& l) {
  return padded_stride<A>(gate_count(l.cell) * l.hidden) + 2 * padded_stride<A>(l.hidden);
}
template <class A, Cell kCell>
void activate_tokens(const RnnActivate& p, int64_t begin, int64_t end, A* scratch) {
  const RnnLayer& l = *p.layer;
  const RnnShare share{0, 1, 1, scratch};
  const RnnForward forward{p.layer, p.direction, 0, 0,       nullptr, nullptr, nullptr,
                           0,       nullptr,     0, nullptr, nullptr, nullptr};
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
  const int64_t packed = packs_on_the_way(l) ? unpacked_scratch<A>(rows, l.width, group_size<A>()) : 0;
  return row_table_size<ForwardRow<A>, A>(rows) + rows * group_size<A>() + packed;
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
