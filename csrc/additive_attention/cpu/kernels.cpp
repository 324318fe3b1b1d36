// Additive attention on CPU. Compiled once per instruction-set tier.
//
//   s_ij = sum over d of w_d tanh(a_id + k_jd),    a = query + bias,    P = softmax(s),    output = P value
//
// The product form: with exp(2a) and exp(2k), made once for each number of a query and of a key,
//
//   u = exp(2a) exp(2k) - 1,    tanh(a + k) = u / (u + 2),
//
// five instructions and a reciprocal instead of a tanh for each query, key and channel. Its error is absolute, about an
// ulp of 1. So where all of a key's numbers are small, which is where they all begin in training, the key keeps K =
// exp(2k) - 1 instead and u = exp(2a) K + (exp(2a) - 1): the same instructions, with a small tanh's relative accuracy.
// (For large ones that would cancel.) The product is finite while both factors are below a limit; a query or key with a
// larger number is wild, and pairs with it take tanh itself. Which form a pair takes depends on this pair alone.
//
// The scores of a block of queries and the softmax stay in scratch memory: O(queries + keys). Backward, for a chunk of
// queries: first P and dS = P (dP - sum of P dP + dlse), dP = grad_output value^T + grad_weights; then each strip of
// channels on its own makes u again,
//
//   g = dS (1 - tanh^2),   dq = w sum over j of g,   dk = w sum over i of g,   dw = sum of dS tanh.
//
// The sums are of g / 4.
#include "additive_attention/cpu/queries.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// ---- forward --------------------------------------------------------------------------------------------------------

// What the forward pass holds for a block of queries.
template <class T>
struct ForwardMemory {
  using A = acc_t<T>;
  A *wide, *scores, *keys;
  uint8_t *seen, *forms;
  int64_t bytes;
  ForwardMemory(const AdditiveProblem& p, void* memory) {
    Pieces pieces(memory);
    wide = pieces.take<A>(kQueries * 3 * round_up<A>(p.channels));
    scores = pieces.take<A>(kQueries * round_up<A>(p.keys));
    keys = pieces.take<A>(p.wide_keys ? 0 : kKeys * round_up<A>(p.channels));
    seen = pieces.take<uint8_t>(p.keys);
    forms = pieces.take<uint8_t>(kKeys);
    bytes = pieces.bytes();
  }
};

// The softmax's sums, the output and the weights of Q queries, from their scores.
template <class T, int Q>
void finish_forward(const AdditiveForward& f, int64_t b, int64_t begin, acc_t<T>* scores, uint8_t* seen) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const Problem<T> of(p);
  const int64_t count = p.keys_of(b), stride = round_up<A>(p.keys);
  T* outputs[Q];
  A factors[Q];
  if (p.mask) apply_mask<T>(p, b, begin, Q, count, scores, stride, seen);
  else seen = nullptr;
  for (int i = 0; i < Q; ++i) {
    const int64_t query = b * p.queries + begin + i;
    outputs[i] = static_cast<T*>(f.output) + query * p.value_channels;
    factors[i] = softmax_row<A>(scores + i * stride, count, static_cast<A*>(f.lse)[query]);
  }
  int64_t c = 0;
  for (; c + kValues * W<A> <= p.value_channels; c += kValues * W<A>)
    value_tile<T, Q, kValues>(of, b, scores, stride, count, seen, c, W<A>, factors, outputs);
  for (; c < p.value_channels; c += W<A>) {
    const int64_t left = p.value_channels - c;
    value_tile<T, Q, 1>(of, b, scores, stride, count, seen, c, left < W<A> ? left : W<A>, factors, outputs);
  }
  if (!f.weights) return;
  for (int i = 0; i < Q; ++i) {
    T* const weights = static_cast<T*>(f.weights) + (b * p.queries + begin + i) * p.keys;
    for_vectors<A>(count, [&](int64_t at, int64_t n)
                              SK_INLINED { store_upto(weights + at, load(scores + i * stride + at) * factors[i], n); });
    for_vectors<A>(p.keys - count,
                   [&](int64_t at, int64_t n) SK_INLINED { store_upto(weights + count + at, Vec<A>{}, n); });
  }
}

template <class T>
void forward_queries(const AdditiveForward& f, int64_t b, int64_t begin, int64_t end, void* scratch) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const Problem<T> of(p);
  const ForwardMemory<T> memory(p, scratch);
  const int64_t count = p.keys_of(b), stride = round_up<A>(p.keys), rows = end - begin;
  const A* queries[kQueries];
  bool tame[kQueries];
  for (int64_t i = 0; i < rows; ++i) {
    queries[i] = memory.wide + i * 3 * of.padded;
    tame[i] = prepare_query<T>(of, of.query(b, begin + i), memory.wide + i * 3 * of.padded);
  }
  const auto score = [&](const Keys<A>& keys, int64_t some) SK_INLINED {
    A* const scores = memory.scores + keys.first;
    if (rows == kQueries) return score_rows<T, kQueries>(of, b, keys, queries, tame, some, scores, stride);
    for (int64_t i = 0; i < rows; ++i)
      score_rows<T, 1>(of, b, keys, queries + i, tame + i, some, scores + i * stride, stride);
  };
  if (p.wide_keys) {
    score(of.keys(b), count);
  } else {
    for (int64_t first = 0; first < count; first += kKeys) {
      const int64_t some = count - first < kKeys ? count - first : kKeys;
      const Keys<A> keys = {memory.keys, kKeys * W<A>, memory.forms, first};
      prepare_key_rows<T>(of, b, keys, some);
      score(keys, some);
    }
  }
  if (rows == kQueries) return finish_forward<T, kQueries>(f, b, begin, memory.scores, memory.seen);
  for (int64_t i = 0; i < rows; ++i) finish_forward<T, 1>(f, b, begin + i, memory.scores + i * stride, memory.seen);
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <class T, int Q>
void grad_score_block(const AdditiveBackward& f, int64_t b, int64_t begin, void* scratch) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const Problem<T> of(p);
  const int64_t count = p.keys_of(b), stride = round_up<A>(p.keys), padded = round_up<A>(p.value_channels);
  Pieces pieces(scratch);
  A* const grads = pieces.take<A>(kQueries * padded);
  uint8_t* const seen = p.mask ? pieces.take<uint8_t>(p.keys) : nullptr;
  const int64_t row = b * f.chunk + begin - f.first;
  A* const scores = static_cast<A*>(f.probabilities) + row * stride;
  A* const products = static_cast<A*>(f.grad_scores) + row * stride;
  A* const wide = static_cast<A*>(f.wide_queries) + row * 3 * of.padded;
  const A* queries[Q];
  bool tame[Q];
  for (int i = 0; i < Q; ++i) {
    queries[i] = wide + i * 3 * of.padded;
    tame[i] = prepare_query<T>(of, of.query(b, begin + i), wide + i * 3 * of.padded);
    f.tame_queries[row + i] = tame[i];
  }
  score_rows<T, Q>(of, b, of.keys(b), queries, tame, count, scores, stride);
  if (p.mask) apply_mask<T>(p, b, begin, Q, count, scores, stride, seen);
  if (f.grad_output) {
    for (int i = 0; i < Q; ++i) {
      const T* g = static_cast<const T*>(f.grad_output) + (b * p.queries + begin + i) * p.value_channels;
      for_vectors<A>(p.value_channels,
                     [&](int64_t c, int64_t n) SK_INLINED { store(grads + i * padded + c, load_upto(g + c, n)); });
    }
    value_products<T, Q>(of, b, grads, padded, count, products, stride);
  }
  for (int i = 0; i < Q; ++i) {
    const int64_t query = b * p.queries + begin + i;
    A *const probability = scores + i * stride, *const grad = products + i * stride;
    const T* of_weights = f.grad_weights ? static_cast<const T*>(f.grad_weights) + query * p.keys : nullptr;
    const A of_lse = f.grad_lse ? static_cast<const A*>(f.grad_lse)[query] : A(0);
    if (seen && f.grad_output)  // of a hidden key nothing counts, not even a NaN of its value
      for (int64_t j = 0; j < count; ++j)
        if (!(seen[j] >> i & 1)) grad[j] = 0;
    // From the softmax's own sum: exp(s - lse) has the rounding of a large lse, and P (dP - delta) cancels where one
    // key has it all.
    A lse;
    const A factor = softmax_row<A>(probability, count, lse);
    Vec<A> delta{}, part{};
    for_vectors<A>(count, [&](int64_t c, int64_t n) SK_INLINED {
      const Vec<A> weight = load(probability + c) * factor;
      Vec<A> g = f.grad_output ? load(grad + c) : Vec<A>{};
      if (of_weights) g += load_upto(of_weights + c, n);
      if (n < W<A>) g = keep_first<A>(g, n);
      store(probability + c, weight);
      store(grad + c, g);
      part += weight * g;
      if (c % (kTerms * W<A>) == 0) delta += part, part = Vec<A>{};
    });
    const A rest = sum_lanes<A>(delta + part) - of_lse;
    for_vectors<A>(count, [&](int64_t c, int64_t) SK_INLINED {
      const Vec<A> weight = load(probability + c);
      store(grad + c, weight * (load(grad + c) - rest));
    });
    if (seen)
      for (int64_t j = 0; j < count; ++j)
        if (!(seen[j] >> i & 1)) probability[j] = grad[j] = 0;
    if (f.grad_mask) {
      A* const out = static_cast<A*>(f.grad_mask) + query * p.keys;
      for (int64_t j = 0; j < p.keys; ++j) out[j] = j < count ? grad[j] : A(0);
    }
  }
}

template <class T>
void grad_score_queries(const AdditiveBackward& f, int64_t b, int64_t begin, int64_t end, void* scratch) {
  if (end - begin == kQueries) return grad_score_block<T, kQueries>(f, b, begin, scratch);
  for (int64_t i = begin; i < end; ++i) grad_score_block<T, 1>(f, b, i, scratch);
}

template <class T>
void grad_channel_strip(const AdditiveBackward& f, int64_t b, int64_t s, void* scratch) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const Problem<T> of(p);
  const int64_t left = p.queries - f.first, rows = left < f.chunk ? left : f.chunk, count = p.keys_of(b);
  A* const sums = static_cast<A*>(scratch);
  for (int64_t j = 0; j < count; ++j) store(sums + j * W<A>, Vec<A>{});
  Vec<A> of_weight{}, of_query{};
  const int64_t first = b * f.chunk, stride = round_up<A>(p.keys);
  const auto from = [&](int64_t row) {
    return GradRows<A>{static_cast<const A*>(f.wide_queries) + (first + row) * 3 * of.padded,
                       static_cast<const A*>(f.grad_scores) + (first + row) * stride, stride,
                       f.tame_queries + first + row};
  };
  T* const grad_query = static_cast<T*>(f.grad_query) + (b * p.queries + f.first) * p.channels;
  int64_t row = 0;
  for (; row + kQueries <= rows; row += kQueries)
    grad_strip<T, kQueries>(of, b, s, from(row), grad_query + row * p.channels, sums, of_weight, of_query);
  for (; row < rows; ++row)
    grad_strip<T, 1>(of, b, s, from(row), grad_query + row * p.channels, sums, of_weight, of_query);
  A* const weights = static_cast<A*>(f.weight_sums) + b * of.padded + s * W<A>;
  A* const queries = static_cast<A*>(f.query_sums) + b * of.padded + s * W<A>;
  store(weights, load(weights) + of_weight);
  store(queries, load(queries) + of_query * A(4));
  if (f.key_sums) {
    A* const totals = static_cast<A*>(f.key_sums) + (b * of.strips + s) * p.keys * W<A>;
    for (int64_t j = 0; j < count * W<A>; j += W<A>) store(totals + j, load(totals + j) + load(sums + j));
    return;
  }
  const Vec<A> w = load(of.weight() + s * W<A>) * A(4);
  T* const grad = static_cast<T*>(f.grad_key) + b * p.keys * p.channels + s * W<A>;
  for (int64_t j = 0; j < p.keys; ++j)
    store_upto(grad + j * p.channels, j < count ? load(sums + j * W<A>) * w : Vec<A>{}, of.within(s));
}

template <class T>
void finish_keys(const AdditiveBackward& f, int64_t b, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const AdditiveProblem& p = f.of;
  const Problem<T> of(p);
  const int64_t padded = round_up<A>(p.value_channels);
  for (int64_t j = begin; j < end; ++j) {
    T* const grad = static_cast<T*>(f.grad_key) + (b * p.keys + j) * p.channels;
    for (int64_t s = 0; s < of.strips; ++s) {
      const A* sum = static_cast<const A*>(f.key_sums) + ((b * of.strips + s) * p.keys + j) * W<A>;
      store_upto(grad + s * W<A>, load(sum) * load(of.weight() + s * W<A>) * A(4), of.within(s));
    }
    T* const grad_value = static_cast<T*>(f.grad_value) + (b * p.keys + j) * p.value_channels;
    const A* sum = static_cast<const A*>(f.value_sums) + (b * p.keys + j) * padded;
    for_vectors<A>(p.value_channels,
                   [&](int64_t c, int64_t n) SK_INLINED { store_upto(grad_value + c, load(sum + c), n); });
  }
}

// ---- entry points ---------------------------------------------------------------------------------------------------

int64_t vector(Dtype dtype) { return dtype == Dtype::f64 ? W<double> : W<float>; }
int64_t query_block(Dtype) { return kQueries; }

int64_t forward_scratch(const AdditiveProblem& p) {
  SK_DISPATCH(p.dtype, return ForwardMemory<T>(p, nullptr).bytes);
  return 0;
}

template <class T>
int64_t backward_bytes(const AdditiveProblem& p) {
  using A = acc_t<T>;
  Pieces pieces(nullptr);
  pieces.take<A>(kQueries * round_up<A>(p.value_channels));
  pieces.take<uint8_t>(p.keys);
  const int64_t strip = p.keys * SK_VEC_BYTES;
  return pieces.bytes() > strip ? pieces.bytes() : strip;
}
int64_t backward_scratch(const AdditiveProblem& p) {
  SK_DISPATCH(p.dtype, return backward_bytes<T>(p));
  return 0;
}

void prepare_weight(const AdditiveProblem& p) { SK_DISPATCH(p.dtype, prepare_wide_weight<T>(p)); }
void prepare_keys(const AdditiveProblem& p, int64_t b, int64_t begin, int64_t end) {
  SK_DISPATCH(p.dtype, {
    const Problem<T> of(p);
    Keys<acc_t<T>> keys = of.keys(b);
    keys.data += begin * W<acc_t<T>>, keys.forms += begin, keys.first = begin;
    prepare_key_rows<T>(of, b, keys, end - begin);
  });
}
void forward(const AdditiveForward& f, int64_t b, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(f.of.dtype, forward_queries<T>(f, b, begin, end, scratch));
}
void grad_scores(const AdditiveBackward& f, int64_t b, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(f.of.dtype, grad_score_queries<T>(f, b, begin, end, scratch));
}
void grad_channels(const AdditiveBackward& f, int64_t b, int64_t strip, void* scratch) {
  SK_DISPATCH(f.of.dtype, grad_channel_strip<T>(f, b, strip, scratch));
}
void grad_values(const AdditiveBackward& f, int64_t b, int64_t strip) {
  SK_DISPATCH(f.of.dtype, grad_value_strip<T>(f, b, strip));
}
void finish(const AdditiveBackward& f, int64_t b, int64_t begin, int64_t end) {
  SK_DISPATCH(f.of.dtype, finish_keys<T>(f, b, begin, end));
}

}  // namespace

const AdditiveKernels additive_kernels = {vector,         query_block,  forward_scratch, backward_scratch,
                                          prepare_weight, prepare_keys, forward,         grad_scores,
                                          grad_channels,  grad_values,  finish};

}  // namespace SK_TIER
}  // namespace seqkern
