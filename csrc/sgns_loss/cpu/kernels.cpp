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

// log(1 + exp(s)): from log1p, whose terms do not cancel on either side.
template <class A>
A softplus(A s) {
  const A size = s < 0 ? -s : s;
  const A rest = sizeof(A) == 4 ? static_cast<A>(__builtin_log1pf(__builtin_expf(-static_cast<float>(size))))
                                : static_cast<A>(__builtin_log1p(__builtin_exp(-static_cast<double>(size))));
  return (s > 0 ? s : A(0)) + (s != s ? s : rest);
}

template <class T>
SK_INLINE acc_t<T> product(const T* v, const T* u, int64_t columns) {
  using A = acc_t<T>;
  Vec<A> total{}, part{};
  for_vectors<A>(columns, [&](int64_t c, int64_t n) SK_INLINED {
    part += load_upto(v + c, n) * load_upto(u + c, n);
    if (c % (32 * W<A>) == 0) total += part, part = Vec<A>{};
  });
  return sum_lanes<A>(total + part);
}

template <class T>
void forward_examples(const SgnsForward& p, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for (int64_t n = begin; n < end; ++n) {
    const T* v = static_cast<const T*>(p.w_in) + p.center[n] * p.in_stride;
    A* const scores = static_cast<A*>(p.scores) + n * (1 + p.negatives);
    A loss = 0;
    for (int64_t k = 0; k <= p.negatives; ++k) {
      const int64_t row = k ? p.negative[n * p.negatives + k - 1] : p.context[n];
      scores[k] = product(v, static_cast<const T*>(p.w_out) + row * p.out_stride, p.columns);
      if (k == 0) loss = softplus<A>(-scores[0]);
      else if (row != p.context[n]) loss += softplus<A>(scores[k]);
    }
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
