// The backward loop over the steps.
//
// dh of the previous step is one product of the gates' gradients with W_hh. Each panel of it is followed at once by
// that step's cell for the same hidden units. The gradients by token are the product's operand, and the large products
// for dx and dW read them after the loop. c~ is recomputed from the gates and c': reading it would cost more.
#pragma once

#include "sequence.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
struct BackwardState {
  int64_t h_stride, c_stride, bytes;
  A *dh, *direct, *dc;  // direct: the part of dh that bypasses the gates
  A *dh_hat, *dh_wide;  // wide turns: gradients of a projection's output and input
  A* dh_operand;        // wide turns: dh_hat as an operand, and
  int64_t operand;      // its row stride
  A *c_new, *d_o;       // wide turns: one row

  BackwardState(const RnnLayer& l, int64_t rows, void* memory) {
    h_stride = panel_stride<A>(l.width);
    c_stride = panel_stride<A>(l.hidden);
    Pieces pieces(memory);
    const auto take = [&](int64_t count, int64_t stride) SK_INLINED { return pieces.take<A>(count * stride); };
    const int64_t wide = l.norm || l.project ? rows : 0;
    dh = take(rows, h_stride);
    direct = take(rows, h_stride);
    dc = take(rows, c_stride);
    dh_hat = take(wide, h_stride);
    dh_wide = take(wide, c_stride);
    operand = operand_stride<A>(l.width);
    dh_operand = kTerms == 1 ? dh_hat : take(l.project ? rows : 0, operand);
    if (kTerms == 1) operand = h_stride;
    c_new = take(wide > 0, c_stride);
    d_o = take(wide > 0, c_stride);
    bytes = pieces.bytes();
  }
};

template <class A>
struct BackwardRow {
  const A *gates, *c_prev, *grad_cells;  // c_prev: null for zeros
  const void* h_prev;                    // null for zeros
  int64_t h_prev_at, grad_output;        // indices of the first elements
  Number<A>* grad_z;
  A *dh, *direct, *dc, *sums;
};

template <class A, Cell kCell, bool Plain>
struct Backward {
  static constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  static constexpr int kPart = static_cast<int>(recurrent_part(kCell));
  static constexpr bool kLstm = kCell == Cell::lstm, kGru = kCell == Cell::gru, kAdds = adds_h(kCell);
  static constexpr bool kReadsH = kGru || kCell == Cell::interpolated;

  const RnnBackward& p;
  const RnnLayer& l;
  const ShareRows rows;
  const BackwardState<A> state;
  const int64_t H, P;
  const Peepholes<A> peepholes;

  Backward(const RnnBackward& p_, const RnnShare& share)
      : p(p_),
        l(*p_.layer),
        rows(l, p_.direction, share, p_.step_begin, p_.step_end),
        state(l, share.rows, share.state),
        H(l.hidden),
        P(l.width),
        peepholes{static_cast<const A*>(p_.direction.peephole), l.hidden} {}

  static SK_INLINE const A* at(const void* base, int64_t offset) {
    return base ? static_cast<const A*>(base) + offset : nullptr;
  }

  SK_INLINE BackwardRow<A> row_at(int64_t t, int64_t i) const {
    const int64_t row = rows.row(i), place = t * l.batch + row, saved = p.by_token ? rows.token(t, i) : place;
    BackwardRow<A> r{.gates = at(p.gates, saved * R * H),
                     .c_prev = nullptr,
                     .grad_cells = at(p.grad_cells, place * H),
                     .h_prev = nullptr,
                     .h_prev_at = 0,
                     .grad_output = place * p.output_stride,
                     .grad_z = static_cast<Number<A>*>(p.grad_z) + rows.token(t, i) * p.grad_z_stride,
                     .dh = state.dh + i * state.h_stride,
                     .direct = state.direct + i * state.h_stride,
                     .dc = state.dc + i * state.c_stride,
                     .sums = p.sums ? static_cast<A*>(p.sums) + row * p.sum_columns : nullptr};
    if ((kLstm || kReadsH) && !rows.reset(t, i)) {
      const int64_t previous = rows.previous(t, i);
      if (kLstm) {
        r.c_prev = previous < 0 ? at(p.c0, row * H) : at(p.cells, (previous * l.batch + row) * H);
      } else {
        r.h_prev = previous < 0 ? p.h0 : p.output;
        r.h_prev_at = previous < 0 ? row * P : (previous * l.batch + row) * p.output_stride;
      }
    }
    return r;
  }
  SK_INLINE void begin_zoneout(ZoneoutRow<A> (&zoneout)[2], int64_t t, int64_t i) const {
    if (Plain || !l.zoneout.active) return;
    for (int which = 0; which < 2; ++which)
      zoneout[which].begin(l.zoneout, which, rows.random_row(p.direction.index, which, t, i));
  }

  // dh of the previous step, columns [begin, end), from the product of all its rows.
  void carry(int64_t t, int64_t count, int64_t begin, int64_t end, int64_t c_begin, int64_t c_end, const A* products,
             int64_t stride) const {
    for (int64_t i = 0; i < count; ++i) {
      A *dh = state.dh + i * state.h_stride, *direct = state.direct + i * state.h_stride;
      if (rows.reset(t, i)) {
        zero_columns(dh, begin, end);
        if (kLstm) zero_columns(state.dc + i * state.c_stride, c_begin, c_end);
        continue;
      }
      const A* mask = Plain ? nullptr : at(p.direction.mask, rows.row(i) * P);
      for (int64_t u = begin; u < end; u += W<A>) {
        Vec<A> v = load(products + i * stride + u - begin);
        if (!Plain && mask) v *= load_upto(mask + u, end - u);
        if (kAdds || (!Plain && l.zoneout.active)) v += load(direct + u);
        store(dh + u, v);
      }
    }
  }

  // Rows whose sequence begins after the next step leave; rows whose sequence ends with it enter.
  void change(int64_t count, int64_t next, int64_t begin, int64_t end, int64_t c_begin, int64_t c_end) const {
    for (int64_t i = next < count ? next : count; i < (next < count ? count : next); ++i) {
      const int64_t row = rows.row(i);
      A *dh = state.dh + i * state.h_stride, *dc = state.dc + i * state.c_stride;
      A *grad_h = static_cast<A*>(p.grad_h) + row * P, *grad_c = kLstm ? static_cast<A*>(p.grad_c) + row * H : nullptr;
      const bool leaves = i >= next;
      copy_columns(leaves ? dh : grad_h, leaves ? grad_h : dh, begin, end);
      if (kLstm) copy_columns(leaves ? dc : grad_c, leaves ? grad_c : dc, c_begin, c_end);
    }
  }

  void turn(int64_t turn, int64_t panel_begin, int64_t panel_end, A* scratch) const {
    const int64_t steps = p.step_end - p.step_begin, step = p.step_end - 1 - turn;
    const int64_t t = turn > 0 ? rows.time(step + 1) : 0, t_next = turn < steps ? rows.time(step) : 0;
    const int64_t count = turn > 0 ? rows.count(t) : 0, next = turn < steps ? rows.count(t_next) : 0;
    using Row = BackwardRow<A>;
    const Row* table = row_table<Row>(scratch, next, [&](int64_t i) { return row_at(t_next, i); });
    A* products = scratch + row_table_size<Row, A>(rows.share.rows);
    const A* d = nullptr;
    if (count > 0) {
      const auto* numbers = static_cast<const Number<A>*>(l.norm ? p.grad_zh : p.grad_z) + (l.norm ? 0 : kPart * H);
      d = reinterpret_cast<const A*>(numbers + rows.token(t, 0) * p.grad_z_stride);
    }
    const int64_t d_stride = rows.share.stride * p.grad_z_stride / kTerms, depth = words(G * H);
    const A* packed = static_cast<const A*>(p.direction.packed_w_hh);
    if (!Plain && (l.norm || l.project)) {
      if (count > 0) {
        const RowTiles tiles(count);
        packed_rows_product(count, P, depth, d, d_stride, packed, state.dh_hat, state.h_stride);
        carry(t, count, 0, P, 0, H, state.dh_hat, state.h_stride);
      }
      change(count, next, 0, P, 0, H);
      if (next > 0) wide_step(t_next, next, table);
      return;
    }
    const RowTiles tiles(count);
    const int64_t group = packed ? panel_group<kPanelVecs>(count) : kSlicePanels<A>;
    A* slice = products + rows.share.rows * kSlicePanels<A> * kPanel<A>;
    const int64_t groups = (panel_end - panel_begin + group - 1) / group;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t panel = panel_begin + zigzag(g, groups, turn) * group;
      const int64_t panels = panel_end - panel < group ? panel_end - panel : group;
      const int64_t after = panel_begin + zigzag(g + 1 < groups ? g + 1 : g, groups, turn) * group;
      const int64_t begin = panel * kPanel<A>, last = begin + panels * kPanel<A>, end = H < last ? H : last;
      const int64_t stride = group * kPanel<A>;
      if (packed)
        panel_products<A, kPanelVecs>(
            count, panels, depth, d, d_stride, packed + panel * padded_words(G * H) * kPanel<A>, products, stride,
            kPanel<A>, packed + after * padded_words(G * H) * kPanel<A>, [&](int64_t i0, int64_t i1) SK_PREFETCHING {
              for (int64_t i = i0; i < i1 && i < next; ++i) prefetch(table[i], begin, end);
            });
      else if (count > 0) slice_products(count, panels, d, d_stride, p.direction.w_hh, panel, products, stride, slice);
      carry(t, count, begin, end, begin, end, products, stride);
      change(count, next, begin, end, begin, end);
      for (int64_t i = 0; i < next; ++i) {
        const BackwardRow<A>& r = table[i];
        ZoneoutRow<A> zoneout[2];
        begin_zoneout(zoneout, t_next, i);
        for (int64_t u = begin; u < end; u += W<A>) {
          const Vec<A> dh = outer_gradient(r, u, zoneout[0]);
          if constexpr (kLstm) {
            Vec<A> s[4], slope;
            const Vec<A> c_prev = load_gates(r, u, s), c_new = s[1] * c_prev + s[0] * s[2];
            const Vec<A> tanh_c = tanh<A>(c_new, slope);
            lstm(r, u, s, c_prev, c_new, dh * s[3] * slope, dh * tanh_c, zoneout[1]);
          } else {
            other_cell(r, u, dh);
          }
        }
      }
    }
  }

  SK_INLINE void prefetch(const BackwardRow<A>& r, int64_t begin, int64_t end) const {
    for (int64_t u = begin; u < end; u += 64 / static_cast<int64_t>(sizeof(A))) {
      for (int g = 0; g < R; ++g) __builtin_prefetch(r.gates + g * H + u);
      for (int g = 0; g < R; ++g) __builtin_prefetch(r.grad_z + g * H + u, 1);
      if (kLstm && r.c_prev) __builtin_prefetch(r.c_prev + u);
      if (kReadsH && r.h_prev) prefetch_as<A>(l.dtype, r.h_prev, r.h_prev_at + u);
      if (p.grad_output) prefetch_as<A>(l.dtype, p.grad_output, r.grad_output + u);
    }
  }

  // The gradient of h^ from that of h.
  SK_INLINE Vec<A> outer_gradient(const BackwardRow<A>& r, int64_t u, ZoneoutRow<A>& zoneout) const {
    Vec<A> dh = load(r.dh + u);
    if (p.grad_output) dh += load_as<A>(l.dtype, p.grad_output, r.grad_output + u, P - u);
    if (Plain || !l.zoneout.active) return dh;
    Vec<A> dh_new;
    store(r.direct + u, zoneout.split(dh, u, dh_new));
    return dh_new;
  }

  // Loads the saved gates; returns c'.
  SK_INLINE Vec<A> load_gates(const BackwardRow<A>& r, int64_t u, Vec<A> (&s)[R]) const {
    for (int g = 0; g < R; ++g) s[g] = load_upto(r.gates + g * H + u, H - u);
    return kLstm && r.c_prev ? load_upto(r.c_prev + u, H - u) : Vec<A>{};
  }

  SK_INLINE void add_to(A* sum, int64_t u, Vec<A> v) const {
    store_upto(sum + u, load_upto(sum + u, H - u) + v, H - u);
  }
  SK_INLINE void keep(const BackwardRow<A>& r, int64_t u, const Vec<A> (&d)[R]) const {
    for (int g = 0; g < R; ++g) store_upto(r.grad_z + g * H + u, d[g], H - u);
    if (H - u <= W<A>) end_operand(r.grad_z + R * H);
  }

  // dc: of c~ through the output; d_o: of o.
  SK_INLINE void lstm(const BackwardRow<A>& r, int64_t u, const Vec<A> (&s)[4], Vec<A> c_prev, Vec<A> c_new, Vec<A> dc,
                      Vec<A> d_o, ZoneoutRow<A>& zoneout) const {
    Vec<A> later = load(r.dc + u), direct = {}, d[4];
    if (r.grad_cells) later += load_upto(r.grad_cells + u, H - u);
    if (!Plain && l.zoneout.active) direct = zoneout.split(later, u, later);
    Vec<A> dc_prev = lstm_gradient<A, Plain>(s, c_prev, dc + later, d_o, peepholes, u, d);
    if (!Plain && l.zoneout.active) dc_prev += direct;
    store(r.dc + u, dc_prev);
    keep(r, u, d);
    if (Plain || !peepholes.p || !r.sums) return;
    add_to(r.sums, u, d[0] * c_prev);
    add_to(r.sums + H, u, d[1] * c_prev);
    add_to(r.sums + 2 * H, u, d[3] * c_new);
  }
  SK_INLINE void other_cell(const BackwardRow<A>& r, int64_t u, Vec<A> dh) const {
    Vec<A> s[R], d[R];
    load_gates(r, u, s);
    if constexpr (kAdds) {
      Vec<A> direct = dh, h_prev = {};
      if (kReadsH && r.h_prev) h_prev = load_as<A>(l.dtype, r.h_prev, r.h_prev_at + u, P - u);
      if constexpr (kGru) direct = gru_gradient<A>(s, h_prev, dh, d);
      else if constexpr (kReadsH) direct = interpolated_gradient<A>(s, h_prev, dh, d);
      else d[0] = dh * (A(1) - s[0] * s[0]);
      store(r.direct + u, Plain || !l.zoneout.active ? direct : direct + load(r.direct + u));
    } else {
      d[0] = rnn_gradient<A>(s[0], dh, l.cell == Cell::relu);
    }
    keep(r, u, d);
  }

  // With a norm or a projection: a step of all rows, whole rows at a time.
  void wide_step(int64_t t, int64_t count, const BackwardRow<A>* table) const {
    for (int64_t i = 0; i < count; ++i) {
      const BackwardRow<A>& r = table[i];
      ZoneoutRow<A> zoneout[2];
      begin_zoneout(zoneout, t, i);
      A* dh_hat = state.dh_hat + i * state.h_stride;
      for (int64_t u = 0; u < P; u += W<A>) store(dh_hat + u, outer_gradient(r, u, zoneout[0]));
      if (p.grad_h_hat) copy_columns(dh_hat, static_cast<A*>(p.grad_h_hat) + rows.token(t, i) * P, 0, P);
    }
    A* dh_wide = state.dh_hat;
    int64_t stride = state.h_stride;
    if (l.project) {
      dh_wide = state.dh_wide, stride = state.c_stride;
      if constexpr (kTerms > 1) as_operand(count, P, state.dh_hat, state.h_stride, state.dh_operand, state.operand);
      const RowTiles tiles(count);
      packed_rows_product(count, H, words(P), state.dh_operand, state.operand,
                          static_cast<const A*>(p.direction.packed_w_hr), dh_wide, stride);
    }
    for (int64_t i = 0; i < count; ++i) {
      const BackwardRow<A>& r = table[i];
      if constexpr (kLstm) {
        wide_lstm(r, t, i, dh_wide + i * stride);
      } else {
        for (int64_t u = 0; u < H; u += W<A>) other_cell(r, u, load(dh_wide + i * stride + u));
      }
      if (!l.norm) continue;
      const int64_t token = rows.token(t, i), columns = G * H;
      const A* raw = at(p.products, (p.by_token ? token : t * l.batch + rows.row(i)) * columns);
      A* sums = norm_sums(r);
      Number<A>* grad_zh = static_cast<Number<A>*>(p.grad_zh) + token * p.grad_z_stride;
      norm_gradient_row(raw, columns, RowNorm<A>(raw, columns, l.eps), norm_part(0), r.grad_z + kPart * H, grad_zh,
                        sums, sums ? sums + columns : nullptr);
      end_operand(grad_zh + columns);
    }
  }

  const A* norm_part(int64_t offset) const { return static_cast<const A*>(p.direction.norm) + offset; }
  A* norm_sums(const BackwardRow<A>& r) const { return r.sums ? r.sums + (peepholes.p ? 3 * H : 0) : nullptr; }

  // dh: on entry the gradient of h~; overwritten by that of c~ through the output.
  void wide_lstm(const BackwardRow<A>& r, int64_t t, int64_t i, A* dh) const {
    A* c_new = state.c_new;
    Vec<A> s[4];
    for (int64_t u = 0; u < H; u += W<A>) {
      const Vec<A> c_prev = load_gates(r, u, s);
      store(c_new + u, s[1] * c_prev + s[0] * s[2]);
    }
    const RowNorm<A> norm = l.norm ? RowNorm<A>(c_new, H, l.eps) : RowNorm<A>{};
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t n = H - u;
      Vec<A> y = load(c_new + u), slope;
      if (l.norm)
        y = norm.normalized(y) * load_upto(norm_part(2 * G * H) + u, n) + load_upto(norm_part(2 * G * H + H) + u, n);
      const Vec<A> tanh_c = tanh<A>(y, slope), o = load_upto(r.gates + 3 * H + u, n), d = load(dh + u);
      if (p.h_wide) store_upto(static_cast<A*>(p.h_wide) + rows.token(t, i) * H + u, o * tanh_c, n);
      store(state.d_o + u, d * tanh_c);
      store(dh + u, d * o * slope);
    }
    if (l.norm) {
      A* sums = norm_sums(r);
      if (sums) sums += 2 * G * H;
      norm_gradient_row(c_new, H, norm, norm_part(2 * G * H), dh, dh, sums, sums ? sums + H : nullptr);
    }
    ZoneoutRow<A> zoneout[2];
    begin_zoneout(zoneout, t, i);
    for (int64_t u = 0; u < H; u += W<A>) {
      const Vec<A> c_prev = load_gates(r, u, s);
      lstm(r, u, s, c_prev, load(c_new + u), load(dh + u), load(state.d_o + u), zoneout[1]);
    }
  }
};

template <class A, Cell kCell>
void backward_cell_turn(const RnnBackward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end,
                        A* scratch) {
  if (plain(*p.layer, p.direction)) Backward<A, kCell, true>(p, share).turn(turn, begin, end, scratch);
  else Backward<A, kCell, false>(p, share).turn(turn, begin, end, scratch);
}

template <class A>
int64_t backward_panels(const RnnLayer& l) {
  return (l.width + kPanel<A> - 1) / kPanel<A>;
}
template <class A>
int64_t backward_scratch(const RnnLayer& l, int64_t rows) {
  const int64_t table = row_table_size<BackwardRow<A>, A>(rows);
  if (packs_on_the_fly_back(l)) return table + rows * kSlicePanels<A> * kPanel<A> + kSliceScratch<A>;
  return table + (rows > 2 ? rows : 2) * kTilePanels<kPanelVecs> * kPanel<A>;
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
