// LSTM on CPU, forward and backward through time. Compiled once per instruction-set tier.
//
//   i, f, o = sigmoid(W x_t + U h_{t-1} + b),  g = tanh(likewise),  c_t = f c_{t-1} + i g,  h_t = o tanh(c_t)
//   dc += dh o (1 - tanh^2 c_t);  di' = dc g i(1-i),  df' = dc c_{t-1} f(1-f),  dg' = dc i (1-g^2),
//   do' = dh tanh(c_t) o(1-o);  dc_{t-1} = dc f,  dh_{t-1} = U^T d',  dU = sum d' h_{t-1}^T,  dW = sum d' x_t^T
//   Hochreiter & Schmidhuber 1997; the forget gate: Gers et al. 2000. Gates in torch's order i, f, g, o.
//
// The host runs chunks of steps: the products with W for all steps of a chunk (blocked_gemm.h), then the sequence loop
// here; backward the loop first, then the products for dx and dW. A chunk's gates are still in cache when the next pass
// reads them, and backward needs the gates' gradients of one chunk, not of the whole sequence.
//
// Sequences of a batch are independent, so a thread takes some rows of the batch through the steps alone: no barrier,
// and the same bits on any number of threads and in any batch. U is packed into panels [unit tile][k][gate][W]: one
// micro-tile gives the four gates of W units for up to kCellRows rows, and the cell follows while they are in L1. What
// the cell reads is prefetched under the product before it. h, c and the gates stay in the accumulation type from step
// to step; rounded values leave through `output` only. Backward, a panel of dh is followed at once by the previous
// step's cell of the same units.
//
// Tried and lost (AVX-512, one core of Zen 4; T = 128, B = 16, I = H = 256, float32; 9.2 ms a product at peak rate):
//   - torch's matmul (MKL) for the products that are not in the loop: 93-97 GF/s, blocked_gemm.h 104-110.
//   - gates' gradients of all steps kept for one product at the end: 10 % of a training step, most of it page faults.
//   - the cell of all units after the whole product, without prefetch: backward loop 11.9 ms against 11.2, forward loop
//     11.0 against 10.7. Prefetching everything at once instead of a few lines a tile gains nothing: the tiles wait.
#include "blocked_gemm.h"
#include "rnn.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Rows of a micro-tile that holds four gates: as many as the registers take.
constexpr int kCellRows = kGemmVecs == 4 ? kGemmRows : kGemmRows / 2;

template <class A>
SK_INLINE int64_t state_stride(int64_t hidden) {
  return round_up<A>(hidden) + kPad<A>;
}
template <class A>
SK_INLINE int64_t gates_stride(int64_t hidden) {
  return 4 * round_up<A>(hidden) + kPad<A>;
}

template <class A>
struct Gates {
  Vec<A> i, f, g, o;
};

template <class A>
SK_INLINE Gates<A> activate(const Gates<A>& z) {
  return {sigmoid<A>(z.i), sigmoid<A>(z.f), tanh<A>(z.g), sigmoid<A>(z.o)};
}

// dc is the gradient of c_t, and becomes that of c_{t-1}. Returns the gradients of the gates before activation.
template <class A>
SK_INLINE Gates<A> cell_gradient(const Gates<A>& s, Vec<A> c_prev, Vec<A> c, Vec<A> dh, Vec<A>& dc) {
  Vec<A> slope;
  const Vec<A> tanh_c = tanh<A>(c, slope);
  const Vec<A> dct = dc + dh * s.o * slope;
  dc = dct * s.f;
  return {dct * s.g * (s.i * (A(1) - s.i)), dct * c_prev * (s.f * (A(1) - s.f)), dct * s.i * (A(1) - s.g * s.g),
          dh * tanh_c * (s.o * (A(1) - s.o))};
}

template <class T>
SK_INLINE Gates<acc_t<T>> load_gates(const T* p, int64_t hidden, int64_t n) {
  return {load_upto(p, n), load_upto(p + hidden, n), load_upto(p + 2 * hidden, n), load_upto(p + 3 * hidden, n)};
}
template <class T>
SK_INLINE void store_gates(T* p, int64_t hidden, const Gates<acc_t<T>>& s, int64_t n) {
  store_upto(p, s.i, n);
  store_upto(p + hidden, s.f, n);
  store_upto(p + 2 * hidden, s.g, n);
  store_upto(p + 3 * hidden, s.o, n);
}

// U h_{t-1} of W units for up to kCellRows rows of the batch: products[row][gate][W].
template <class A>
SK_INLINE void recurrent_products(int64_t rows, int64_t hidden, const A* h, int64_t h_stride, const A* panel,
                                  A* products) {
  switch (rows) {
#define SK_CASE(R)                                                                            \
  case R:                                                                                     \
    if constexpr (R <= kCellRows)                                                             \
      gemm_tile<A, R, 4>(hidden, h, h_stride, 1, panel, 4 * W<A>, products, 4 * W<A>, false); \
    break;
    SK_CASE(1) SK_CASE(2) SK_CASE(3) SK_CASE(4) SK_CASE(5) SK_CASE(6)
#undef SK_CASE
  }
}

template <class T>
void forward_rows(const LstmForward& p, int64_t begin, int64_t end, acc_t<T>* scratch) {
  using A = acc_t<T>;
  const int64_t H = p.hidden, rows = end - begin, stride = state_stride<A>(H);
  const int64_t tiles = (rows + kCellRows - 1) / kCellRows, tile_rows = rows / tiles, longer = rows % tiles;
  A *h = scratch, *h_next = scratch + rows * stride;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t u = 0; u < H; u += W<A>)
      store(h + r * stride + u, load_upto(static_cast<const A*>(p.h) + (begin + r) * H + u, H - u));
  const auto row = [&](int64_t s) { return (p.reverse ? p.steps - 1 - s : s) * p.batch + begin; };
  const A* c_prev = p.step_begin == 0 ? static_cast<const A*>(p.c0) + begin * H
                                      : static_cast<const A*>(p.cells) + row(p.step_begin - 1) * H;
  for (int64_t s = p.step_begin; s < p.step_end; ++s) {
    const int64_t row0 = row(s);
    A* gates = static_cast<A*>(p.gates) + row0 * 4 * H;
    A* c = static_cast<A*>(p.cells) + row0 * H;
    T* output = static_cast<T*>(p.output) + row0 * H;
    for (int64_t u = 0; u < H; u += W<A>) {
      const A* panel = static_cast<const A*>(p.packed_w_hh) + u * 4 * H;
      for (int64_t tile = 0, r0 = 0; tile < tiles; ++tile) {
        const int64_t r1 = r0 + tile_rows + (tile < longer);
        for (int64_t r = r0; r < r1; ++r) {  // arrives while the product is computed
          for (int64_t g = 0; g < 4; ++g) __builtin_prefetch(gates + (r * 4 + g) * H + u, 1);
          __builtin_prefetch(c_prev + r * H + u);
          __builtin_prefetch(c + r * H + u, 1);
          __builtin_prefetch(output + r * H + u, 1);
        }
        A products[kCellRows * 4 * W<A>];  // [row][gate][W]
        recurrent_products<A>(r1 - r0, H, h + r0 * stride, stride, panel, products);
        const A* product = products;
        for (int64_t r = r0; r < r1; ++r, product += 4 * W<A>) {
          A* gate = gates + r * 4 * H + u;
          const Gates<A> x = load_gates(gate, H, H - u);
          const Gates<A> s = activate<A>({x.i + load(product), x.f + load(product + W<A>),
                                          x.g + load(product + 2 * W<A>), x.o + load(product + 3 * W<A>)});
          const Vec<A> c_new = s.f * load_upto(c_prev + r * H + u, H - u) + s.i * s.g;
          const Vec<A> h_new = s.o * tanh<A>(c_new);
          store_gates(gate, H, s, H - u);
          store_upto(c + r * H + u, c_new, H - u);
          store_upto(output + r * H + u, h_new, H - u);
          store(h_next + r * stride + u, h_new);
        }
        r0 = r1;
      }
    }
    c_prev = c;
    A* swap = h;
    h = h_next;
    h_next = swap;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t u = 0; u < H; u += W<A>)
      store_upto(static_cast<A*>(p.h) + (begin + r) * H + u, load(h + r * stride + u), H - u);
}

template <class T>
struct BackwardRows {
  using A = acc_t<T>;
  const LstmBackward& p;
  const int64_t begin, rows, H = p.hidden, stride = state_stride<A>(H), wide = gates_stride<A>(H);
  A *dh, *dc;  // gradients of h_t and c_t, (rows, stride)

  // The row of (step s, `begin`) in a (steps, batch, ...) tensor, and in grad_gates, which holds the steps at hand.
  int64_t row(int64_t s) const { return (p.reverse ? p.steps - 1 - s : s) * p.batch + begin; }
  int64_t gate_row(int64_t s) const { return (p.reverse ? p.step_end - 1 - s : s - p.step_begin) * p.batch + begin; }

  // What cell_step will read and write.
  void announce(int64_t s, int64_t u, int64_t units, Ahead& ahead) const {
    const int64_t row_bytes = H * sizeof(A), bytes = units * sizeof(A);
    ahead.add(static_cast<const A*>(p.gates) + row(s) * 4 * H + u, row_bytes, 4 * rows, bytes);
    ahead.add(static_cast<A*>(p.grad_gates) + gate_row(s) * 4 * H + u, row_bytes, 4 * rows, bytes);
    ahead.add(static_cast<const T*>(p.grad_output) + row(s) * H + u, H * sizeof(T), rows, units * sizeof(T));
    if (s > 0) ahead.add(static_cast<const A*>(p.cells) + row(s - 1) * H + u, row_bytes, rows, bytes);
  }

  // The gates' gradients of units [u0, u1) at step s from dh and dc; also into dz (rows, wide), where the product reads
  // them.
  void cell_step(int64_t s, int64_t u0, int64_t u1, A* dz) const {
    const A* c_prev =
        s == 0 ? static_cast<const A*>(p.c0) + begin * H : static_cast<const A*>(p.cells) + row(s - 1) * H;
    const A* c = static_cast<const A*>(p.cells) + row(s) * H;
    const A* gates = static_cast<const A*>(p.gates) + row(s) * 4 * H;
    const T* grad_output = static_cast<const T*>(p.grad_output) + row(s) * H;
    A* grad_gates = static_cast<A*>(p.grad_gates) + gate_row(s) * 4 * H;
    A* sum = p.grad_gates_sum ? static_cast<A*>(p.grad_gates_sum) + begin * 4 * H : nullptr;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t u = u0; u < u1; u += W<A>) {
        const int64_t at = r * H + u, gate = r * 4 * H + u, n = H - u;
        Vec<A> dc_t = load(dc + r * stride + u);
        const Vec<A> dh_t = load(dh + r * stride + u) + load_upto(grad_output + at, n);
        const Gates<A> d = cell_gradient<A>(load_gates(gates + gate, H, n), load_upto(c_prev + at, n),
                                            load_upto(c + at, n), dh_t, dc_t);
        store(dc + r * stride + u, dc_t);
        store_gates(grad_gates + gate, H, d, n);
        store_gates(dz + r * wide + u, H, d, n);
        if (sum) {
          const Gates<A> t = s == p.steps - 1 ? Gates<A>{} : load_gates(sum + gate, H, n);
          store_gates(sum + gate, H, {t.i + d.i, t.f + d.f, t.g + d.g, t.o + d.o}, n);
        }
      }
    }
  }
};

template <class T>
void backward_rows(const LstmBackward& p, int64_t begin, int64_t end, acc_t<T>* scratch) {
  using A = acc_t<T>;
  BackwardRows<T> b{p, begin, end - begin};
  const int64_t H = b.H, rows = b.rows, stride = b.stride, slices = (4 * H + kBlockDepth - 1) / kBlockDepth;
  b.dh = scratch, b.dc = b.dh + rows * stride;
  A *dz = b.dc + rows * stride, *dz_next = dz + rows * b.wide;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = (begin + r) * H + u;
      store(b.dh + r * stride + u, load_upto(static_cast<const A*>(p.grad_h) + at, H - u));
      store(b.dc + r * stride + u, load_upto(static_cast<const A*>(p.grad_c) + at, H - u));
    }
  }
  b.cell_step(p.step_end - 1, 0, H, dz);
  for (int64_t s = p.step_end - 1; s >= p.step_begin; --s) {
    // dh_{s-1} = dz_s W_hh, a panel of units at a time; step s - 1 of those units follows at once.
    for (int64_t u = 0; u < H; u += kPanel<A>) {
      const int64_t units = H - u < kPanel<A> ? H - u : kPanel<A>;
      const A* panel = static_cast<const A*>(p.packed_w_hh) + u * 4 * H;
      Ahead ahead(slices * tile_count<A>(rows, units));
      if (s > p.step_begin) b.announce(s - 1, u, units, ahead);
      for (int64_t k = 0; k < 4 * H; k += kBlockDepth)
        multiply_panels<A>(rows, units, 4 * H - k < kBlockDepth ? 4 * H - k : kBlockDepth, dz + k, b.wide, 1,
                           panel + k * kPanel<A>, 0, b.dh + u, stride, k > 0, ahead);
      if (s > p.step_begin) b.cell_step(s - 1, u, u + units, dz_next);
    }
    A* swap = dz;
    dz = dz_next;
    dz_next = swap;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = (begin + r) * H + u;
      store_upto(static_cast<A*>(p.grad_h) + at, load(b.dh + r * stride + u), H - u);
      store_upto(static_cast<A*>(p.grad_c) + at, load(b.dc + r * stride + u), H - u);
    }
  }
}

template <class T>
void cell_forward_rows(const LstmCellForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t H = p.hidden;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = r * H + u, gate = r * 4 * H + u, n = H - u;
      const Gates<A> s = activate<A>(load_gates(static_cast<const T*>(p.gates) + gate, H, n));
      const Vec<A> c = s.f * load_upto(static_cast<const T*>(p.c) + at, n) + s.i * s.g;
      store_gates(static_cast<A*>(p.activated) + gate, H, s, n);
      store_upto(static_cast<T*>(p.c_new) + at, c, n);
      store_upto(static_cast<T*>(p.h) + at, s.o * tanh<A>(c), n);
    }
  }
}

template <class T>
void cell_backward_rows(const LstmCellBackward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t H = p.hidden;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t u = 0; u < H; u += W<A>) {
      const int64_t at = r * H + u, gate = r * 4 * H + u, n = H - u;
      Vec<A> dc = load_upto(static_cast<const T*>(p.grad_c) + at, n);
      const Gates<A> d = cell_gradient<A>(
          load_gates(static_cast<const A*>(p.activated) + gate, H, n), load_upto(static_cast<const T*>(p.c) + at, n),
          load_upto(static_cast<const T*>(p.c_new) + at, n), load_upto(static_cast<const T*>(p.grad_h) + at, n), dc);
      store_gates(static_cast<T*>(p.grad_gates) + gate, H, d, n);
      store_upto(static_cast<T*>(p.grad_c_prev) + at, dc, n);
    }
  }
}

template <class A>
void sum_rows(int64_t rows, int64_t columns, const A* source, A* sum) {
  for (int64_t c = 0; c < columns; c += W<A>) {
    Vec<A> total = {};
    for (int64_t r = 0; r < rows; ++r) total += load_upto(source + r * columns + c, columns - c);
    store_upto(sum + c, total, columns - c);
  }
}

// ---- entry points ---------------------------------------------------------------------------------------------------
int64_t packed_size(Dtype dtype, int64_t depth, int64_t columns, int64_t groups) {
  int64_t size = 0;
  SK_DISPATCH(dtype, size = depth * panel_count<acc_t<T>>(columns, groups) * panel_width<acc_t<T>>(groups));
  return size;
}

int64_t pack_items(const Packing& p) {
  int64_t panels = 0;
  SK_DISPATCH(p.dtype, panels = panel_count<acc_t<T>>(p.columns, p.groups));
  return panels * ((p.depth + kBlockDepth - 1) / kBlockDepth);
}

void pack(const Packing& p, int64_t item) { SK_DISPATCH(p.dtype, pack_item<T>(p, item)); }

int64_t multiply_scratch(Dtype dtype) {
  return dtype == Dtype::f64 ? kStagedA<double> + kBlockC<double> : kStagedA<float> + kBlockC<float>;
}

void multiply(const Product& p, int64_t item, void* scratch) {
  if (p.a_type == Dtype::f64) multiply_item(p, item, static_cast<double*>(scratch));
  else multiply_item(p, item, static_cast<float*>(scratch));
}

int64_t lstm_scratch(Dtype dtype, int64_t rows, int64_t hidden) {
  int64_t size = 0;
  SK_DISPATCH(dtype, size = rows * 2 * (state_stride<acc_t<T>>(hidden) + gates_stride<acc_t<T>>(hidden)));
  return size;
}

void lstm_forward(const LstmForward& p, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(p.dtype, forward_rows<T>(p, begin, end, static_cast<acc_t<T>*>(scratch)));
}

void lstm_backward(const LstmBackward& p, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(p.dtype, backward_rows<T>(p, begin, end, static_cast<acc_t<T>*>(scratch)));
}

void lstm_cell_forward(const LstmCellForward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, cell_forward_rows<T>(p, begin, end));
}

void lstm_cell_backward(const LstmCellBackward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, cell_backward_rows<T>(p, begin, end));
}

void sum(Dtype dtype, int64_t rows, int64_t columns, const void* source, void* total) {
  if (dtype == Dtype::f64) sum_rows(rows, columns, static_cast<const double*>(source), static_cast<double*>(total));
  else sum_rows(rows, columns, static_cast<const float*>(source), static_cast<float*>(total));
}

}  // namespace

const RnnKernels rnn_kernels = {packed_size,       pack_items,         pack,         multiply_scratch,
                                multiply,          lstm_scratch,       lstm_forward, lstm_backward,
                                lstm_cell_forward, lstm_cell_backward, sum};

}  // namespace SK_TIER
}  // namespace seqkern
