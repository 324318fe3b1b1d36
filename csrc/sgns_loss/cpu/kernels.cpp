// The loss of negative sampling on CPU. Compiled once per instruction-set tier.
//
//   s = v u for the positive's u and the negatives',   loss = log(1 + exp(-s_0)) + sum over negatives of log(1 +
//   exp(s_k)), ds_0 = -sigmoid(-s_0),   ds_k = sigmoid(s_k)                                                Mikolov et
//   al. 2013, eq. 4
//
// A negative that is the positive counts nothing.
#include "activate.h"
#include "sgns_loss/sgns_loss.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// log(1 + x) for x in [0, 1]: 2 atanh(x / (2 + x)), whose series ends where t^2 <= 1/9 makes terms vanish.
template <class A>
SK_INLINE Vec<A> log1p_upto_one(Vec<A> x) {
  constexpr int kTerms = sizeof(A) == 4 ? 8 : 17;
  const Vec<A> t = x / (x + A(2)), square = t * t;
  Vec<A> sum = broadcast<A>(A(1) / A(2 * kTerms - 1));
#pragma GCC unroll 17
  for (int n = kTerms - 2; n >= 0; --n) sum = sum * square + A(1) / A(2 * n + 1);
  return A(2) * t * sum;
}
// log(1 + exp(s)), in terms that do not cancel on either side.
template <class A>
SK_INLINE Vec<A> softplus(Vec<A> s) {
  return vmax(Vec<A>{}, s) + log1p_upto_one<A>(exp_nonpositive<A>(s > 0 ? -s : s));
}

template <class T>
SK_INLINE acc_t<T> product(const T* v, const T* u, int64_t columns) {
  using A = acc_t<T>;
  constexpr int kSums = 4;
  Vec<A> sums[kSums] = {};
  int64_t c = 0;
  for (; c + kSums * W<A> <= columns; c += kSums * W<A>)
    for (int n = 0; n < kSums; ++n) sums[n] += load(v + c + n * W<A>) * load(u + c + n * W<A>);
  for (; c < columns; c += W<A>) sums[0] += load_upto(v + c, columns - c) * load_upto(u + c, columns - c);
  return sum_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The rows of an example begin to come.
template <class T>
SK_INLINE void prefetch_rows(const SgnsForward& p, int64_t n) {
  const int64_t bytes = p.columns * static_cast<int64_t>(sizeof(T)), most = bytes < 2048 ? bytes : 2048;
  const auto row = [&](const void* table, int64_t stride, int64_t at) SK_INLINED {
    const char* const start = reinterpret_cast<const char*>(static_cast<const T*>(table) + at * stride);
    for (int64_t byte = 0; byte < most; byte += 64) __builtin_prefetch(start + byte);
  };
  row(p.w_in, p.in_stride, p.center[n]);
  row(p.w_out, p.out_stride, p.context[n]);
  for (int64_t k = 0; k < p.negatives; ++k) row(p.w_out, p.out_stride, p.negative[n * p.negatives + k]);
}

template <class T>
void forward_examples(const SgnsForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t count = 1 + p.negatives;
  for (int64_t n = begin; n < end; ++n) {
    if (n + 1 < end) prefetch_rows<T>(p, n + 1);
    const T* v = static_cast<const T*>(p.w_in) + p.center[n] * p.in_stride;
    const int64_t *const negatives = p.negative + n * p.negatives, context = p.context[n];
    A* const scores = static_cast<A*>(p.scores) + n * count;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = k ? negatives[k - 1] : context;
      scores[k] = product(v, static_cast<const T*>(p.w_out) + row * p.out_stride, p.columns);
    }
    A loss = 0;
    for_vectors<A>(count, [&](int64_t k, int64_t some) SK_INLINED {
      Vec<A> s = load_upto(scores + k, some);
      if (k == 0) s[0] = -s[0];
      const Vec<A> terms = softplus<A>(s);
      for (int64_t i = 0; i < (some < W<A> ? some : W<A>); ++i)
        if (k + i == 0 || negatives[k + i - 1] != context) loss += terms[i];
    });
    static_cast<A*>(p.loss)[n] = loss;
  }
}

template <class T>
void grad_examples(const SgnsForward& p, const void* grad_loss, void* scores, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t count = 1 + p.negatives;
  for (int64_t n = begin; n < end; ++n) {
    A* const row = static_cast<A*>(scores) + n * count;
    const Vec<A> grad = broadcast<A>(static_cast<const A*>(grad_loss)[n]);
    for_vectors<A>(count, [&](int64_t k, int64_t some) SK_INLINED {
      Vec<A> s = load_upto(row + k, some), rest;
      if (k == 0) s[0] = -s[0];
      Vec<A> slope = sigmoid_both<A>(s, rest);
      if (k == 0) slope[0] = -slope[0];
      store_upto(row + k, slope * grad, some);
    });
    for (int64_t k = 1; k < count; ++k)
      if (p.negative[n * p.negatives + k - 1] == p.context[n]) row[k] = 0;
  }
}

template <class T>
void sum_rows(const SgnsRow& p) {
  using A = acc_t<T>;
  const A* weights = static_cast<const A*>(p.weights);
  for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
    Vec<A> total{}, part{};
    for (int64_t e = 0; e < p.count; ++e) {
      part += weights[e] * load_upto(static_cast<const T*>(p.source) + p.rows[e] * p.stride + c, n);
      if (e % 64 == 63) total += part, part = Vec<A>{};
    }
    store_upto(static_cast<T*>(p.to) + c, total + part, n);
  });
}

void forward(const SgnsForward& p, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, forward_examples<T>(p, begin, end));
}
void grad_scores(const SgnsForward& p, const void* grad_loss, void* scores, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, grad_examples<T>(p, grad_loss, scores, begin, end));
}
void sum_row(const SgnsRow& p) { SK_DISPATCH(p.dtype, sum_rows<T>(p)); }

}  // namespace

const SgnsKernels sgns_kernels = {forward, grad_scores, sum_row};

}  // namespace SK_TIER
}  // namespace seqkern
