// The entry points of the recurrent kernels, for the types that a translation unit is made for: all of them
// (rnn_cpu.cpp), or bfloat16 with operands in pairs (rnn_bf16.cpp).
#pragma once

#include "rnn_backward.h"
#include "rnn_forward.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// ---- the cell alone, on gates that are already summed ---------------------------------------------------------------
template <class T, Cell kCell>
void cell_forward_rows(const RnnCellForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  const int64_t H = p.hidden;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = r * H + u, n = H - u;
      Vec<A> x[G], h[G], s[R];
      for (int g = 0; g < G; ++g) {
        x[g] = load_upto(static_cast<const T*>(p.x_gates) + r * G * H + g * H + u, n);
        h[g] = load_upto(static_cast<const T*>(p.h_gates) + r * G * H + g * H + u, n);
      }
      Vec<A> h_new;
      if constexpr (kCell == Cell::lstm) {
        for (int g = 0; g < 4; ++g) s[g] = x[g] + h[g];
        const Vec<A> c = lstm_gates<A, true>(s, load_upto(static_cast<const T*>(p.c) + at, n), {}, u);
        store_upto(static_cast<T*>(p.c_new) + at, c, n);
        h_new = s[3] * tanh<A>(c);
      } else if constexpr (kCell == Cell::gru) {
        h_new = gru_state<A>(x, h, load_upto(static_cast<const T*>(p.h) + at, n), s);
      } else {
        s[0] = h_new = rnn_state<A>(x[0] + h[0], p.cell == Cell::relu);
      }
      store_upto(static_cast<T*>(p.h_new) + at, h_new, n);
      for (int g = 0; g < R; ++g) store_upto(static_cast<A*>(p.activated) + r * R * H + g * H + u, s[g], n);
    }
  }
}

template <class T, Cell kCell>
void cell_backward_rows(const RnnCellBackward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  constexpr int G = static_cast<int>(gate_count(kCell)), R = static_cast<int>(saved_count(kCell));
  const int64_t H = p.hidden;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = r * H + u, gate = r * G * H + u, n = H - u;
      T* grad_x = static_cast<T*>(p.grad_x_gates) + gate;
      Vec<A> s[R], d[R], dh = load_upto(static_cast<const T*>(p.grad_h) + at, n);
      for (int g = 0; g < R; ++g) s[g] = load_upto(static_cast<const A*>(p.activated) + r * R * H + g * H + u, n);
      if constexpr (kCell == Cell::lstm) {
        Vec<A> slope, dc = p.grad_c ? load_upto(static_cast<const T*>(p.grad_c) + at, n) : Vec<A>{};
        const Vec<A> tanh_c = tanh<A>(load_upto(static_cast<const T*>(p.c_new) + at, n), slope);
        const Vec<A> c = load_upto(static_cast<const T*>(p.c) + at, n);
        dc = lstm_gradient<A, true>(s, c, dc + dh * s[3] * slope, dh * tanh_c, {}, u, d);
        store_upto(static_cast<T*>(p.grad_c_prev) + at, dc, n);
        for (int g = 0; g < 4; ++g) store_upto(grad_x + g * H, d[g], n);
      } else if constexpr (kCell == Cell::gru) {
        const Vec<A> direct = gru_gradient<A>(s, load_upto(static_cast<const T*>(p.h) + at, n), dh, d);
        store_upto(static_cast<T*>(p.grad_h_prev) + at, direct, n);
        T* grad_h = static_cast<T*>(p.grad_h_gates) + gate;
        for (int g = 0; g < 3; ++g) {
          store_upto(grad_x + g * H, d[(g + 1) % 3], n);
          store_upto(grad_h + g * H, d[g + 1], n);
        }
      } else {
        store_upto(grad_x, rnn_gradient<A>(s[0], dh, p.cell == Cell::relu), n);
      }
    }
  }
}

// ---- rows from and to anywhere --------------------------------------------------------------------------------------
template <class T>
void gather_rows(const RnnGather& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for (int64_t r = begin; r < end; ++r) {
    const T* row = static_cast<const T*>(p.rows[r]);
    const A* factor = p.factors ? static_cast<const A*>(p.factors[r]) : nullptr;
    A* out = static_cast<A*>(p.out) + r * p.out_stride;
    for (int64_t i = 0; i < p.columns; i += W<A>) {
      const int64_t n = p.columns - i;
      Vec<A> v = row ? load_upto(row + i, n) : Vec<A>{};
      if (factor && row) v *= load_upto(factor + i, n);
      if (p.bias) v += load_upto(static_cast<const A*>(p.bias) + i, n);
      store_upto(out + i, v, n);
    }
  }
}

template <class T>
void scatter_rows(const RnnScatter& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const auto copy = [&](auto of_source) {
    using S = decltype(of_source);
    for (int64_t r = begin; r < end; ++r) {
      const S* source = static_cast<const S*>(p.source) + r * p.source_stride;
      T* row = static_cast<T*>(p.rows[r]) + p.column;
      for (int64_t i = 0; i < p.columns; i += W<A>)
        store_upto(row + i, load_upto(source + i, p.columns - i), p.columns - i);
    }
  };
  if (kTerms > 1 && p.source_type == Dtype::bf16) copy(Number<A>{});
  else copy(A{});
}

// Some rows in the accumulation type, then in double: one chain over all steps would err several times as much.
constexpr int64_t kSumRows = 8;
template <class T>
void add_columns_of(int64_t rows, int64_t begin, int64_t end, const T* source, int64_t stride, double* sum) {
  using A = acc_t<T>;
  for (int64_t first = 0; first < rows; first += kSumRows) {
    const int64_t last = rows - first < kSumRows ? rows : first + kSumRows;
    for (int64_t c = begin; c < end; c += W<A>) {
      Vec<A> v = {};
      for (int64_t r = first; r < last; ++r) v += load_upto(source + r * stride + c, end - c);
      for (int i = 0; i < W<A> && i < end - c; ++i) sum[c + i] += static_cast<double>(v[i]);
    }
  }
}

// ---- entry points ---------------------------------------------------------------------------------------------------
#if defined(SK_PAIRS)
// Runs a statement with `T` bound to the element type, which is that of the layer or of its accumulators.
#define SK_BY_TYPE(dtype, ...) \
  if (dtype == Dtype::f32) {   \
    using T = float;           \
    __VA_ARGS__;               \
  } else {                     \
    using T = BFloat16;        \
    __VA_ARGS__;               \
  }
// Evaluates an expression in the accumulation type `A`.
#define SK_BY_ACC(dtype, ...) \
  using A = float;            \
  return __VA_ARGS__
#else
#define SK_BY_TYPE SK_DISPATCH
#define SK_BY_ACC(dtype, ...) \
  if (dtype == Dtype::f64) {  \
    using A = double;         \
    return __VA_ARGS__;       \
  }                           \
  using A = float;            \
  return __VA_ARGS__
#endif

// Runs a statement with the cell as the constant `kCell`: that of tanh for both RNNs, which part at run time.
#define SK_CELL(cell, ...)             \
  if (cell == Cell::lstm) {            \
    constexpr Cell kCell = Cell::lstm; \
    __VA_ARGS__;                       \
  } else if (cell == Cell::gru) {      \
    constexpr Cell kCell = Cell::gru;  \
    __VA_ARGS__;                       \
  } else {                             \
    constexpr Cell kCell = Cell::tanh; \
    __VA_ARGS__;                       \
  }

Dtype operand(Dtype dtype) {
  if (kTerms > 1) return Dtype::bf16;
  return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
}

int64_t packed_size(Dtype dtype, int64_t depth, int64_t columns, int64_t groups) {
  SK_BY_ACC(dtype, padded_units(depth) * panel_count<A>(columns, groups) * panel_width<A>(groups));
}

int64_t pack_items(const Packing& p) {
  const int64_t slice = kBlockDepth * kTerms, slices = (p.depth + slice - 1) / slice;
  SK_BY_ACC(p.dtype, panel_count<A>(p.columns, p.groups) * slices);
}

void pack(const Packing& p, int64_t item) { SK_BY_TYPE(p.dtype, pack_item<T>(p, item)); }

#if defined(SK_TILES)
int64_t cut(Product& p, int64_t threads) { return cut_for_tiles(p, threads); }
int64_t multiply_scratch(Dtype) { return kTileScratch; }
void multiply(const Product& p, int64_t item, void* scratch) {
  multiply_tiles_item(p, item, static_cast<float*>(scratch));
}
#else
// Smaller blocks where there are few, so that the threads end together: with 32 items a thread instead of 8 two busy
// cores take 1 to 7 % less time, two idle ones 0 to 2 %.
int64_t cut(Product& p, int64_t threads) {
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  const auto items = [&] { return blocks(p.rows, p.block_rows) * blocks(p.columns, p.block_columns); };
  p.block_rows = kBlockRows, p.block_columns = kBlockColumns;
  while (p.block_rows > kBlockRows / 4 && items() < 32 * threads) p.block_rows /= 2;
  return items();
}
int64_t multiply_scratch(Dtype dtype) { SK_BY_ACC(dtype, kStagedA + kBlockC<A>); }
void multiply(const Product& p, int64_t item, void* scratch) {
  SK_BY_ACC(p.a_type, multiply_item(p, item, static_cast<A*>(scratch)));
}
#endif

int64_t few_rows_item_count(const RnnFewRows& p) { SK_BY_ACC(p.b.dtype, few_rows_items<A>(p)); }
int64_t few_rows_scratch_size(const RnnFewRows& p) { SK_BY_ACC(p.b.dtype, few_rows_scratch<A>(p)); }
void few_rows(const RnnFewRows& p, int64_t item, void* scratch) {
  SK_BY_ACC(p.b.dtype, few_rows_item(p, item, static_cast<A*>(scratch)));
}

// Tiles of 4 rows and 2 vectors: C is written once, in four streams, and A and B are few.
template <class T>
void outer_rows(const RnnOuter& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  using Z = Number<A>;
  constexpr int kRows = 4, kVecs = 2;
  const auto in_all_lanes = [](Z z) {
    if constexpr (kTerms > 1) return broadcast<A>(bit_cast<float>(static_cast<uint32_t>(z.bits) << 16));
    else return broadcast<A>(z);
  };
  const auto tile = [&](auto whole, int64_t m, int64_t n_rows, int64_t n) {
    const int64_t rows = decltype(whole)::value ? kRows : n_rows;
    const int64_t left = decltype(whole)::value ? kVecs * W<A> : p.columns - n;
    Vec<A> acc[kRows][kVecs] = {};
    for (int64_t t = 0; t < p.tokens; ++t) {
      const T* row = static_cast<const T*>(p.b[t]);
      if (!row) continue;
      const Z* a = static_cast<const Z*>(p.a) + t * p.a_stride + m;
      Vec<A> x[kVecs];
      for (int v = 0; v < kVecs; ++v)
        x[v] = left >= kVecs * W<A> ? load(row + n + v * W<A>) : load_upto(row + n + v * W<A>, left - v * W<A>);
      for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < kVecs; ++v) acc[i][v] += in_all_lanes(a[i < rows ? i : 0]) * x[v];
    }
    by_element<A>(p.c_type, [&](auto element) {
      using C = decltype(element);
      for (int64_t i = 0; i < rows; ++i)
        for (int v = 0; v < kVecs && v * W<A> < left; ++v) {
          C* c = static_cast<C*>(p.c) + (m + i) * p.c_stride + n + v * W<A>;
          const int64_t count = left - v * W<A>;
          store_upto(c, p.accumulate ? load_upto(c, count) + acc[i][v] : acc[i][v], count);
        }
    });
  };
  for (int64_t m = begin; m < end; m += kRows)
    for (int64_t n = 0; n < p.columns; n += kVecs * W<A>) {
      if (end - m >= kRows && p.columns - n >= kVecs * W<A>) tile(std::true_type{}, m, kRows, n);
      else tile(std::false_type{}, m, end - m < kRows ? end - m : kRows, n);
    }
}
void outer(const RnnOuter& p, int64_t begin, int64_t end) { SK_BY_TYPE(p.b_type, outer_rows<T>(p, begin, end)); }

int64_t row_stride(Dtype dtype, int64_t columns) {
  SK_BY_ACC(dtype, padded_stride<A>(columns) + (kOperandEnd > kPad<A> ? kOperandEnd - kPad<A> : 0));
}

int64_t forward_panel_count(const RnnLayer& l) { SK_BY_ACC(l.dtype, forward_panels<A>(l)); }
int64_t forward_tile_rows(const RnnLayer& l) { return whole_tile(tile_vectors(gate_count(l.cell))); }
int64_t forward_state_size(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, ForwardState<A>(l, rows, nullptr).elements);
}
int64_t forward_scratch_size(const RnnLayer& l, int64_t rows) { SK_BY_ACC(l.dtype, forward_scratch<A>(l, rows)); }
// The input's product on tiles, unless the gates of a row are needed together.
int64_t forward_input_columns(const RnnLayer& l) {
#if defined(SK_TILES)
  return l.inputs > 0 && !l.norm && !l.project ? forward_panels<float>(l) * panel_width<float>(gate_count(l.cell)) : 0;
#else
  (void)l;
  return 0;
#endif
}
int64_t no_input_columns(const RnnLayer&) { return 0; }
int64_t backward_panel_count(const RnnLayer& l) { SK_BY_ACC(l.dtype, backward_panels<A>(l)); }
int64_t backward_tile_rows(const RnnLayer&) { return kTileRows<kGemmVecs>; }
int64_t backward_state_size(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, BackwardState<A>(l, rows, nullptr).elements);
}
int64_t backward_scratch_size(const RnnLayer& l, int64_t rows) { SK_BY_ACC(l.dtype, backward_scratch<A>(l, rows)); }

void forward_turn(const RnnForward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end, void* scratch) {
  SK_CELL(p.layer->cell,
          SK_BY_ACC(p.layer->dtype, forward_cell_turn<A, kCell>(p, share, turn, begin, end, static_cast<A*>(scratch))));
}
void backward_turn(const RnnBackward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end,
                   void* scratch) {
  SK_CELL(p.layer->cell, SK_BY_ACC(p.layer->dtype,
                                   backward_cell_turn<A, kCell>(p, share, turn, begin, end, static_cast<A*>(scratch))));
}

int64_t activate_size(const RnnLayer& l) { SK_BY_ACC(l.dtype, activate_scratch<A>(l)); }
void activate(const RnnActivate& p, int64_t begin, int64_t end, void* scratch) {
  SK_CELL(p.layer->cell, SK_BY_ACC(p.layer->dtype, activate_tokens<A, kCell>(p, begin, end, static_cast<A*>(scratch))));
}

void cell_forward(const RnnCellForward& p, int64_t begin, int64_t end) {
  SK_BY_TYPE(p.dtype, SK_CELL(p.cell, cell_forward_rows<T, kCell>(p, begin, end)));
}
void cell_backward(const RnnCellBackward& p, int64_t begin, int64_t end) {
  SK_BY_TYPE(p.dtype, SK_CELL(p.cell, cell_backward_rows<T, kCell>(p, begin, end)));
}

void gather(const RnnGather& p, int64_t begin, int64_t end) { SK_BY_TYPE(p.dtype, gather_rows<T>(p, begin, end)); }
void scatter(const RnnScatter& p, int64_t begin, int64_t end) { SK_BY_TYPE(p.dtype, scatter_rows<T>(p, begin, end)); }

void add_columns(Dtype dtype, int64_t rows, int64_t begin, int64_t end, const void* source, int64_t stride,
                 double* sum) {
  SK_BY_TYPE(dtype, add_columns_of(rows, begin, end, static_cast<const T*>(source), stride, sum));
}

constexpr RnnKernels kKernels = {
    operand,
    packed_size,
    pack_items,
    pack,
    cut,
    multiply_scratch,
    multiply,
    few_rows_item_count,
    few_rows_scratch_size,
    few_rows,
    outer,
    row_stride,
    {forward_panel_count, forward_tile_rows, forward_state_size, forward_scratch_size, forward_input_columns},
    {backward_panel_count, backward_tile_rows, backward_state_size, backward_scratch_size, no_input_columns},
    forward_turn,
    backward_turn,
    activate_size,
    activate,
    cell_forward,
    cell_backward,
    gather,
    scatter,
    add_columns};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
