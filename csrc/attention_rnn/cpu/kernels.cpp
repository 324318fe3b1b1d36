// Attention of one step of a decoder on CPU. Compiled once per instruction-set tier.
//
//   s_j = v^T tanh(q + k_j),   or scale q k_j;      P = softmax(s),    context = P value
//
// Keys of additive scores are prepared once for all steps (additive_attention/cpu/kernels.cpp has the form), so that a
// step needs no transcendental function for a pair. Forward keeps P, in place of the scores' second computation.
// Backward, last step first: dP = dcontext value^T + dweights, dS = P (dP - sum of P dP); then of additive scores
//
//   g = dS (1 - tanh^2),    dq = v sum over j of g,    dk += g,    dv += sum of dS tanh,
//
// and of products dq = scale dS key. What needs no order is left until after the last step: dvalue = P^T dcontext, and
// of products dkey = scale dS^T query.
#include "additive_attention/cpu/queries.h"
#include "attention_rnn/attention_rnn.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Vectors of value channels that a single query takes at once.
constexpr int kRowValues = SK_VEC_BYTES == 64 ? 8 : 4;

// The same keys in the place of the values: products with a query are products with values' gradients.
inline AdditiveProblem keys_as_values(const AdditiveProblem& p) {
  AdditiveProblem keys = p;
  keys.value = p.key, keys.value_batch = p.key_batch, keys.value_row = p.key_row, keys.value_channels = p.channels;
  return keys;
}

template <class T>
struct Memory {
  using A = acc_t<T>;
  A *wide, *scores, *grads;
  uint8_t* seen;
  int64_t bytes;
  Memory(const AdditiveProblem& p, void* memory) {
    Pieces pieces(memory);
    wide = pieces.take<A>(3 * round_up<A>(p.channels));
    scores = pieces.take<A>(round_up<A>(p.keys));
    grads = pieces.take<A>(round_up<A>(p.value_channels));
    seen = pieces.take<uint8_t>(p.keys);
    bytes = pieces.bytes();
  }
};

template <class T>
SK_INLINE void widen(const T* from, int64_t columns, acc_t<T>* to) {
  using A = acc_t<T>;
  for_vectors<A>(columns, [&](int64_t c, int64_t n) SK_INLINED { store(to + c, load_upto(from + c, n)); });
}

template <class T>
void row_scores(const Attend& f, int64_t b, const T* query, const Memory<T>& memory, int64_t count) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const int64_t stride = round_up<A>(p.keys);
  if (p.weight) {
    const Problem<T> of(p);
    const bool tame = prepare_query<T>(of, query, memory.wide);
    const A* const wide = memory.wide;
    score_rows<T, 1>(of, b, of.keys(b), &wide, &tame, count, memory.scores, stride);
    return;
  }
  const AdditiveProblem keys = keys_as_values(p);
  widen<T>(query, p.channels, memory.wide);
  value_products<T, 1>(Problem<T>(keys), b, memory.wide, round_up<A>(p.channels), count, memory.scores, stride);
  for (int64_t c = 0; c < count; c += W<A>) store(memory.scores + c, load(memory.scores + c) * static_cast<A>(f.scale));
}

// output = factor * weights value, over the keys of a non-zero `seen`, or over all.
template <class T>
void weighted_values(const AdditiveProblem& p, int64_t b, const acc_t<T>* weights, int64_t count, const uint8_t* seen,
                     acc_t<T> factor, T* output) {
  using A = acc_t<T>;
  const Problem<T> of(p);
  const int64_t stride = round_up<A>(p.keys), columns = p.value_channels;
  int64_t c = 0;
  for (; c + kRowValues * W<A> <= columns; c += kRowValues * W<A>)
    value_tile<T, 1, kRowValues>(of, b, weights, stride, count, seen, c, W<A>, &factor, &output);
  for (; c < columns; c += W<A>)
    value_tile<T, 1, 1>(of, b, weights, stride, count, seen, c, columns - c < W<A> ? columns - c : W<A>, &factor,
                        &output);
}

template <class T>
void attend_row(const Attend& f, int64_t b, int64_t t, const T* query, void* scratch) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const Memory<T> memory(p, scratch);
  const int64_t count = p.keys_of(b), row = b * p.queries + t;
  A* const scores = memory.scores;
  row_scores<T>(f, b, query, memory, count);
  if (p.mask) apply_mask<T>(p, b, t, 1, count, scores, round_up<A>(p.keys), memory.seen);
  A lse;
  const A factor = softmax_row<A>(scores, count, lse);
  A* const kept = static_cast<A*>(f.probabilities) + row * p.keys;
  for_vectors<A>(count, [&](int64_t c, int64_t n) SK_INLINED { store_upto(kept + c, load(scores + c) * factor, n); });
  for_vectors<A>(p.keys - count, [&](int64_t c, int64_t n) SK_INLINED { store_upto(kept + count + c, Vec<A>{}, n); });
  weighted_values<T>(p, b, scores, count, p.mask ? memory.seen : nullptr, factor,
                     static_cast<T*>(f.context) + row * p.value_channels);
}

template <class T>
void grad_attend_row(const GradAttend& g, int64_t b, int64_t t, const T* query, void* scratch) {
  using A = acc_t<T>;
  const AdditiveProblem& p = g.of.of;
  const Problem<T> of(p);
  const Memory<T> memory(p, scratch);
  const int64_t count = p.keys_of(b), stride = round_up<A>(p.keys), row = b * p.queries + t;
  const A* kept = static_cast<const A*>(g.of.probabilities) + row * p.keys;
  const A* of_weights = g.grad_probabilities ? static_cast<const A*>(g.grad_probabilities) + row * p.keys : nullptr;
  A* const probability = static_cast<A*>(g.padded_probabilities) + row * stride;
  A* const grad = static_cast<A*>(g.grad_scores) + row * stride;
  widen<T>(static_cast<const T*>(g.grad_context) + row * p.value_channels, p.value_channels, memory.grads);
  value_products<T, 1>(of, b, memory.grads, round_up<A>(p.value_channels), count, grad, stride);
  if (p.mask)  // of a hidden key nothing counts, not even a NaN of its value
    for (int64_t j = 0; j < count; ++j)
      if (kept[j] == 0) grad[j] = 0;
  Vec<A> delta{}, part{};
  for_vectors<A>(count, [&](int64_t c, int64_t n) SK_INLINED {
    const Vec<A> weight = load_upto(kept + c, n);
    Vec<A> of_weight = load(grad + c);
    if (of_weights) of_weight += load_upto(of_weights + c, n);
    if (n < W<A>) of_weight = keep_first<A>(of_weight, n);
    store(probability + c, weight);
    store(grad + c, of_weight);
    part += weight * of_weight;
    if (c % (kTerms * W<A>) == 0) delta += part, part = Vec<A>{};
  });
  const A rest = sum_lanes<A>(delta + part), scale = p.weight ? A(1) : static_cast<A>(g.of.scale);
  for_vectors<A>(count, [&](int64_t c, int64_t)
                            SK_INLINED { store(grad + c, load(probability + c) * (load(grad + c) - rest) * scale); });
  T* const grad_query = static_cast<T*>(g.grad_query) + row * p.channels;
  if (!p.weight) {
    if (p.mask)
      for (int64_t j = 0; j < count; ++j) memory.seen[j] = kept[j] != 0;
    weighted_values<T>(keys_as_values(p), b, grad, count, p.mask ? memory.seen : nullptr, A(1), grad_query);
    return;
  }
  const uint8_t tame = prepare_query<T>(of, query, memory.wide);
  const GradRows<A> rows{memory.wide, grad, stride, &tame};
  for (int64_t s = 0; s < of.strips; ++s) {
    A* const sums = static_cast<A*>(g.key_sums) + (b * of.strips + s) * p.keys * W<A>;
    A* const weights = static_cast<A*>(g.weight_sums) + b * of.padded + s * W<A>;
    Vec<A> of_weight{}, of_query{};
    grad_strip<T, 1>(of, b, s, rows, grad_query, sums, of_weight, of_query);
    store(weights, load(weights) + of_weight);
  }
}

// Sums over all steps: of `weights` (batch, steps, padded keys) times `rows` (batch, steps, value channels).
template <class T>
void sum_steps(const AdditiveProblem& p, int64_t b, void* weights, const void* rows, void* sums) {
  using A = acc_t<T>;
  AdditiveBackward f{};
  f.of = p, f.first = 0, f.chunk = p.queries;
  f.probabilities = weights, f.grad_output = rows, f.grad_value = sums;
  const int64_t width = kValues * W<A>;
  for (int64_t strip = 0; strip * width < p.value_channels; ++strip) grad_value_strip<T>(f, b, strip);
}

template <class T>
void finish_sequence(const GradAttend& g, int64_t b, const void* queries) {
  using A = acc_t<T>;
  const AdditiveProblem& p = g.of.of;
  sum_steps<T>(p, b, g.padded_probabilities, g.grad_context, g.grad_value);
  if (!p.weight) return sum_steps<T>(keys_as_values(p), b, g.grad_scores, queries, g.grad_key);
  const Problem<T> of(p);
  for (int64_t j = 0; j < p.keys; ++j) {
    T* const grad = static_cast<T*>(g.grad_key) + (b * p.keys + j) * p.channels;
    for (int64_t s = 0; s < of.strips; ++s) {
      const A* sum = static_cast<const A*>(g.key_sums) + ((b * of.strips + s) * p.keys + j) * W<A>;
      store_upto(grad + s * W<A>, load(sum) * load(of.weight() + s * W<A>) * A(4), of.within(s));
    }
  }
}

// Calls body(matrix, row, n) for the vectors of all rows; `rows` is a list of addresses.
template <class T, class Body>
SK_INLINE void for_rows(const Rows& r, const void* const* rows, const Body& body) {
  using A = acc_t<T>;
  for (int64_t i = 0; i < r.count; ++i) {
    A* const matrix = static_cast<A*>(r.matrix) + i * r.stride;
    T* const row = static_cast<T*>(const_cast<void*>(rows[i]));
    if (row) for_vectors<A>(r.columns, [&](int64_t c, int64_t n) SK_INLINED { body(matrix + c, row + c, n); });
  }
}

template <class T>
void add_rows(const Rows& r) {
  using A = acc_t<T>;
  for_rows<T>(r, r.rows, [](A* matrix, T* row, int64_t n) SK_INLINED {
    store_upto(matrix, load_upto(matrix, n) + load_upto(row, n), n);
  });
}
template <class T>
void tanh_rows(const Rows& r, void* const* to) {
  using A = acc_t<T>;
  for_rows<T>(r, to,
              [](A* matrix, T* row, int64_t n) SK_INLINED { store_upto(row, tanh<A>(load_upto(matrix, n)), n); });
}
template <class T>
void grad_tanh_rows(const Rows& r) {
  using A = acc_t<T>;
  for_rows<T>(r, r.rows, [](A* matrix, T* row, int64_t n) SK_INLINED {
    const Vec<A> y = load_upto(row, n);
    store_upto(matrix, load_upto(matrix, n) * (A(1) - y * y), n);
  });
}

// ---- entry points ---------------------------------------------------------------------------------------------------

int64_t attend_scratch(const AdditiveProblem& p) {
  SK_DISPATCH(p.dtype, return Memory<T>(p, nullptr).bytes);
  return 0;
}
void attend(const Attend& f, int64_t b, int64_t t, const void* query, void* scratch) {
  SK_DISPATCH(f.of.dtype, attend_row<T>(f, b, t, static_cast<const T*>(query), scratch));
}
void grad_attend(const GradAttend& g, int64_t b, int64_t t, const void* query, void* scratch) {
  SK_DISPATCH(g.of.of.dtype, grad_attend_row<T>(g, b, t, static_cast<const T*>(query), scratch));
}
void finish(const GradAttend& g, int64_t b, const void* queries) {
  SK_DISPATCH(g.of.of.dtype, finish_sequence<T>(g, b, queries));
}
void add(const Rows& r) { SK_DISPATCH(r.dtype, add_rows<T>(r)); }
void tanh_to(const Rows& r, void* const* to) { SK_DISPATCH(r.dtype, tanh_rows<T>(r, to)); }
void grad_tanh(const Rows& r) { SK_DISPATCH(r.dtype, grad_tanh_rows<T>(r)); }

}  // namespace

const AttentionRnnKernels attention_rnn_kernels = {attend_scratch, attend,   grad_attend, finish, add,
                                                   tanh_to,        grad_tanh};

}  // namespace SK_TIER
}  // namespace seqkern
