// Layer norm and RMS norm on CPU, forward and backward, with the residual addition and the dropout before them.
// Compiled once per instruction-set tier.
//
//   s = dropout(x) + residual, or x alone
//   y = (s - mu) * rstd * weight + bias,  rstd = 1 / sqrt(var + eps)     Ba et al. 2016; Jurafsky & Martin 9.39-9.42
//   y = s * rstd * weight + bias,  rstd = 1 / sqrt(mean(s^2) + eps)      not centred: Zhang & Sennrich 2019
//   round_before_weight: s * rstd is rounded to the dtype there, as Llama's norm does; no gradient sees it
//   ds = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * weight,  xhat = (s - mu) * rstd;  without the mean(g)
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy
//
// Exact at any mean. A float mean of numbers near 1e4 has an error of 1e-3 in its last bit, which is a tenth of a
// standard deviation of 0.01. So the deviations d = s - mean are taken first (that subtraction is exact there). Their
// own mean `shift` is the error of `mean`, and var = mean(d^2) - shift^2, xhat = (d - shift) * rstd. The backward pass
// finds `shift` again from the row, which it reads anyway: mean(g * xhat) = rstd * (mean(g * d) - shift * mean(g)).
//
// A row is read from memory once: later passes over it find it in cache. The sums for the parameters are kept by chunks
// of rows, whose number depends on the shape alone; within a chunk they are summed by parts of kRowsPerSum rows. The
// chunks are then added in order: the bits are the same on any number of threads. A part is summed in memory of the
// thread, which stays in cache from chunk to chunk. The backward pass writes whole cache lines: rows whose stride is a
// multiple of 4096 bytes fall on the same few sets of the cache, and would evict each other between the halves of a
// line.
//
// Prefetch policy, by the length of a row:
//   - Short rows of 4-byte elements prefetch the next row into L2 while this one is written.
//   - Short rows of 2-byte elements prefetch the next row into L1, and the lines to be written 2 KiB ahead.
//   - Long rows prefetch the lines to be written, in the first pass; backward they take two rows at a time.
//   - Intel's cores with AVX-512 prefetch the next row whatever its length, short float32 rows into L1 too, and float32
//     lines to be written in the first pass as well.
//
// bfloat16 on AVX2 and AVX-512 goes by pairs of vectors (pair.h). The parameters and their sums are stored in packet
// order, the order of numbers within a pair.
//
// Loops over columns are forced inline: in a function of its own gcc would reload the captured variables for every
// vector, which takes up to 1.5 times as long.
//
// Measurements, and what was tried and lost: NOTES.md.
#include "layer_norm/layer_norm.h"
#include "pair.h"
#include "philox.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Independent sums hide the latency of the addition.
constexpr int kUnroll = 4;
// In bytes: a cache line; the longest row of which several stay in L1; and the prefetch distance of lines to be
// written.
constexpr int64_t kLine = 64, kShortRow = 8192, kWriteDistance = 2048;
// Rows for which it pays to copy the parameters to packet order, at least.
constexpr int64_t kLeastOrdered = 4;
template <class T>
SK_INLINE bool is_short(int64_t columns) {
  return columns * static_cast<int64_t>(sizeof(T)) <= kShortRow;
}
SK_INLINE bool is_wide_intel() { return SK_VEC_BYTES == 64 && !is_amd(); }
// Whether the next row is prefetched while this one is written.
template <class T>
SK_INLINE bool prefetches_rows(int64_t columns) {
  return is_wide_intel() || is_short<T>(columns);
}
// Whether the first pass prefetches the lines to be written.
template <class T>
SK_INLINE bool prefetches_output(int64_t columns) {
  return !prefetches_rows<T>(columns) || (is_wide_intel() && sizeof(T) != 2);
}

// Calls body(column, slot, packet), with `slot` cycling over the unrolled sums, then tail(column, count) for the rest
// of the columns. The type of `packet` is U, or a single vector where no whole U is left. Every kFold rounds the `sums`
// move their contents up a level: each number is then added to at most some tens of others, and a long row is summed
// nearly as exactly as a short one.
constexpr int kFold = 16;
template <class A, class U, class Body, class Tail, class... Sums>
SK_INLINE void for_columns(int64_t columns, const Body& body, const Tail& tail, Sums&... sums) {
  int64_t c = 0;
  const auto round = [&]() SK_INLINED {
    for (int u = 0; u < kUnroll; u += kVectors<U>) body(c + u * W<A>, u, U{});
    c += kUnroll * W<A>;
  };
  if constexpr (sizeof...(Sums) > 0) {
    for (; c + kFold * kUnroll * W<A> <= columns;) {
      for (int n = 0; n < kFold; ++n) round();
      (sums.fold(), ...);
    }
  }
  for (; c + kUnroll * W<A> <= columns;) round();
  if constexpr (kVectors<U> == 2) {
    if (c + 2 * W<A> <= columns) {
      body(c, 0, U{});
      c += 2 * W<A>;
    }
  }
  for (; c + W<A> <= columns; c += W<A>) body(c, 0, Vec<A>{});
  if (c < columns) tail(c, columns - c);
}

template <class A>
struct Sum {
  Vec<A> part[kUnroll] = {}, middle = {}, upper = {}, top = {};
  int folds = 0;
  SK_INLINE void add(int u, Vec<A> v) { part[u] += v; }
  SK_INLINE void add(int u, Pair v) {
    part[u] += v.a;
    part[u + 1] += v.b;
  }
  SK_INLINE void fold() {
    middle += (part[0] + part[1]) + (part[2] + part[3]);
    for (int u = 0; u < kUnroll; ++u) part[u] = Vec<A>{};
    if (++folds % kFold != 0) return;
    upper += middle;
    middle = Vec<A>{};
    if (folds % (kFold * kFold) != 0) return;
    top += upper;
    upper = Vec<A>{};
  }
  SK_INLINE Vec<A> lanes() const { return ((((part[0] + part[1]) + (part[2] + part[3])) + middle) + upper) + top; }
  SK_INLINE A total() const { return sum_lanes<A>(lanes()); }
};

template <class A>
SK_INLINE A root(A x) {
  return sizeof(A) == 8 ? A(__builtin_sqrt(x)) : A(__builtin_sqrtf(x));
}

template <class A>
SK_INLINE bool any_lane(IVec<A> mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(mask), bit_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(bit_cast<__m256i>(mask), bit_cast<__m256i>(mask));
#else
  bool any = false;
  for (int i = 0; i < W<A>; ++i) any |= mask[i] != 0;
  return any;
#endif
}

// Whether a cache line of a row begins at this slot of for_columns. With 2-byte elements both halves of a line are
// prefetched: in long rows the first prefetch often has no effect.
template <class T>
SK_INLINE bool begins_line(int slot) {
  return sizeof(T) == 2 || slot * W<acc_t<T>> * static_cast<int64_t>(sizeof(T)) % kLine == 0;
}
// Prefetches the line of row[column], to be read with the next row, or to be written. `into_l1`: else into L2, except
// lines of 2-byte elements, which always go to L1.
template <class T>
SK_INLINE void prefetch_read(const T* row, int64_t column, bool into_l1) {
  if (sizeof(T) == 2 || into_l1) __builtin_prefetch(row + column, 0, 3);
  else __builtin_prefetch(row + column, 0, 2);
}
template <class T>
SK_INLINE void prefetch_write(const T* row, int64_t column) {
  __builtin_prefetch(row + column, 1, 3);
}
// For the row that is being written while the next row is prefetched.
template <class T>
SK_INLINE void prefetch_write_ahead(const T* row, int64_t column) {
  if (sizeof(T) == 2) __builtin_prefetch(reinterpret_cast<const char*>(row + column) + kWriteDistance, 1, 3);
}

// Mean and spread of a row; the mean is pivot + shift.
template <class A>
struct Deviations {
  A pivot, shift, rstd;
};

// The same in double, for rows in which a few elements outweigh all others (which would be rounded away, or the squares
// overflow). Rare, so it is simple.
template <class T, bool Centred>
__attribute__((noinline)) Deviations<acc_t<T>> careful_deviations(const T* x, int64_t columns, double eps) {
  using A = acc_t<T>;
  const auto sum = [&](auto term) {
    double total = 0;
    A lanes[W<A>];
    for (int64_t c = 0; c < columns; c += W<A>) {
      const int64_t n = columns - c < W<A> ? columns - c : W<A>;
      store(lanes, load_upto(x + c, n));
      for (int64_t i = 0; i < n; ++i) total += term(static_cast<double>(lanes[i]));
    }
    return total / static_cast<double>(columns);
  };
  const double mean = Centred ? sum([](double v) { return v; }) : 0.0;
  const double variance = sum([&](double v) { return (v - mean) * (v - mean); });
  const A pivot = static_cast<A>(mean);
  return {pivot, static_cast<A>(mean - pivot), static_cast<A>(1 / __builtin_sqrt(variance + eps))};
}

// The pivot: the mean of a row's first elements.
template <class T>
SK_INLINE acc_t<T> pivot_of(const T* x, int64_t columns) {
  using A = acc_t<T>;
  Vec<A> sum;  // of x / n, not of x: does not overflow
  if (columns >= kUnroll * W<A>) {
    Vec<A> part[kUnroll];
    for (int u = 0; u < kUnroll; ++u) part[u] = load(x + u * W<A>) * (A(1) / A(kUnroll * W<A>));
    sum = (part[0] + part[1]) + (part[2] + part[3]);
  } else {
    sum = Vec<A>{};
    for (int64_t c = 0; c < columns; c += W<A>) {
      const int64_t n = columns - c < W<A> ? columns - c : W<A>;
      sum += load_upto(x + c, n) * (A(1) / A(columns));
    }
  }
  return sum_lanes<A>(sum);
}

template <class T, bool Centred>
__attribute__((noinline)) Deviations<acc_t<T>> deviations_again(const T* x, int64_t columns, double eps,
                                                                acc_t<T> pivot);

// One pass is enough if the pivot is within half a standard deviation of the mean; otherwise the mean becomes the pivot
// of a second pass. `kPrefetch`: the lines of the row `written`.
template <class T, bool Centred, bool kPrefetch>
SK_INLINE Deviations<acc_t<T>> deviations(const T* x, int64_t columns, double eps, acc_t<T> pivot, const T* written,
                                          bool again) {
  using A = acc_t<T>;
  Sum<A> first, second;
  for_columns<A, Packet<T>>(
      columns,
      [&](int64_t c, int u, auto packet) SK_INLINED {
        if (kPrefetch && begins_line<T>(u)) prefetch_write(written, c);
        auto d = load_as<decltype(packet)>(x + c);
        if constexpr (Centred) {
          d = d - pivot;
          first.add(u, d);
        }
        second.add(u, d * d);
      },
      [&](int64_t c, int64_t n) {
        Vec<A> d = load_partial(x + c, n);
        if constexpr (Centred) {
          d = keep_first<A>(d - pivot, n);
          first.part[0] += d;
        }
        second.part[0] += d * d;
      },
      first, second);
  const Vec<A> lanes = second.lanes();
  const A share = A(1) / A(columns), shift = Centred ? first.total() / A(columns) : A(0), square = shift * shift;
  // RMS norm divides: to have the bits of the models' own, where the sum is exact.
  const A sum = sum_lanes<A>(lanes), mean_square = Centred ? sum * share : sum / A(columns);
  const A variance = mean_square < square ? A(0) : mean_square - square;
  if (Centred && !again && __builtin_expect(!(A(4) * square <= variance), 0))
    return deviations_again<T, Centred>(x, columns, eps, pivot + shift);
  if constexpr (sizeof(A) == 4) {
    const A half = A(0.5) * (variance + square);
    const bool outweighed = columns > 4 * kUnroll * W<A> && any_lane<A>(lanes * share > half);
    if (__builtin_expect(outweighed || !(variance <= A(3e38)), 0))
      return careful_deviations<T, Centred>(x, columns, eps);
  }
  return {pivot, shift, A(1) / root(A(variance + A(eps)))};
}
template <class T, bool Centred>
Deviations<acc_t<T>> deviations_again(const T* x, int64_t columns, double eps, acc_t<T> pivot) {
  return deviations<T, Centred, false>(x, columns, eps, pivot, nullptr, true);
}

// Writes a row of s = dropout(input) + residual, rounded to T like the addition of two tensors.
template <class T>
SK_INLINE void add_row(const LayerNormForward& p, int64_t row, DropoutRow<acc_t<T>>& dropout, T* s) {
  using A = acc_t<T>;
  const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
  const T* r = static_cast<const T*>(p.residual) + row * p.residual_stride;
  if (p.dropout.active) {
    dropout.begin(p.dropout, row);
    for_columns<A, Vec<A>>(
        p.columns, [&](int64_t c, int, auto) { store(s + c, dropout.apply(load(x + c), c) + load(r + c)); },
        [&](int64_t c, int64_t n) {
          store_partial(s + c, dropout.apply(load_partial(x + c, n), c) + load_partial(r + c, n), n);
        });
  } else {
    for_columns<A, Packet<T>>(
        p.columns,
        [&](int64_t c, int, auto packet) SK_INLINED {
          using U = decltype(packet);
          store_as<U>(s + c, load_as<U>(x + c) + load_as<U>(r + c));
        },
        [&](int64_t c, int64_t n) { store_partial(s + c, load_partial(x + c, n) + load_partial(r + c, n), n); });
  }
}

template <class T, bool Centred>
void forward_rows(const LayerNormForward& p, int64_t row_begin, int64_t row_end) {
  using A = acc_t<T>;
  const int64_t columns = p.columns;
  const A* weight = static_cast<const A*>(p.weight);
  const A* bias = static_cast<const A*>(p.bias);
  const bool ahead = prefetches_rows<T>(columns), prefetch_output = prefetches_output<T>(columns),
             into_l1 = is_wide_intel() && is_short<T>(columns);
  // The parameters in packet order, if they are used often enough and fit.
  constexpr int64_t kMostOrdered = kInPairs<T> ? 2048 : 1;
  alignas(64) A ordered_weight[kMostOrdered], ordered_bias[kMostOrdered];
  const bool in_order = kInPairs<T> && weight && columns <= kMostOrdered && row_end - row_begin >= kLeastOrdered;
  if (in_order) {
    order<T>(columns, weight, ordered_weight);
    weight = ordered_weight;
    if (bias) {
      order<T>(columns, bias, ordered_bias);
      bias = ordered_bias;
    }
  }
  DropoutRow<A> dropout;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const bool more = ahead && row + 1 < row_end;
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    const T *next = x + more * p.input_stride, *next_residual = nullptr;
    if (p.residual) {
      next_residual = static_cast<const T*>(p.residual) + (row + more) * p.residual_stride;
      T* s = static_cast<T*>(p.sum) + row * columns;
      add_row<T>(p, row, dropout, s);
      x = s;
    }
    T* y = p.output ? static_cast<T*>(p.output) + row * columns : nullptr;

    const A first = Centred ? pivot_of(x, columns) : A(0);
    const auto found = prefetch_output && y ? deviations<T, Centred, true>(x, columns, p.eps, first, y, false)
                                            : deviations<T, Centred, false>(x, columns, p.eps, first, nullptr, false);
    const A pivot = found.pivot, rstd = found.rstd, offset = -(found.shift * rstd);
    if (Centred && p.mean) static_cast<A*>(p.mean)[row] = pivot + found.shift;
    if (p.rstd) static_cast<A*>(p.rstd)[row] = rstd;
    if (!y) continue;

    const auto second_pass = [&](auto affine, auto prefetch, auto in_order, auto round) {
      constexpr bool Affine = decltype(affine)::value;       // with weight and bias; else with one or none
      constexpr bool kPrefetch = decltype(prefetch)::value;  // for the next row
      constexpr bool Ordered = decltype(in_order)::value;    // parameters in packet order
      constexpr bool Round = decltype(round)::value;         // before the weight
      const auto beside = [](auto packet, const A* parameter) SK_INLINED {
        using U = decltype(packet);
        if constexpr (Ordered) return load_ordered<U>(parameter);
        else return load_as<U>(parameter);
      };
      const auto normalise = [&](auto v, auto w, auto b) SK_INLINED {
        if constexpr (Centred) v = (v - pivot) * rstd + broadcast_as<decltype(v)>(offset);
        else v = v * rstd;
        if constexpr (Round) v = rounded_as<T>(v);
        return v * w + b;
      };
      for_columns<A, Packet<T>>(
          columns,
          [&](int64_t c, int u, auto packet) SK_INLINED {
            using U = decltype(packet);
            if (kPrefetch && begins_line<T>(u)) {
              prefetch_read(next, c, into_l1);
              if (next_residual) prefetch_read(next_residual, c, into_l1);
              prefetch_write_ahead(y, c);
            }
            const U w = Affine || weight ? beside(packet, weight + c) : broadcast_as<U>(A(1));
            const U b = Affine || bias ? beside(packet, bias + c) : U{};
            store_as<U>(y + c, normalise(load_as<U>(x + c), w, b));
          },
          [&](int64_t c, int64_t n) {
            const Vec<A> w = weight ? load_partial(weight + c, n) : broadcast<A>(1);
            store_partial(y + c, normalise(load_partial(x + c, n), w, bias ? load_partial(bias + c, n) : Vec<A>{}), n);
          });
    };
    const auto choose = [&](auto affine) {
      const auto with = [&](auto prefetch, auto round) {
        if constexpr (kInPairs<T>) {
          if (in_order) return second_pass(affine, prefetch, std::true_type{}, round);
        }
        second_pass(affine, prefetch, std::false_type{}, round);
      };
      if constexpr (!Centred && sizeof(T) == 2) {
        if (p.round_before_weight) return with(std::true_type{}, std::true_type{});  // prefetched or not: one instance
      }
      if (ahead) with(std::true_type{}, std::false_type{});
      else with(std::false_type{}, std::false_type{});
    };
    if (weight && bias) choose(std::true_type{});
    else choose(std::false_type{});
  }
}

// The state of a row for the second pass.
template <class T>
struct RowGradient {
  using A = acc_t<T>;
  const T *x, *dy, *grad_sum;
  T *grad_residual, *grad_input;
  A mean, offset, rstd, mean_g, minus_mean_gx;  // xhat = (x - mean) * rstd + offset
  DropoutRow<A> dropout;
};

template <class T, bool Centred, bool Full>
SK_INLINE void first_pass(const LayerNormBackward& p, int64_t row, const acc_t<T>* weight, RowGradient<T>& r) {
  using A = acc_t<T>;
  const int64_t columns = p.columns;
  const bool prefetch = prefetches_output<T>(columns);
  r.x = static_cast<const T*>(p.input) + row * p.input_stride;
  r.dy = static_cast<const T*>(p.grad_output) + row * p.grad_output_stride;
  r.grad_sum = p.grad_sum ? static_cast<const T*>(p.grad_sum) + row * p.grad_sum_stride : nullptr;
  r.grad_residual = static_cast<T*>(p.grad_residual) + row * columns;
  r.grad_input = p.dropout.active ? static_cast<T*>(p.grad_input) + row * columns : nullptr;
  r.rstd = static_cast<const A*>(p.rstd)[row];
  r.mean = Centred ? static_cast<const A*>(p.mean)[row] : A(0);
  if (p.dropout.active) r.dropout.begin(p.dropout, row);

  Sum<A> sum_d, sum_g, sum_gd;
  const auto accumulate = [&](auto d, auto g, int u) SK_INLINED {
    if constexpr (Centred) {
      sum_d.add(u, d);
      sum_g.add(u, g);
    }
    sum_gd.add(u, g * d);
  };
  for_columns<A, Packet<T>>(
      columns,
      [&](int64_t c, int u, auto packet) SK_INLINED {
        using U = decltype(packet);
        if (prefetch && begins_line<T>(u)) prefetch_write(r.grad_residual, c);
        const U g = load_as<U>(r.dy + c);
        accumulate(load_as<U>(r.x + c) - r.mean, Full || weight ? rounded(g * load_ordered<U>(weight + c)) : g, u);
      },
      [&](int64_t c, int64_t n) {
        const Vec<A> d = keep_first<A>(load_partial(r.x + c, n) - r.mean, n);
        const Vec<A> w = weight ? load_partial(weight + c, n) : broadcast<A>(1);
        accumulate(d, rounded(load_partial(r.dy + c, n) * w), 0);
      },
      sum_d, sum_g, sum_gd);
  const A shift = Centred ? sum_d.total() / A(columns) : A(0);
  r.offset = -(shift * r.rstd);
  r.mean_g = Centred ? sum_g.total() / A(columns) : A(0);
  r.minus_mean_gx = (shift * r.mean_g - sum_gd.total() / A(columns)) * r.rstd;
}

// The gradients of `kRows` rows. Their terms of dweight and dbias are added to dw and db, or overwrite these if they
// are the `first`. `Added`: with grad_sum or dropout. `Full`: with weight, dw and db; else any of them may be null. All
// three are in packet order.
template <class T, bool Centred, bool Added, bool Full, int kRows>
SK_INLINE void backward_rows(const LayerNormBackward& p, int64_t row, bool first, const acc_t<T>* weight, acc_t<T>* dw,
                             acc_t<T>* db) {
  using A = acc_t<T>;
  const int64_t columns = p.columns;
  const bool ahead = prefetches_rows<T>(columns), into_l1 = is_wide_intel() && is_short<T>(columns);
  const int64_t step = row + 2 * kRows <= p.rows ? kRows : 0;  // from this row to the next to read
  RowGradient<T> rows[kRows];
  for (int i = 0; i < kRows; ++i) first_pass<T, Centred, Full>(p, row + i, weight, rows[i]);

  // For all rows: `kPackets` packets of columns, or the first n < W columns of one vector.
  const auto block = [&](int64_t begin, int64_t n, auto packet, auto packets) SK_INLINED {
    using U = decltype(packet);
    constexpr int kPackets = decltype(packets)::value;
    constexpr int64_t width = kVectors<U> * W<A>;
    U w[kPackets], sum_w[kPackets], sum_b[kPackets];
    for (int u = 0; u < kPackets; ++u) {
      const int64_t c = begin + u * width;
      w[u] = Full || weight ? load_ordered_upto<U>(weight + c, n) : broadcast_as<U>(A(1));
      sum_w[u] = !first && (Full || dw) ? load_ordered_upto<U>(dw + c, n) : U{};
      sum_b[u] = !first && (Full || db) ? load_ordered_upto<U>(db + c, n) : U{};
    }
    for (int i = 0; i < kRows; ++i) {
      RowGradient<T>& r = rows[i];
      if (ahead) {
        prefetch_read(r.x + step * p.input_stride, begin, into_l1);
        prefetch_read(r.dy + step * p.grad_output_stride, begin, into_l1);
        if (Added && r.grad_sum) prefetch_read(r.grad_sum + step * p.grad_sum_stride, begin, into_l1);
        prefetch_write_ahead(r.grad_residual, begin);
      }
      for (int u = 0; u < kPackets; ++u) {
        const int64_t c = begin + u * width;
        const U x = load_upto_as<U>(r.x + c, n), dout = rounded(load_upto_as<U>(r.dy + c, n));  // one load each
        U xhat;
        if constexpr (Centred) xhat = (x - r.mean) * r.rstd + broadcast_as<U>(r.offset);
        else xhat = x * r.rstd;
        sum_w[u] += dout * xhat;
        sum_b[u] += dout;
        // Rounded as in the first pass, so that a single column gives exactly zero.
        const U g = rounded(dout * w[u]);
        U total = (xhat * r.minus_mean_gx + (g - r.mean_g)) * r.rstd;
        if (Added && r.grad_sum) total += load_upto_as<U>(r.grad_sum + c, n);
        store_upto_as(r.grad_residual + c, total, n);
        if (Added && r.grad_input) {
          if constexpr (kVectors<U> == 1) {
            store_upto(r.grad_input + c, r.dropout.apply(total, c), n);
          } else {
            Vec<A> sequence[2];
            in_sequence(total, sequence);
            for (int i = 0; i < 2; ++i) {
              const int64_t at = c + i * W<A>;
              store(r.grad_input + at, r.dropout.apply(sequence[i], at));
            }
          }
        }
      }
    }
    for (int u = 0; u < kPackets; ++u) {
      const int64_t c = begin + u * width;
      if (Full || dw) store_ordered_upto(dw + c, sum_w[u], n);
      if (Full || db) store_ordered_upto(db + c, sum_b[u], n);
    }
  };
  int64_t c = 0;
  const auto lines = [&](auto packet) {
    constexpr int64_t width = kVectors<decltype(packet)> * W<A>, line = kLine / static_cast<int64_t>(sizeof(T));
    constexpr int packets = width < line ? static_cast<int>(line / width) : 1;
    for (; c + packets * width <= columns; c += packets * width)
      block(c, width, packet, std::integral_constant<int, packets>{});
  };
  if constexpr (kInPairs<T>) {
    lines(Pair{});
    // The parameters are in pairs as far as this.
    constexpr int64_t width = 2 * W<A>;
    for (; c + width <= columns; c += width) block(c, width, Pair{}, std::integral_constant<int, 1>{});
  }
  lines(Vec<A>{});
  for (; c < columns; c += W<A>) block(c, columns - c, Vec<A>{}, std::integral_constant<int, 1>{});
}

// Adds sums in packet order to sums in sequence, or overwrites these if they are the `first`.
template <class T>
SK_INLINE void add_ordered(int64_t columns, bool first, const acc_t<T>* part, acc_t<T>* sum) {
  using A = acc_t<T>;
  int64_t c = 0;
  if constexpr (kInPairs<T>) {
    for (; c + 2 * W<A> <= columns; c += 2 * W<A>) {
      const Pair v = load_ordered<Pair>(part + c);
      store_as(sum + c, first ? v : load_as<Pair>(sum + c) + v);
    }
  }
  for (; c < columns; ++c) sum[c] = first ? part[c] : sum[c] + part[c];
}

// One chunk of rows: the gradients of each row, and the chunk's sums of dweight and dbias. `scratch`: 2 * columns, in
// which rows are summed; it stays in cache from chunk to chunk. `weight`: in packet order, like these sums.
template <class T, bool Centred, bool Added>
void backward_chunk(const LayerNormBackward& p, int64_t chunk, const acc_t<T>* weight, acc_t<T>* scratch) {
  using A = acc_t<T>;
  constexpr int kRows = 2;
  const int64_t columns = p.columns;
  const bool together = !is_short<A>(columns) || (SK_VEC_BYTES == 64 ? !is_amd() : kInPairs<T>);
  int64_t row = chunk * p.rows_per_chunk;
  const int64_t row_begin = row, row_end = row + p.rows_per_chunk < p.rows ? row + p.rows_per_chunk : p.rows;
  A* dw = p.grad_weight_partial ? static_cast<A*>(p.grad_weight_partial) + chunk * columns : nullptr;
  A* db = p.grad_bias_partial ? static_cast<A*>(p.grad_bias_partial) + chunk * columns : nullptr;
  A *dw_part = dw ? scratch : nullptr, *db_part = db ? scratch + columns : nullptr;
  const auto rows_until = [&](int64_t end, auto full) {
    constexpr bool Full = decltype(full)::value;
    const int64_t begin = row;
    for (; together && row + kRows <= end; row += kRows)
      backward_rows<T, Centred, Added, Full, kRows>(p, row, row == begin, weight, dw_part, db_part);
    for (; row < end; ++row) backward_rows<T, Centred, Added, Full, 1>(p, row, row == begin, weight, dw_part, db_part);
  };
  while (row < row_end) {
    const bool first = row == row_begin;
    const int64_t part_end = row + kRowsPerSum < row_end ? row + kRowsPerSum : row_end;
    if (p.weight && dw && db) rows_until(part_end, std::true_type{});
    else rows_until(part_end, std::false_type{});
    if (dw) add_ordered<T>(columns, first, dw_part, dw);
    if (db) add_ordered<T>(columns, first, db_part, db);
  }
}

// In blocks of chunks, for smaller rounding errors.
template <class A>
void reduce_columns(int64_t chunks, int64_t columns, const A* partial, A* total, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = 32, kWidth = 64;
  for (int64_t first = begin; first < end; first += kWidth) {
    const int64_t width = end - first < kWidth ? end - first : kWidth;
    A sum[kWidth] = {};
    for (int64_t block = 0; block < chunks; block += kBlock) {
      const int64_t last = block + kBlock < chunks ? block + kBlock : chunks;
      A part[kWidth] = {};
      for (int64_t chunk = block; chunk < last; ++chunk)
        for (int64_t c = 0; c < width; ++c) part[c] += partial[chunk * columns + first + c];
      for (int64_t c = 0; c < width; ++c) sum[c] += part[c];
    }
    for (int64_t c = 0; c < width; ++c) total[first + c] = sum[c];
  }
}

void forward(const LayerNormForward& p, int64_t row_begin, int64_t row_end) {
  SK_DISPATCH(p.dtype, (p.centred ? forward_rows<T, true> : forward_rows<T, false>)(p, row_begin, row_end));
}

template <class T>
void backward_chunks(const LayerNormBackward& p, int64_t chunk_begin, int64_t chunk_end, void* scratch) {
  using A = acc_t<T>;
  A* const sums = static_cast<A*>(scratch);
  const A* weight = static_cast<const A*>(p.weight);
  if (kInPairs<T> && weight) {
    order<T>(p.columns, weight, sums + 2 * p.columns);
    weight = sums + 2 * p.columns;
  }
  const bool added = p.grad_sum || p.dropout.active;
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    if (p.centred && added) backward_chunk<T, true, true>(p, chunk, weight, sums);
    else if (p.centred) backward_chunk<T, true, false>(p, chunk, weight, sums);
    else if (added) backward_chunk<T, false, true>(p, chunk, weight, sums);
    else backward_chunk<T, false, false>(p, chunk, weight, sums);
  }
}

void backward(const LayerNormBackward& p, int64_t chunk_begin, int64_t chunk_end, void* scratch) {
  SK_DISPATCH(p.dtype, backward_chunks<T>(p, chunk_begin, chunk_end, scratch));
}

void reduce(Dtype dtype, int64_t chunks, int64_t columns, const void* partial, void* total, int64_t begin,
            int64_t end) {
  if (dtype == Dtype::f64) {
    reduce_columns(chunks, columns, static_cast<const double*>(partial), static_cast<double*>(total), begin, end);
  } else {
    reduce_columns(chunks, columns, static_cast<const float*>(partial), static_cast<float*>(total), begin, end);
  }
}

template <class T, class A>
void widen_to(int64_t count, const T* parameter, A offset, A* widened) {
  int64_t c = 0;
  if constexpr (std::is_same<A, acc_t<T>>::value)
    for (; c + W<A> <= count; c += W<A>) store(widened + c, load(parameter + c) + offset);
  for (; c < count; c += W<acc_t<T>>) {
    acc_t<T> lanes[W<acc_t<T>>];
    const int64_t n = count - c < W<acc_t<T>> ? count - c : W<acc_t<T>>;
    store(lanes, load_upto(parameter + c, n));
    for (int64_t i = 0; i < n; ++i) widened[c + i] = static_cast<A>(lanes[i]) + offset;
  }
}

void widen(Dtype dtype, Dtype from, int64_t count, const void* parameter, double offset, void* widened) {
  if (dtype == Dtype::f64) {
    SK_DISPATCH(from, widen_to(count, static_cast<const T*>(parameter), offset, static_cast<double*>(widened)));
  } else {
    SK_DISPATCH(from, widen_to(count, static_cast<const T*>(parameter), static_cast<float>(offset),
                               static_cast<float*>(widened)));
  }
}

template <class A, class T>
void narrow_to(int64_t count, const A* wide, T* parameter) {
  int64_t c = 0;
  if constexpr (std::is_same<A, acc_t<T>>::value)
    for (; c + W<A> <= count; c += W<A>) store(parameter + c, load(wide + c));
  for (; c < count; c += W<acc_t<T>>) {
    acc_t<T> lanes[W<acc_t<T>>] = {};
    const int64_t n = count - c < W<acc_t<T>> ? count - c : W<acc_t<T>>;
    for (int64_t i = 0; i < n; ++i) lanes[i] = static_cast<acc_t<T>>(wide[c + i]);
    store_upto(parameter + c, load(lanes), n);
  }
}

void narrow(Dtype dtype, Dtype to, int64_t count, const void* wide, void* parameter) {
  if (dtype == Dtype::f64) {
    SK_DISPATCH(to, narrow_to(count, static_cast<const double*>(wide), static_cast<T*>(parameter)));
  } else {
    SK_DISPATCH(to, narrow_to(count, static_cast<const float*>(wide), static_cast<T*>(parameter)));
  }
}

}  // namespace

const LayerNormKernels layer_norm_kernels = {
    .forward = forward,
    .backward = backward,
    .reduce = reduce,
    .widen = widen,
    .narrow = narrow,
};

}  // namespace SK_TIER
}  // namespace seqkern
