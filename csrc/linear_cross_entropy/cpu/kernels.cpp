// Cross-entropy between the matrix products, on CPU. Compiled once per instruction-set tier.
//
//   z = x W^T + b, capped: cap tanh(z / cap)
//   lse = log sum_j exp z_j,   loss = (1 - e) w_y (lse - z_y) + (e / V) sum_j w_j (lse - z_j) + zeta lse^2
//   d loss/d z_j = p_j ((1 - e) w_y + (e / V) sum w + 2 zeta lse) - (1 - e) w_y [j = y] - (e / V) w_j
//
// A tile has the classes below each other and rows of the input side by side, so that sums over classes go down a
// column of vectors and no lane meets another. It is in L2 when it comes here, from one product and for the next two.
// A column two vectors wide is read twice: for the largest logit, and for the exponentials of the differences.
#include "linear_cross_entropy/linear_cross_entropy.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A, int N, bool Bias, bool Cap, bool Weighted>
SK_INLINE void column_sums(const LogitTile& p, const TileSums& s, int64_t row) {
  const A *bias = static_cast<const A*>(p.bias), *weight = static_cast<const A*>(p.class_weight);
  const A cap = static_cast<A>(p.softcap), inverse = Cap ? A(1) / cap : A(0);
  A* column = static_cast<A*>(p.logits) + row;
  Vec<A> top[N], total[N], sum[N];
  for (int i = 0; i < N; ++i) top[i] = broadcast<A>(-__builtin_inf()), total[i] = sum[i] = Vec<A>{};
  for (int64_t j = 0; j < p.classes; ++j) {
    for (int i = 0; i < N; ++i) {
      A* at = column + j * p.stride + i * W<A>;
      Vec<A> z = load(at);
      if (Bias) z += bias[j];
      if (Cap) z = tanh<A>(z * inverse) * cap;
      if (Bias || Cap) store(at, z);
      top[i] = z > top[i] ? z : top[i];
    }
  }
  if (!s.max) return;
  // Of logits that are all minus infinity nothing is subtracted.
  for (int i = 0; i < N; ++i) top[i] = top[i] == -A(__builtin_inf()) ? Vec<A>{} : top[i];
  for (int64_t j = 0; j < p.classes; ++j) {
    for (int i = 0; i < N; ++i) {
      const Vec<A> below = load(column + j * p.stride + i * W<A>) - top[i];
      sum[i] += exp_nonpositive<A>(below);
      if (Weighted) total[i] += weight ? below * weight[j] : below;
    }
  }
  for (int i = 0; i < N; ++i) {
    const int64_t at = row + i * W<A>;
    store(static_cast<A*>(s.max) + at, top[i]);
    store(static_cast<A*>(s.sum) + at, sum[i]);
    if (Weighted) store(static_cast<A*>(s.weighted) + at, total[i]);
  }
}

template <class A, bool Bias, bool Cap, bool Weighted>
void tile_sums(const LogitTile& p, const TileSums& s) {
  int64_t row = s.max || Bias || Cap ? 0 : p.rows;
  for (; row + W<A> < p.rows; row += 2 * W<A>) column_sums<A, 2, Bias, Cap, Weighted>(p, s, row);
  if (row < p.rows) column_sums<A, 1, Bias, Cap, Weighted>(p, s, row);
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t target = p.targets[r] - p.first_class;
    if (0 <= target && target < p.classes)
      static_cast<A*>(s.hit_logits)[r] = static_cast<const A*>(p.logits)[target * p.stride + r];
  }
}

template <class A>
void sums_of(const LogitTile& p, const TileSums& s) {
  const auto by_cap = [&](auto bias, auto weighted) {
    if (p.softcap != 0) tile_sums<A, bias, true, weighted>(p, s);
    else tile_sums<A, bias, false, weighted>(p, s);
  };
  const auto by_weighted = [&](auto bias) {
    if (s.weighted) by_cap(bias, std::true_type{});
    else by_cap(bias, std::false_type{});
  };
  if (p.bias) by_weighted(std::true_type{});
  else by_weighted(std::false_type{});
}

template <class A>
void combine_rows(const ClassSums& p) {
  const A* weights = static_cast<const A*>(p.tile_weights);
  for (int64_t row = 0; row < p.rows; row += W<A>) {
    A *max = static_cast<A*>(p.max) + row, *sum = static_cast<A*>(p.sum) + row;
    Vec<A> top = load(max), all{}, total{};
    for (int64_t t = 1; t < p.tiles; ++t) top = vmax(top, load(max + t * p.stride));
    for (int64_t t = 0; t < p.tiles; ++t) {
      const Vec<A> below = load(max + t * p.stride) - top;
      all += load(sum + t * p.stride) * exp_nonpositive<A>(below);
      if (p.weighted) total += load(static_cast<A*>(p.weighted) + row + t * p.stride) + below * weights[t];
    }
    store(max, top);
    store(sum, all);
    if (p.weighted) store(static_cast<A*>(p.weighted) + row, total);
  }
}

// Blocks of a few vectors, and a sum of the blocks: a chain over thousands of rows would round as often.
template <class A>
A row_sum(const A* line, int64_t rows) {
  constexpr int64_t kBlock = 32 * W<A>;
  Vec<A> sum{};
  for (int64_t first = 0; first < rows; first += kBlock) {
    const int64_t end = first + kBlock < rows ? first + kBlock : rows;
    Vec<A> block{};
    for (int64_t r = first; r < end; r += W<A>) block += load_upto(line + r, end - r);
    sum += block;
  }
  return sum_lanes<A>(sum);
}

template <class A, bool Cap, bool Spread>
void tile_gradient(const LogitTile& p, const TileGradient& g) {
  const A *weight = static_cast<const A*>(p.class_weight), *max = static_cast<const A*>(g.max);
  const A *p_scale = static_cast<const A*>(g.p_scale), *spread = static_cast<const A*>(g.spread);
  const A* hit = static_cast<const A*>(g.hit);
  const A inverse = Cap ? A(1 / p.softcap) : A(0);
  A* logits = static_cast<A*>(p.logits);
  const auto slope = [&](auto z) SK_INLINED {
    const auto t = z * inverse;
    return A(1) - t * t;
  };
  for (int64_t j = 0; j < p.classes; ++j) {
    A* line = logits + j * p.stride;
    const A w = weight ? weight[j] : A(1);
    for (int64_t r = 0; r < p.rows; r += W<A>) {
      const Vec<A> z = load(line + r);
      Vec<A> d = exp_nonpositive<A>(z - load(max + r)) * load(p_scale + r);
      if (Spread) d -= load(spread + r) * w;
      if (Cap) d *= slope(z);
      store(line + r, d);
    }
  }
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t target = p.targets[r] - p.first_class;
    if (target < 0 || target >= p.classes) continue;
    A& d = logits[target * p.stride + r];
    d -= Cap ? hit[r] * slope(static_cast<const A*>(g.hit_logits)[r]) : hit[r];
  }
  if (!g.bias_sums) return;
  A* sums = static_cast<A*>(g.bias_sums);
  for (int64_t j = 0; j < p.classes; ++j) sums[j] += row_sum(logits + j * p.stride, p.rows);
}

template <class A>
void gradient_of(const LogitTile& p, const TileGradient& g) {
  if (p.softcap != 0) {
    if (g.spread) tile_gradient<A, true, true>(p, g);
    else tile_gradient<A, true, false>(p, g);
  } else {
    if (g.spread) tile_gradient<A, false, true>(p, g);
    else tile_gradient<A, false, false>(p, g);
  }
}

template <class A>
void add_arrays(A* arrays, int64_t count, int64_t step, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += W<A>) {
    Vec<A> sum = load_upto(arrays + i, end - i);
    for (int64_t n = 1; n < count; ++n) sum += load_upto(arrays + n * step + i, end - i);
    store_upto(arrays + i, sum, end - i);
  }
}

template <class A>
void transpose_columns(const A* matrix, int64_t stride, int64_t rows, A* out, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 16;  // rows whose cache lines are still there for the next column
  for (int64_t first = 0; first < rows; first += kBlock)
    for (int64_t column = begin; column < end; ++column)
      for (int64_t row = first; row < first + kBlock && row < rows; ++row)
        out[column * rows + row] = matrix[row * stride + column];
}

void sums(const LogitTile& p, const TileSums& s) {
  if (p.dtype == Dtype::f64) sums_of<double>(p, s);
  else sums_of<float>(p, s);
}
void combine(const ClassSums& p) {
  if (p.dtype == Dtype::f64) combine_rows<double>(p);
  else combine_rows<float>(p);
}
void gradient(const LogitTile& p, const TileGradient& g) {
  if (p.dtype == Dtype::f64) gradient_of<double>(p, g);
  else gradient_of<float>(p, g);
}
void add(Dtype dtype, void* arrays, int64_t count, int64_t step, int64_t begin, int64_t end) {
  if (dtype == Dtype::f64) add_arrays(static_cast<double*>(arrays), count, step, begin, end);
  else add_arrays(static_cast<float*>(arrays), count, step, begin, end);
}
void transpose(Dtype dtype, const void* matrix, int64_t stride, int64_t rows, void* out, int64_t begin, int64_t end) {
  if (dtype == Dtype::f64)
    transpose_columns(static_cast<const double*>(matrix), stride, rows, static_cast<double*>(out), begin, end);
  else transpose_columns(static_cast<const float*>(matrix), stride, rows, static_cast<float*>(out), begin, end);
}

}  // namespace

const LinearCrossEntropyKernels linear_cross_entropy_kernels = {sums, combine, gradient, add, transpose};

}  // namespace SK_TIER
}  // namespace seqkern
