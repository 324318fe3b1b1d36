// Cross-entropy on rows of logits, on CPU. Compiled once per instruction-set tier.
//
//   lse = log sum_j exp z_j,   loss = (1 - e) w_y (lse - z_y) + (e / V) sum_j w_j (lse - z_j) + zeta lse^2
//   d loss/d z_j = p_j ((1 - e) w_y + (e / V) sum w + 2 zeta lse) - (1 - e) w_y [j = y] - (e / V) w_j
//
// with z capped, cap tanh(z / cap). A row of 32,000 classes fits L2: it is read for its largest logit and again for the
// exponentials, which costs no memory traffic, and nothing of its length is written before the gradient.
#include "cross_entropy/cross_entropy.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Vectors that a loop works on at once: additions take several cycles each.
constexpr int kChains = 4;

// Calls vector(k, j, n) for the vectors of a row, of n elements from j on: k counts from 0 to kChains - 1.
template <class A, class F>
SK_INLINE void for_vectors(int64_t classes, const F& vector) {
  int64_t j = 0;
  for (; j + kChains * W<A> <= classes; j += kChains * W<A>) {
#pragma GCC unroll 4
    for (int k = 0; k < kChains; ++k) vector(k, j + k * W<A>, W<A>);
  }
  for (; j < classes; j += W<A>) vector(0, j, classes - j);
}

template <class A>
SK_INLINE Vec<A> capped(Vec<A> z, A cap) {
  return tanh<A>(z * (A(1) / cap)) * cap;
}

template <class T, bool Cap, bool Weighted>
void row_sums(const LogitRows& p, const RowSums& s, int64_t row) {
  using A = acc_t<T>;
  if (s.targets[row] < 0) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride;
  const A* weight = static_cast<const A*>(p.class_weight);
  const A cap = static_cast<A>(p.softcap), lowest = -A(__builtin_inf());
  const auto below_end = [](Vec<A> v, int64_t n, A instead) SK_INLINED {
    if (n < W<A>)
      for (int64_t i = n; i < W<A>; ++i) v[i] = instead;
    return v;
  };
  Vec<A> tops[kChains], sums[kChains] = {}, totals[kChains] = {};
  for (Vec<A>& top : tops) top = broadcast<A>(lowest);
  for_vectors<A>(p.classes, [&](int k, int64_t j, int64_t n) SK_INLINED {
    const Vec<A> z = below_end(load_upto(logits + j, n), n, lowest);
    tops[k] = z > tops[k] ? z : tops[k];  // passes over nan, which the sum meets
  });
  A top = max_lanes<A>(vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3])));
  if (Cap) top = capped<A>(broadcast<A>(top), cap)[0];
  if (top == lowest) top = 0;  // of logits that are all minus infinity nothing is subtracted
  for_vectors<A>(p.classes, [&](int k, int64_t j, int64_t n) SK_INLINED {
    Vec<A> z = load_upto(logits + j, n);
    if (Cap) z = capped<A>(z, cap);
    const Vec<A> below = z - top;
    sums[k] += exp_nonpositive<A>(below_end(below, n, lowest));
    if (Weighted) totals[k] += below_end(weight ? below * load_upto(weight + j, n) : below, n, A(0));
  });
  static_cast<A*>(s.max)[row] = top;
  static_cast<A*>(s.sum)[row] = sum_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  Vec<A> hit = load_partial(logits + s.targets[row], 1);
  if (Cap) hit = capped<A>(hit, cap);
  static_cast<A*>(s.hit_logits)[row] = hit[0];
  if (Weighted) static_cast<A*>(s.weighted)[row] = sum_lanes<A>((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

template <class T, bool Cap, bool Spread>
void row_gradient(const LogitRows& p, const RowGradient& g, int64_t row) {
  using A = acc_t<T>;
  const T* logits = static_cast<const T*>(p.logits) + row * p.stride;
  T* grads = static_cast<T*>(g.grads) + row * p.classes;
  const A* weight = static_cast<const A*>(p.class_weight);
  const int64_t target = g.targets[row];
  if (target < 0) {
    for_vectors<A>(p.classes, [&](int, int64_t j, int64_t n) SK_INLINED { store_upto(grads + j, Vec<A>{}, n); });
    return;
  }
  const A cap = static_cast<A>(p.softcap), inverse = Cap ? A(1) / cap : A(0);
  const A max = static_cast<const A*>(g.max)[row], p_scale = static_cast<const A*>(g.p_scale)[row];
  const A spread = Spread ? static_cast<const A*>(g.spread)[row] : A(0), hit = static_cast<const A*>(g.hit)[row];
  const auto vector = [&](int64_t j, int64_t n, Vec<A> extra) SK_INLINED {
    Vec<A> z = load_upto(logits + j, n), slope;
    if (Cap) z = tanh<A>(z * inverse, slope) * cap;
    Vec<A> d = exp_nonpositive<A>(z - max) * p_scale - extra;
    if (Spread) d -= weight ? load_upto(weight + j, n) * spread : broadcast<A>(spread);
    if (Cap) d *= slope;
    store_upto(grads + j, d, n);
  };
  for_vectors<A>(p.classes, [&](int, int64_t j, int64_t n) SK_INLINED { vector(j, n, Vec<A>{}); });
  const int64_t first = target / W<A> * W<A>;
  Vec<A> extra{};
  extra[target - first] = hit;
  vector(first, p.classes - first, extra);
}

template <class F>
SK_INLINE void by_options(bool cap, bool second, const F& f) {
  if (cap) {
    if (second) f(std::true_type{}, std::true_type{});
    else f(std::true_type{}, std::false_type{});
  } else {
    if (second) f(std::false_type{}, std::true_type{});
    else f(std::false_type{}, std::false_type{});
  }
}

void sums(const LogitRows& p, const RowSums& s, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, by_options(p.softcap != 0, s.weighted != nullptr, [&](auto cap, auto weighted) {
                for (int64_t row = begin; row < end; ++row) row_sums<T, cap, weighted>(p, s, row);
              }));
}
void gradient(const LogitRows& p, const RowGradient& g, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, by_options(p.softcap != 0, g.spread != nullptr, [&](auto cap, auto spread) {
                for (int64_t row = begin; row < end; ++row) row_gradient<T, cap, spread>(p, g, row);
              }));
}

}  // namespace

const CrossEntropyKernels cross_entropy_kernels = {sums, gradient};

}  // namespace SK_TIER
}  // namespace seqkern
