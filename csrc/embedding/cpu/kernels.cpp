// Embeddings on CPU: rows of the weight, positions, norm and dropout, a token at a time. Compiled once per
// instruction-set tier.
//
// Nothing of the size of the output is kept for the backward pass: it gathers a token's numbers again, which is less to
// read than what would have been written. The gradients of rows of the weight are sums over the tokens that took them,
// in their order, in the accumulation type.
#include "embedding/embedding.h"
#include "philox.h"
#include "scratch.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// s of a token, to `row`, and its sum.
template <class T, class P>
SK_INLINE acc_t<T> gather_row(const EmbeddingRows& p, int64_t i, acc_t<T>* row) {
  using A = acc_t<T>;
  const T* w = static_cast<const T*>(p.weight) + p.ids[i] * p.weight_stride;
  const P* t = p.table ? static_cast<const P*>(p.table) + p.place(i) * p.table_stride : nullptr;
  const A scale = static_cast<A>(p.scale);
  Vec<A> sum{};
  for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
    Vec<A> s = load_upto(w + c, n) * scale;
    if (t) s += load_upto(t + c, n);
    if (n < W<A>) s = keep_first<A>(s, n);
    store(row + c, s);
    sum += s;
  });
  return sum_lanes<A>(sum);
}

template <class T>
SK_INLINE acc_t<T> gather(const EmbeddingRows& p, int64_t i, acc_t<T>* row) {
  return p.table_wide ? gather_row<T, acc_t<T>>(p, i, row) : gather_row<T, T>(p, i, row);
}

// Without norm and dropout: the numbers pass through registers, or are copied as they are.
template <class T, class P>
void forward_sums(const EmbeddingForward& f, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const EmbeddingRows& p = f.of;
  const A scale = static_cast<A>(p.scale);
  for (int64_t i = begin; i < end; ++i) {
    const T* w = static_cast<const T*>(p.weight) + p.ids[i] * p.weight_stride;
    T* output = static_cast<T*>(f.output) + i * p.columns;
    if (!p.table && scale == 1) {
      __builtin_memcpy(output, w, static_cast<size_t>(p.columns) * sizeof(T));
      continue;
    }
    const P* t = p.table ? static_cast<const P*>(p.table) + p.place(i) * p.table_stride : nullptr;
    for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> s = load_upto(w + c, n) * scale;
      if (t) s += load_upto(t + c, n);
      store_upto(output + c, s, n);
    });
  }
}

template <class T>
void forward_tokens(const EmbeddingForward& f, int64_t begin, int64_t end, void* scratch) {
  using A = acc_t<T>;
  const EmbeddingRows& p = f.of;
  if (!p.normed && !p.dropout.active)
    return p.table_wide ? forward_sums<T, A>(f, begin, end) : forward_sums<T, T>(f, begin, end);
  const T *weight = static_cast<const T*>(p.norm_weight), *bias = static_cast<const T*>(p.norm_bias);
  A* row = static_cast<A*>(scratch);
  DropoutRow<A> dropout;
  for (int64_t i = begin; i < end; ++i) {
    A mean = gather<T>(p, i, row) / static_cast<A>(p.columns), rstd = 1;
    if (p.normed) {
      Vec<A> squares{};
      for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
        Vec<A> d = load(row + c) - mean;
        if (n < W<A>) d = keep_first<A>(d, n);
        squares += d * d;
      });
      rstd = 1 / __builtin_sqrt(sum_lanes<A>(squares) / static_cast<A>(p.columns) + static_cast<A>(p.eps));
      static_cast<A*>(f.mean)[i] = mean, static_cast<A*>(f.rstd)[i] = rstd;
    }
    if (p.dropout.active) dropout.begin(p.dropout, i);
    T* output = static_cast<T*>(f.output) + i * p.columns;
    for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
      Vec<A> y = load(row + c);
      if (p.normed) {
        y = (y - mean) * rstd;
        if (weight) y *= load_upto(weight + c, n);
        if (bias) y += load_upto(bias + c, n);
      }
      if (p.dropout.active) y = dropout.apply(y, c);
      store_upto(output + c, y, n);
    });
  }
}

template <class T>
void backward_tokens(const EmbeddingBackward& b, int64_t begin, int64_t end, void* scratch) {
  using A = acc_t<T>;
  const EmbeddingRows& p = b.of;
  const T* weight = static_cast<const T*>(p.norm_weight);
  A *row = static_cast<A*>(scratch), *grads = static_cast<A*>(b.grad);
  const int64_t padded = (p.columns + W<A> - 1) / W<A> * W<A>;
  A *upstream = row + padded, *weights = upstream + padded, *biases = weights + padded;
  for (int64_t c = 0; c < padded; c += W<A>) store(weights + c, Vec<A>{}), store(biases + c, Vec<A>{});
  DropoutRow<A> dropout;
  for (int64_t i = begin; i < end; ++i) {
    const T* dy = static_cast<const T*>(b.grad_output) + i * p.columns;
    A* grad = grads + i * p.columns;
    if (p.dropout.active) dropout.begin(p.dropout, i);
    const auto dropped = [&](int64_t c, int64_t n) SK_INLINED {
      const Vec<A> g = load_upto(dy + c, n);
      return p.dropout.active ? dropout.apply(g, c) : g;
    };
    if (!p.normed) {
      for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED { store_upto(grad + c, dropped(c, n), n); });
      continue;
    }
    gather<T>(p, i, row);
    const A mean = static_cast<const A*>(b.mean)[i], rstd = static_cast<const A*>(b.rstd)[i];
    Vec<A> sum{}, projected{};
    for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
      const Vec<A> x = (load(row + c) - mean) * rstd;
      Vec<A> g = dropped(c, n);
      if (n < W<A>) g = keep_first<A>(g, n);
      store(weights + c, load(weights + c) + g * x);
      store(biases + c, load(biases + c) + g);
      if (weight) g *= load_upto(weight + c, n);
      if (n < W<A>) g = keep_first<A>(g, n);
      store(row + c, x);
      store(upstream + c, g);
      sum += g;
      projected += n < W<A> ? keep_first<A>(g * x, n) : g * x;
    });
    const A mean_g = sum_lanes<A>(sum) / static_cast<A>(p.columns);
    const A mean_gx = sum_lanes<A>(projected) / static_cast<A>(p.columns);
    for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
      store_upto(grad + c, (load(upstream + c) - mean_g - load(row + c) * mean_gx) * rstd, n);
    });
  }
  if (!p.normed) return;
  const int64_t block = begin / kEmbeddingBlock * p.columns;
  for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
    if (b.norm_weights) store_upto(static_cast<A*>(b.norm_weights) + block + c, load(weights + c), n);
    if (b.norm_biases) store_upto(static_cast<A*>(b.norm_biases) + block + c, load(biases + c), n);
  });
}

template <class S, class T>
void sum_rows(const EmbeddingSum& p, const int64_t* tokens, int64_t count, T* target) {
  using A = acc_t<T>;
  const S* source = static_cast<const S*>(p.source);
  const A factor = static_cast<A>(p.factor);
  for_vectors<A>(p.columns, [&](int64_t c, int64_t n) SK_INLINED {
    Vec<A> sum{};
    for (int64_t t = 0; t < count; ++t) sum += load_upto(source + tokens[t] * p.columns + c, n);
    store_upto(target + c, sum * factor, n);
  });
}

int64_t scratch_bytes(Dtype dtype, int64_t columns) {
  const int64_t size = dtype == Dtype::f64 ? 8 : 4, width = SK_VEC_BYTES / size;
  return 4 * ((columns + width - 1) / width * width) * size;
}
void forward(const EmbeddingForward& p, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(p.of.dtype, forward_tokens<T>(p, begin, end, scratch));
}
void backward(const EmbeddingBackward& p, int64_t begin, int64_t end, void* scratch) {
  SK_DISPATCH(p.of.dtype, backward_tokens<T>(p, begin, end, scratch));
}
void sum(const EmbeddingSum& p, const int64_t* tokens, int64_t count, void* target) {
  SK_DISPATCH(p.target_type, {
    if (p.source_type == p.target_type) sum_rows<T, T>(p, tokens, count, static_cast<T*>(target));
    else sum_rows<acc_t<T>, T>(p, tokens, count, static_cast<T*>(target));
  });
}

}  // namespace

const EmbeddingKernels embedding_kernels = {scratch_bytes, forward, backward, sum};

}  // namespace SK_TIER
}  // namespace seqkern
