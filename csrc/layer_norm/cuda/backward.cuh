// Layer norm and RMS norm backward, in CUDA C++: gradients of the residual, of the input before the dropout, of weight
// and bias.
//
//     xhat = (s - mean) rstd     g = dy weight     ds = rstd (g - sum(g) / n - xhat sum(g xhat) / n) + dsum
//     dr = ds     dx = drop(ds), the same mask     dweight = sum over rows of dy xhat     dbias = sum over rows of dy
//
// dsum is the gradient of the returned sum s. RMS norm has no sum(g). The stored mean is rounded; the deviations d = s
// - mean recover its rounding error, and all three sums are taken at once: shift = sum(d) / n, sum(g), and sum(g xhat)
// = rstd (sum(g d) - shift sum(g)). One barrier a row.
//
// The idea. A team (row.cuh) walks the rows of a part, a fixed range of rows. The raw words of s and dy
// stay in registers from the sums to the gradients; so do the team's sums for weight and bias: 24 registers a vector of
// 16-bit elements, 16 of fp32, 32 of fp64. A block has at most 256 threads, a multiprocessor two blocks: the grid fills
// the GPU once, and a block writes its sums once for at most 128 rows a team (longer sums in float lose digits). A
// block has as many teams as its threads allow, each with one row at a time. The sums of its teams are added in order
// through shared memory (at most 32 KB); reduce_parts then adds the parts in order. No atomics: the same bits every
// run.
//
// Rows beyond 8192 columns (4096 fp64) take a cluster, up to 16 times that. Longer rows, and rows that are not in
// vectors of 16 bytes, are read twice (backward_walk). Their sums for the parameters take a kernel of their own
// (backward_columns), column by column: 8 threads for each vector.
//
// Bytes: s, dy (and dsum) in, one or two gradients out: 3 to 5 times the matrix, 15 FLOP an element. The parts are 8
// bytes a column and block for each parameter, written and read: with 264 blocks and 4096 rows of bf16 a sixth of the
// matrices' bytes, less with more rows. Random bits are drawn ahead into one word. NOTES.md lists what was tried.
#pragma once

#include "row.cuh"

namespace seqkern {
namespace norm_cuda {

constexpr int kBackwardThreads = 256;
constexpr int kColumnsThreads = 256;  // backward_columns: 32 vectors by 8 rows
constexpr int kReduceWidth = 32, kReduceRows = 16;

struct Backward {
  const void *grad_output, *grad_sum, *input, *mean, *rstd, *weight;  // null: absent; mean null: not centred
  void *grad_residual, *grad_input, *shift;  // only with dropout: grad_input; only in backward_walk: shift
  void *weight_parts, *bias_parts;           // parts x columns; null: not needed
  int64_t rows, columns, grad_output_stride, grad_sum_stride, input_stride, parts, rows_per_part;
  NormDropout dropout;
  double weight_offset;
  bool weight_wide, aligned;
  int team_warps, blocks;  // warps of a block, blocks of a cluster
};

// Adds the gradient of the returned sum, then stores the gradients of the residual and, through the dropout, of the
// input.
template <class T, class A>
SK_DEVICE void store_gradients(const Backward& p, unsigned keep, int64_t row, int64_t column, int count, bool aligned,
                               A (&ds)[kElements<T>]) {
  constexpr int E = kElements<T>;
  if (p.grad_sum != nullptr) {
    A arrived[E];
    load_upto(static_cast<const T*>(p.grad_sum) + row * p.grad_sum_stride + column, count, aligned, arrived);
#pragma unroll
    for (int i = 0; i < E; ++i) ds[i] += arrived[i];
  }
  store_upto(static_cast<T*>(p.grad_residual) + row * p.columns + column, count, aligned, ds);
  if (p.dropout.seed != nullptr) {
    const A scale = static_cast<A>(p.dropout.scale);
#pragma unroll
    for (int i = 0; i < E; ++i) ds[i] = keep >> i & 1u ? ds[i] * scale : A(0);
    store_upto(static_cast<T*>(p.grad_input) + row * p.columns + column, count, aligned, ds);
  }
}

// g = dy weight, rounded the same way everywhere: a single column then has a gradient of exactly zero.
template <class T, class A>
SK_DEVICE void times_weight(const Backward& p, int64_t column, int count, bool aligned, const A (&dy)[kElements<T>],
                            A (&g)[kElements<T>]) {
  if (p.weight != nullptr) {
    const A offset = static_cast<A>(p.weight_offset);
    load_parameter<T>(p.weight, p.weight_wide, column, count, aligned, g);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) g[i] = product(g[i] + offset, dy[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) g[i] = dy[i];
  }
}

// Writes the block's sums, U vectors a thread, as row `part`. If the block has several teams, their sums are added in
// order.
template <class T, int U, class A>
SK_DEVICE void store_part(unsigned char* memory, const Backward& p, const Team<A>& team, int64_t part, void* parts,
                          const A (&sums)[U][kElements<T>]) {
  constexpr int E = kElements<T>;
  A* to = static_cast<A*>(parts) + part * p.columns;
  const int first = team.thread * E, step = team.threads * E, columns = static_cast<int>(p.columns);
  if (team.per_block == 1) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * step < columns) store_sums(to + first + u * step, E, true, sums[u]);
    }
    return;
  }
  A* mine = reinterpret_cast<A*>(memory + kTeamBytes<A>) + int64_t{team.within} * columns;
  __syncthreads();
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (first + u * step < columns) store_sums(mine + first + u * step, E, true, sums[u]);
  }
  __syncthreads();
  const A* all = reinterpret_cast<const A*>(memory + kTeamBytes<A>);
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += static_cast<int>(blockDim.x)) {
    A sum = 0;
    for (int i = 0; i < team.per_block; ++i) sum += all[i * columns + column];
    to[column] = sum;
  }
}

// Rows that fit the registers of a team, U vectors a thread; everything is aligned.
template <class T, int U>
__global__ void __launch_bounds__(kBackwardThreads, kRowBytes<T, U> <= (sizeof(T) == 2 ? 96 : 64) ? 2 : 1)
    backward_rows(Backward p) {
  using A = acc_t<T>;
  constexpr int E = kElements<T>;
  SK_SHARED(memory);
  Team<A> team(memory, p.team_warps, p.blocks);
  const A n = static_cast<A>(p.columns);
  const bool centred = p.mean != nullptr;
  const uint64_t seed = p.dropout.seed != nullptr ? static_cast<uint64_t>(*p.dropout.seed) : 0;
  const int first = team.thread * E, step = team.threads * E;

  for (int64_t part = team.block; part < p.parts; part += team.block_count) {
    A grad_weight[U][E] = {}, grad_bias[U][E] = {};
    const int64_t end = min((part + 1) * p.rows_per_part, p.rows);
    for (int64_t first_row = part * p.rows_per_part; first_row < end; first_row += team.per_block) {
      const int64_t row = first_row + team.within;  // teams advance together: a team without a row adds zeros
      const int columns = row < end ? static_cast<int>(p.columns) : 0;
      const T* x_row = static_cast<const T*>(p.input) + row * p.input_stride;
      const T* dy_row = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride;
      Vector<T> x_raw[U], dy_raw[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        x_raw[u] = load_vector(x_row + first + u * step, first + u * step < columns);
        dy_raw[u] = load_vector(dy_row + first + u * step, first + u * step < columns);
      }
      const A mean = centred && row < end ? static_cast<const A*>(p.mean)[row] : A(0);
      const A rstd = row < end ? static_cast<const A*>(p.rstd)[row] : A(0);
      const unsigned keep = kept_vectors<E, U>(p.dropout, seed, row, first, step);
      A sums[3] = {0, 0, 0};  // of d, g and g d
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (first + u * step >= columns) continue;
        A d[E], dy[E], g[E], gd[E];
        widen_vector<T>(x_raw[u], d);
        widen_vector<T>(dy_raw[u], dy);
        times_weight<T>(p, first + u * step, E, true, dy, g);
#pragma unroll
        for (int i = 0; i < E; ++i) {
          d[i] -= mean;
          gd[i] = g[i] * d[i];
        }
        sums[0] += sum_of(d);
        sums[1] += sum_of(g);
        sums[2] += sum_of(gd);
      }
      team.sum(sums);
      const A shift = centred ? sums[0] / n : A(0), mean_g = centred ? sums[1] / n : A(0);
      const A along = (sums[2] / n - shift * mean_g) * rstd;  // sum(g xhat) / n
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (first + u * step >= columns) continue;
        A xhat[E], dy[E], g[E];
        widen_vector<T>(x_raw[u], xhat);
        widen_vector<T>(dy_raw[u], dy);
        times_weight<T>(p, first + u * step, E, true, dy, g);
#pragma unroll
        for (int i = 0; i < E; ++i) {
          xhat[i] = (xhat[i] - mean - shift) * rstd;
          grad_weight[u][i] += dy[i] * xhat[i];
          grad_bias[u][i] += dy[i];
          g[i] = (g[i] - mean_g - xhat[i] * along) * rstd;
        }
        store_gradients<T>(p, keep >> (u * E), row, first + u * step, E, true, g);
      }
    }
    if (p.weight_parts != nullptr) store_part<T, U>(memory, p, team, part, p.weight_parts, grad_weight);
    if (p.bias_parts != nullptr) store_part<T, U>(memory, p, team, part, p.bias_parts, grad_bias);
  }
  team.leave();
}

// Any row, read twice. Stores the row's shift for backward_columns.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 3) backward_walk(Backward p) {
  using A = acc_t<T>;
  constexpr int E = kElements<T>;
  constexpr int kFold = 16;
  SK_SHARED(memory);
  Team<A> team(memory, p.team_warps, 1);
  const A n = static_cast<A>(p.columns);
  const bool centred = p.mean != nullptr;
  const uint64_t seed = p.dropout.seed != nullptr ? static_cast<uint64_t>(*p.dropout.seed) : 0;
  const int64_t first = int64_t{team.thread} * E, step = int64_t{team.threads} * E;

  for (int64_t row = team.block * team.per_block + team.within; row < p.rows;
       row += team.block_count * team.per_block) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    const T* dy_row = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride;
    const A mean = centred ? static_cast<const A*>(p.mean)[row] : A(0);
    const A rstd = static_cast<const A*>(p.rstd)[row];
    A sums[3] = {0, 0, 0}, part[3] = {0, 0, 0};  // of d, g and g d
    int folds = 0;
    for (int64_t column = first; column < p.columns; column += step) {
      const int count = static_cast<int>(min(int64_t{E}, p.columns - column));
      A d[E], dy[E], g[E], gd[E];
      load_upto(x + column, count, p.aligned, d);
      load_upto(dy_row + column, count, p.aligned, dy);
      times_weight<T>(p, column, count, p.aligned, dy, g);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        d[i] = i < count ? d[i] - mean : A(0);
        gd[i] = g[i] * d[i];
      }
      part[0] += sum_of(d);
      part[1] += sum_of(g);
      part[2] += sum_of(gd);
      if (++folds % kFold == 0) {
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          sums[k] += part[k];
          part[k] = 0;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] += part[k];
    team.sum(sums);
    const A shift = centred ? sums[0] / n : A(0), mean_g = centred ? sums[1] / n : A(0);
    const A along = (sums[2] / n - shift * mean_g) * rstd;
    if (p.shift != nullptr && team.thread == 0) static_cast<A*>(p.shift)[row] = shift;
    for (int64_t column = first; column < p.columns; column += step) {
      const int count = static_cast<int>(min(int64_t{E}, p.columns - column));
      A xhat[E], dy[E], g[E];
      load_upto(x + column, count, p.aligned, xhat);
      load_upto(dy_row + column, count, p.aligned, dy);
      times_weight<T>(p, column, count, p.aligned, dy, g);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        xhat[i] = (xhat[i] - mean - shift) * rstd;
        g[i] = (g[i] - mean_g - xhat[i] * along) * rstd;
      }
      const unsigned keep = p.dropout.seed != nullptr ? kept<E>(p.dropout, seed, row, column) : 0u;
      store_gradients<T>(p, keep, row, column, count, p.aligned, g);
    }
  }
}

// Parameter sums of the rows of backward_walk. Block (x, y) takes 32 vectors of columns and the rows of part y, each
// warp every 8th row. The sums of the warps are added in order.
template <class T>
__global__ void __launch_bounds__(kColumnsThreads) backward_columns(Backward p) {
  using A = acc_t<T>;
  constexpr int E = kElements<T>, kWarps = kColumnsThreads / 32, kWidth = 32 * E;
  SK_SHARED(memory);
  A* all = reinterpret_cast<A*>(memory);  // kWarps x kWidth
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t block_column = int64_t{blockIdx.x} * kWidth, column = block_column + lane * E;
  const int count = static_cast<int>(max(int64_t{0}, min(int64_t{E}, p.columns - column)));
  for (int64_t part = blockIdx.y; part < p.parts; part += gridDim.y) {
    A sums[2][E] = {};  // for weight and bias
    const int64_t end = min((part + 1) * p.rows_per_part, p.rows);
    for (int64_t row = part * p.rows_per_part + warp; row < end && count > 0; row += kWarps) {
      A dy[E];
      load_upto(static_cast<const T*>(p.grad_output) + row * p.grad_output_stride + column, count, p.aligned, dy);
#pragma unroll
      for (int i = 0; i < E; ++i) sums[1][i] += dy[i];
      if (p.weight_parts == nullptr) continue;
      const A mean = p.mean != nullptr ? static_cast<const A*>(p.mean)[row] : A(0);
      const A shift = p.mean != nullptr ? static_cast<const A*>(p.shift)[row] : A(0);
      const A rstd = static_cast<const A*>(p.rstd)[row];
      A x[E];
      load_upto(static_cast<const T*>(p.input) + row * p.input_stride + column, count, p.aligned, x);
#pragma unroll
      for (int i = 0; i < E; ++i) sums[0][i] += dy[i] * ((x[i] - mean - shift) * rstd);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      A* to = static_cast<A*>(k == 0 ? p.weight_parts : p.bias_parts);
      if (to == nullptr) continue;
      __syncthreads();
      store_sums(all + warp * kWidth + lane * E, E, true, sums[k]);
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kWidth; i += kColumnsThreads) {
        if (block_column + i >= p.columns) continue;
        A sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += all[w * kWidth + i];
        to[part * p.columns + block_column + i] = sum;
      }
    }
  }
}

struct Reduction {
  const void *weight_parts, *bias_parts;
  void *grad_weight, *grad_bias;  // null: not needed
  int64_t parts, columns;
};

// Adds the parts of 32 columns: a thread every 16th part, then the 16 sums in order. Row 0 of the grid does the weight,
// row 1 the bias.
template <class A>
__global__ void __launch_bounds__(kReduceWidth* kReduceRows) reduce_parts(Reduction p) {
  SK_SHARED(memory);
  A* all = reinterpret_cast<A*>(memory);  // kReduceRows x kReduceWidth
  const A* parts = static_cast<const A*>(blockIdx.y == 0 ? p.weight_parts : p.bias_parts);
  A* grad = static_cast<A*>(blockIdx.y == 0 ? p.grad_weight : p.grad_bias);
  if (grad == nullptr) return;
  const int x = static_cast<int>(threadIdx.x) % kReduceWidth, y = static_cast<int>(threadIdx.x) / kReduceWidth;
  const int64_t column = int64_t{blockIdx.x} * kReduceWidth + x;
  A sum = 0;
  if (column < p.columns) {
#pragma unroll 4
    for (int64_t part = y; part < p.parts; part += kReduceRows) sum += parts[part * p.columns + column];
  }
  all[y * kReduceWidth + x] = sum;
  __syncthreads();
  if (y > 0 || column >= p.columns) return;
  sum = all[x];
#pragma unroll
  for (int i = 1; i < kReduceRows; ++i) sum += all[i * kReduceWidth + x];
  grad[column] = sum;
}

}  // namespace norm_cuda
}  // namespace seqkern
