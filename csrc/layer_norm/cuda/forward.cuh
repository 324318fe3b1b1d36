// Layer norm and RMS norm forward, with the dropout and residual addition before them, in CUDA C++.
//
// Equations (kernels/layer_norm.py): s = round(drop(x) + r), y = (s - mean) rstd weight + bias.
//
// The idea. A row is read once, in vectors of 16 bytes, and stays in registers: mean, deviations, variance and output
// come from the same copy. The team of threads that shares the row sums twice: first s / n (divided first, so that it
// cannot overflow), then d and d^2 of the deviations d = s - mean. The sum of d recovers the rounding error of the
// mean: at |mean| / std = 1e4 half a ulp of a float mean is 3e-4 of a std. shift = sum(d) / n is that error, so var =
// sum(d^2) / n - shift^2 loses no digits.
//
// Exact row sizes. A thread holds U vectors of a row (row.cuh), U from {1, 2, 3, 4}, for float also 6
// and 8; a team is any number of warps. 768 columns of bf16 are 3 vectors in each lane of a warp, 1536 are 3 vectors in
// each of 64 threads, 5120 are 4 vectors in each of 160: no lane is empty. layer_norm.cu chooses.
//
//     row                                 team                read
//     up to 1024 columns (512 fp64)       a warp, 4 a block   once
//     up to 8192 (4096 fp64)              a block             once
//     up to 16 times that                 a cluster, sm_90    once: a slice a block, sums by distributed shared memory
//     longer, or not in 16-byte vectors   a warp or a block   twice: forward_walk, from the cache where it fits
//
// Registers: 8 floats a vector (4 in fp32), so at most 32 a thread, and while they are read as many raw words again of
// 16-bit input and residual. Shared memory: a team's totals, under 2 KB. Bytes: the row in and out; with a residual two
// in, two out. 8 FLOP an element, so the floor is the copy of those bytes: 67 MB for 4096 x 4096 bf16, 14 us at 4.8
// TB/s. Dropout adds 7 rounds of Philox for every 4 elements, about 25 integer operations an element. The bits are
// drawn while the loads are in flight, and kept in one word.
//
// Squares that overflow (elements beyond 1e19) are taken again of d 2^-80: a rare branch, taken by the whole team.
// NOTES.md lists what was tried.
#pragma once

#include "row.cuh"

namespace seqkern {
namespace norm_cuda {

constexpr int kForwardThreads = 256;
// Blocks that a multiprocessor must hold at least. They leave 80, 128 or 255 registers a thread: the fewest that spill
// on no architecture.
template <class T, int U>
constexpr int kForwardBlocks = U <= 2 || kRowBytes<T, U> <= 48 ? 3 : (U <= 6 ? 2 : 1);

struct Forward {
  const void *input, *residual, *weight, *bias;  // null: no residual, no weight, no bias
  void *output, *sum, *mean, *rstd;              // mean null: not centred
  int64_t rows, columns, input_stride, residual_stride;
  NormDropout dropout;
  double eps, inverse;  // 1 / columns
  double weight_offset;
  bool round_before_weight, weight_wide, bias_wide, aligned;
  int team_warps, blocks;  // warps of a block, blocks of a cluster
};

// The input of the norm, rounded as the sum of two tensors is. The select between product and sum keeps the compiler
// from contracting them into a multiply-add, which would round once instead of twice.
template <class T, class A>
SK_DEVICE void add_residual(const Forward& p, unsigned keep, const A (&residual)[kElements<T>], A (&s)[kElements<T>]) {
  if (p.dropout.seed != nullptr) {
    const A scale = static_cast<A>(p.dropout.scale);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) s[i] = keep >> i & 1u ? product(s[i], scale) : A(0);
  }
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) s[i] = widen(narrow<T>(s[i] + residual[i]));
}

constexpr float kLargeVariance = 3e38f;  // above: squares may have overflowed

constexpr float kFit = 0x1p-80f;  // the squares of d kFit cannot overflow

// Not fmax, which would drop NaN.
template <class A>
SK_DEVICE A variance_of(A mean_square, A mean) {
  const A variance = mean_square - mean * mean;
  return variance < A(0) ? A(0) : variance;
}
template <class A>
SK_DEVICE A rstd_of(A variance, A fit, A eps) {  // eps is lost beside a variance that needed `fit`, unless that is 0
  return fit == A(1) || variance == A(0) ? A(1) / root(variance + eps) : fit / root(variance);
}

template <class T, class A>
SK_DEVICE void affine(const Forward& p, int64_t column, int count, bool aligned, A (&v)[kElements<T>]) {
  A parameter[kElements<T>];
  const A offset = static_cast<A>(p.weight_offset);
  if (p.round_before_weight) {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) v[i] = widen(narrow<T>(v[i]));
  }
  if (p.weight != nullptr) {
    load_parameter<T>(p.weight, p.weight_wide, column, count, aligned, parameter);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) v[i] *= parameter[i] + offset;
  }
  if (p.bias != nullptr) {
    load_parameter<T>(p.bias, p.bias_wide, column, count, aligned, parameter);
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) v[i] += parameter[i];
  }
}

// Rows that fit the registers of a team, U vectors a thread; everything is aligned.
template <class T, int U>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks<T, U>) forward_rows(Forward p) {
  using A = acc_t<T>;
  constexpr int E = kElements<T>;
  SK_SHARED(memory);
  Team<A> team(memory, p.team_warps, p.blocks);
  const A n = static_cast<A>(p.columns), inverse = static_cast<A>(p.inverse);
  const bool centred = p.mean != nullptr;
  const uint64_t seed = p.dropout.seed != nullptr ? static_cast<uint64_t>(*p.dropout.seed) : 0;
  const int first = team.thread * E, step = team.threads * E, columns = static_cast<int>(p.columns);

  for (int64_t row = team.block * team.per_block + team.within; row < p.rows;
       row += team.block_count * team.per_block) {
    A s[U][E];  // later the deviations
    {
      const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
      Vector<T> raw[U];
#pragma unroll
      for (int u = 0; u < U; ++u) raw[u] = load_vector(x + first + u * step, first + u * step < columns);
      if (p.residual != nullptr) {
        const T* r = static_cast<const T*>(p.residual) + row * p.residual_stride;
        T* sum = static_cast<T*>(p.sum) + row * p.columns;
        Vector<T> other[U];
#pragma unroll
        for (int u = 0; u < U; ++u) other[u] = load_vector(r + first + u * step, first + u * step < columns);
        const unsigned keep = kept_vectors<E, U>(p.dropout, seed, row, first, step);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          A residual[E];
          widen_vector<T>(raw[u], s[u]);
          widen_vector<T>(other[u], residual);
          add_residual<T>(p, keep >> (u * E), residual, s[u]);
          if (first + u * step < columns) store_vector(sum + first + u * step, narrow_vector<T>(s[u]));
        }
      } else {
#pragma unroll
        for (int u = 0; u < U; ++u) widen_vector<T>(raw[u], s[u]);
      }
    }

    A mean = 0;
    if (centred) {
      A total[1] = {0};
#pragma unroll
      for (int u = 0; u < U; ++u) {
        A share[E];
#pragma unroll
        for (int i = 0; i < E; ++i) share[i] = s[u][i] * inverse;
        total[0] += sum_of(share);
      }
      team.sum(total);
      mean = total[0];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const bool inside = first + u * step < columns;
#pragma unroll
        for (int i = 0; i < E; ++i) s[u][i] = inside ? s[u][i] - mean : A(0);
      }
    }
    A moments[2] = {0, 0};  // sums of the deviations and of their squares
#pragma unroll
    for (int u = 0; u < U; ++u) {
      A square[E];
#pragma unroll
      for (int i = 0; i < E; ++i) square[i] = s[u][i] * s[u][i];
      moments[0] += sum_of(s[u]);
      moments[1] += sum_of(square);
    }
    team.sum(moments);
    A fit = 1;
    if (sizeof(A) == 4 && !(moments[1] / n <= A(kLargeVariance))) {
      fit = A(kFit);
      moments[0] = moments[1] = 0;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        A d[E], square[E];
#pragma unroll
        for (int i = 0; i < E; ++i) {
          d[i] = s[u][i] * fit;
          square[i] = d[i] * d[i];
        }
        moments[0] += sum_of(d);
        moments[1] += sum_of(square);
      }
      team.sum(moments);
    }
    // Divided, not times `inverse`: exact when all elements are equal. In multiples of 1 / fit.
    const A mean_d = centred ? moments[0] / n : A(0), shift = mean_d / fit;
    const A rstd = rstd_of(variance_of(moments[1] / n, mean_d), fit, static_cast<A>(p.eps));
    if (team.thread == 0) {
      if (centred) static_cast<A*>(p.mean)[row] = mean + shift;
      static_cast<A*>(p.rstd)[row] = rstd;
    }

    T* y = static_cast<T*>(p.output) + row * p.columns;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int column = first + u * step;
      if (column >= columns) continue;
#pragma unroll
      for (int i = 0; i < E; ++i) s[u][i] = (s[u][i] - shift) * rstd;
      affine<T>(p, column, E, true, s[u]);
      store_vector(y + column, narrow_vector<T>(s[u]));
    }
  }
  team.leave();
}

// Any row: longer than a team's registers, or not in vectors of 16 bytes. The mean is estimated from the row's first
// columns, one vector a thread. If the estimate lies within half a standard deviation of the mean, one pass is enough;
// otherwise it is corrected and the row read again. A thread reads back only what it wrote itself.
template <class T>
__global__ void __launch_bounds__(kForwardThreads, 4) forward_walk(Forward p) {
  using A = acc_t<T>;
  constexpr int E = kElements<T>;
  constexpr int kFold = 16;  // vectors: limits how many numbers are added one after another at each level
  SK_SHARED(memory);
  Team<A> team(memory, p.team_warps, 1);
  const A n = static_cast<A>(p.columns);
  const bool centred = p.mean != nullptr;
  const uint64_t seed = p.dropout.seed != nullptr ? static_cast<uint64_t>(*p.dropout.seed) : 0;
  const int64_t first = int64_t{team.thread} * E, step = int64_t{team.threads} * E;

  for (int64_t row = team.block * team.per_block + team.within; row < p.rows;
       row += team.block_count * team.per_block) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    if (p.residual != nullptr) {
      const T* r = static_cast<const T*>(p.residual) + row * p.residual_stride;
      T* sum = static_cast<T*>(p.sum) + row * p.columns;
      for (int64_t column = first; column < p.columns; column += step) {
        const int count = static_cast<int>(min(int64_t{E}, p.columns - column));
        A s[E], residual[E];
        load_upto(x + column, count, p.aligned, s);
        load_upto(r + column, count, p.aligned, residual);
        const unsigned keep = p.dropout.seed != nullptr ? kept<E>(p.dropout, seed, row, column) : 0u;
        add_residual<T>(p, keep, residual, s);
        store_upto(sum + column, count, p.aligned, s);
      }
      x = sum;
    }

    A mean = 0;
    if (centred) {
      const A share = A(1) / static_cast<A>(min(step, p.columns));
      A head[1] = {0}, s[E];
      if (first < p.columns) {
        load_upto(x + first, static_cast<int>(min(int64_t{E}, p.columns - first)), p.aligned, s);
#pragma unroll
        for (int i = 0; i < E; ++i) s[i] *= share;
        head[0] = sum_of(s);
      }
      team.sum(head);
      mean = head[0];
    }
    A fit = 1, shift = 0, variance = 0;
    for (int reading = 0;; ++reading) {
      A moments[2] = {0, 0}, part[2] = {0, 0};
      int folds = 0;
      for (int64_t column = first; column < p.columns; column += step) {
        const int count = static_cast<int>(min(int64_t{E}, p.columns - column));
        A d[E], square[E];
        load_upto(x + column, count, p.aligned, d);
#pragma unroll
        for (int i = 0; i < E; ++i) {
          d[i] = i < count ? (d[i] - mean) * fit : A(0);
          square[i] = d[i] * d[i];
        }
        part[0] += sum_of(d);
        part[1] += sum_of(square);
        if (++folds % kFold == 0) {
          moments[0] += part[0];
          moments[1] += part[1];
          part[0] = part[1] = 0;
        }
      }
      moments[0] += part[0];
      moments[1] += part[1];
      team.sum(moments);
      const A mean_d = centred ? moments[0] / n : A(0);
      variance = variance_of(moments[1] / n, mean_d);
      shift = mean_d / fit;
      if (reading == 2) break;
      if (sizeof(A) == 4 && fit == A(1) && !(moments[1] / n <= A(kLargeVariance))) {
        fit = A(kFit);
      } else if (A(4) * mean_d * mean_d <= variance) {
        break;
      } else {
        mean += shift;
      }
    }
    const A rstd = rstd_of(variance, fit, static_cast<A>(p.eps));
    if (team.thread == 0) {
      if (centred) static_cast<A*>(p.mean)[row] = mean + shift;
      static_cast<A*>(p.rstd)[row] = rstd;
    }

    T* y = static_cast<T*>(p.output) + row * p.columns;
    for (int64_t column = first; column < p.columns; column += step) {
      const int count = static_cast<int>(min(int64_t{E}, p.columns - column));
      A v[E];
      load_upto(x + column, count, p.aligned, v);
#pragma unroll
      for (int i = 0; i < E; ++i) v[i] = (v[i] - mean - shift) * rstd;
      affine<T>(p, column, count, p.aligned, v);
      store_upto(y + column, count, p.aligned, v);
    }
  }
}

}  // namespace norm_cuda
}  // namespace seqkern
