// Large products on the micro-kernel of gemm.h: C = A B + bias, with any element types that share an accumulator.
//
// B is packed once into panels, which the register tiles stream from L1 and L2. C is cut into blocks of up to
// kBlockRows x kBlockColumns, one work item each. A block's C stays in scratch over the whole depth; a finished tile
// leaves for C while it is still in L1. A is taken in slices of kBlockDepth. Its rows are read in place if they are the
// words to multiply (32 registers), and not a multiple of 4 KB apart, where they would collide in the cache. Otherwise
// a slice is copied so that the elements of a column, which a tile reads together, are contiguous; what the next slice
// or the next item copies is prefetched meanwhile.
//
// An element of C is the sum of its slices in ascending k. It depends neither on the blocks, nor on the number of
// threads, nor on the other rows.
#pragma once

#include "gemm.h"
#include "products.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// For lambdas that only prefetch: gcc takes such a function for one without side effects and drops the call, unless it
// was inlined before.
#define SK_PREFETCHING __attribute__((always_inline))

// Blocks of C, in elements.
constexpr int64_t kBlockRows = 96, kBlockColumns = 512;
template <class A>
constexpr int64_t kPanel = kPanelVecs * W<A>;
// Terms of one sum: at 64 an LSTM of 129 inputs would have twice torch's error.
constexpr int64_t kPanelSlice = 32;
// Depth of a slice: 4 to 32 KB of a panel, which L1 keeps over the rows of a block. Chosen by measurement, as the
// blocks are (NOTES.md).
constexpr int64_t kBlockDepth = kAhead ? 256 : 128;
constexpr bool kReadInPlace = kGemmVecs == 4 && kTerms == 1;
// Rows of scratch are one cache line longer than a power of two.
template <class A>
constexpr int64_t kPad = 64 / static_cast<int64_t>(sizeof(A));
template <class A>
constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(A));
constexpr int64_t kStagedA = kBlockRows * kBlockDepth;
template <class A>
constexpr int64_t kBlockC = kBlockRows * (kBlockColumns + kPad<A>);

// Calls f with an element of the type, one of those that share the accumulation type A.
template <class A, class F>
SK_INLINE void by_element(Dtype dtype, const F& f) {
  if constexpr (sizeof(A) == 8) f(double{});
  else if (dtype == Dtype::f32) f(float{});
  else if (dtype == Dtype::bf16) f(BFloat16{});
  else if constexpr (kTerms == 1) f(Half{});
}

template <class A>
int64_t panel_width(int64_t groups) {
  return (groups == 1 ? kPanelVecs : groups) * W<A>;
}
// How many vectors of a panel are side by side: as many as a tile reads. The others follow below, at the same depths.
constexpr int64_t tile_vectors(int64_t groups) { return groups % kPanelVecs == 0 || groups == 1 ? kPanelVecs : groups; }
template <class A>
int64_t panel_count(int64_t columns, int64_t groups) {
  const int64_t width = groups == 1 ? kPanel<A> : W<A>;
  return (columns / groups + width - 1) / width;
}

// Packs `depth` rows of one vector of columns, the first `count` of which exist. This is a transposition: it takes one
// vector along k from each of W columns at a time, and so reads and writes whole cache lines.
template <class T, class RowAt>
void pack_transposed(const T* source, int64_t n_stride, int64_t depth, int64_t count, const RowAt& row) {
  using A = acc_t<T>;
  for (int64_t k0 = 0; k0 < words(depth); k0 += W<A>) {
    const int64_t rows = words(depth) - k0 < W<A> ? words(depth) - k0 : W<A>, first = k0 * kTerms;
    Vec<A> block[W<A>];
    for (int n = 0; n < W<A>; ++n)
      block[n] = n < count ? load_words(source + n * n_stride + first, depth - first) : Vec<A>{};
    transpose_square<A>(block);
    for (int k = 0; k < W<A>; ++k)
      if (k < rows) store(row(k0 + k), block[k]);
  }
}

// Row k of a source with contiguous rows; null for rows that are zero or absent.
template <class T>
SK_INLINE const T* source_row(const Matrix& b, int64_t k) {
  if (k >= b.depth) return nullptr;
  if (b.rows) return static_cast<const T*>(b.rows[k]);
  const int64_t row = k + b.first_row < b.depth ? k + b.first_row : k + b.first_row - b.depth;
  return static_cast<const T*>(b.data) + row * b.k_stride;
}
// The rows that make up the word at row k, as load_rows() takes them.
template <class T>
SK_INLINE auto rows_from(const Matrix& b, int64_t k) {
  return [&b, k](int64_t i) { return source_row<T>(b, k + i); };
}

// Packs rows [k, k + depth) of one panel, which begins at `packed`; k is the first row of a word.
template <class T>
void pack_rows(const Matrix& p, int64_t panel, int64_t k, int64_t depth, acc_t<T>* packed) {
  using A = acc_t<T>;
  const int64_t width = panel_width<A>(p.groups), group = p.columns / p.groups, side = tile_vectors(p.groups) * W<A>;
  const int64_t vectors = width / W<A>, all = padded_words(p.depth);
  struct {
    int64_t column, count;
    A* to;
  } parts[8];  // by vector
  const auto row = [&](int64_t v, int64_t i) {
    if (kDepthStep == 1) return parts[v].to + i * side;
    const int64_t at = words(k) + i;
    return packed + (at / kDepthStep * vectors + v) * kDepthStep * W<A> + at % kDepthStep * W<A>;
  };
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t column = p.groups == 1 ? panel * width + v * W<A> : v * group + panel * W<A>;
    const int64_t left = p.groups == 1 ? p.columns - column : group - panel * W<A>;
    A* to = packed + (v * W<A> / side * all + words(k)) * side + v * W<A> % side;
    parts[v] = {left > 0 ? column : 0, left < 0 ? 0 : left < W<A> ? left : W<A>, to};
  }
  if (k + depth == p.depth)
    for (int64_t i = words(depth); i < all - words(k); ++i)
      for (int64_t v = 0; v < vectors; ++v) store(row(v, i), Vec<A>{});
  if (!p.rows && p.n_stride != 1) {
    const T* source = static_cast<const T*>(p.data) + k;
    for (int64_t v = 0; v < vectors; ++v)
      pack_transposed(source + parts[v].column * p.n_stride, p.n_stride, depth, parts[v].count,
                      [&](int64_t i) { return row(v, i); });
    return;
  }
  // Row by row: rows a power of two apart evict each other from the cache.
  for (int64_t i = 0; i < words(depth); ++i) {
    const T* at[kTerms];
    for (int64_t t = 0; t < kTerms; ++t) at[t] = source_row<T>(p, k + i * kTerms + t);
    const auto rows = [&](int64_t t) { return at[t]; };
    if (p.groups == 1) {
      for (int64_t v = 0; v < vectors; v += 2) {
        Vec<A> both[2];
        load_rows_twice<T>(rows, panel * width + v * W<A>, p.columns - panel * width - v * W<A>, both);
        store(row(v, i), both[0]);
        store(row(v + 1, i), both[1]);
      }
      continue;
    }
    for (int64_t v = 0; v < vectors; ++v) store(row(v, i), load_rows<T>(rows, parts[v].column, parts[v].count));
  }
}

// Work items: where the source's rows are contiguous, all panels over a few rows; otherwise one panel over all or much
// of the depth. Either way the source is read in a few long streams, which the processor prefetches.
constexpr int64_t kPackRows = 16, kPackDepth = 512;
inline bool by_rows(const Matrix& b) { return b.rows || b.n_stride == 1; }
template <class A>
int64_t pack_item_count(const Matrix& b) {
  const int64_t depth = (by_rows(b) ? kPackRows : kPackDepth) * kTerms, slices = (b.depth + depth - 1) / depth;
  return by_rows(b) ? slices : slices * panel_count<A>(b.columns, b.groups);
}
template <class T>
void pack_item(const Matrix& p, void* packed, int64_t item) {
  using A = acc_t<T>;
  const int64_t panels = panel_count<A>(p.columns, p.groups);
  const int64_t size = padded_words(p.depth) * panel_width<A>(p.groups);
  const auto pack_slice = [&](int64_t panel, int64_t k, int64_t most) {
    pack_rows<T>(p, panel, k, p.depth - k < most ? p.depth - k : most, static_cast<A*>(packed) + panel * size);
  };
  if (by_rows(p)) {
    for (int64_t panel = 0; panel < panels; ++panel) pack_slice(panel, item * kPackRows * kTerms, kPackRows * kTerms);
  } else {
    pack_slice(item % panels, item / panels * kPackDepth * kTerms, kPackDepth * kTerms);
  }
}

// Packs one panel just before it is used, instead of all panels beforehand.
template <class A>
void pack_panel(const Matrix& p, int64_t panel, A* packed) {
  by_element<A>(p.dtype, [&](auto t) { pack_rows<decltype(t)>(p, panel, 0, p.depth, packed); });
}

// Prefetches the next work item's data into L2, a few cache lines with each tile of this one. All at once they would
// fill the queue of misses, and the tiles would wait.
class Prefetcher {
 public:
  // Lines of `rows` rows of row_bytes; no rows: nothing to prefetch.
  Prefetcher(int64_t tiles, const void* base, int64_t stride, int64_t rows, int64_t row_bytes)
      : base_(static_cast<const char*>(base)),
        stride_(stride),
        rows_(rows),
        bytes_(row_bytes),
        lines_((row_bytes + 126) / 64) {
    each_ = (rows_ * lines_ + tiles - 1) / tiles;
  }
  SK_INLINE void prefetch() {
    for (int64_t n = each_; n > 0 && row_ < rows_; --n) {
      const int64_t byte = line_ * 64 < bytes_ ? line_ * 64 : bytes_ - 1;  // rows begin anywhere in a line
      __builtin_prefetch(base_ + row_ * stride_ + byte, 0, 2);
      if (++line_ == lines_) line_ = 0, ++row_;
    }
  }

 private:
  const char* base_;
  int64_t stride_, rows_, bytes_, lines_, each_, row_ = 0, line_ = 0;  // each_: at a tile
};

template <class A>
int64_t tile_count(int64_t M, int64_t columns) {
  return (M + kGemmRows - 1) / kGemmRows * ((columns + kPanel<A> - 1) / kPanel<A>);
}

// The vectors of one panel. Not inlined: the loops need all registers for themselves.
template <class A, int NR>
__attribute__((noinline)) void panel_columns(int64_t M, int64_t K, const A* a, int64_t row_stride, int64_t k_stride,
                                             const A* b, A* c, int64_t ldc, bool accumulate, const A* ahead) {
  if (kReadInPlace && k_stride == 1)  // one of the strides is 1
    gemm_columns<A, NR, UnitStride::k, kPanelSlice, kPanelPrefetch>(M, K, a, row_stride, 1, b, kPanel<A>, c, ldc,
                                                                    accumulate, ahead);
  else
    gemm_columns<A, NR, UnitStride::row, kPanelSlice, kPanelPrefetch>(M, K, a, 1, k_stride, b, kPanel<A>, c, ldc,
                                                                      accumulate, ahead);
}

// C[M, columns of B] (+)= A B over one slice. B is a run of panels, `panel_stride` apart. Calls before(m, n, rows,
// columns) before each tile, and after() after it.
template <class A, class Before, class After>
void multiply_panels(int64_t M, int64_t columns, int64_t K, const A* a, int64_t row_stride, int64_t k_stride,
                     const A* b, int64_t panel_stride, A* c, int64_t ldc, bool accumulate, const Before& before,
                     const After& after) {
  for (int64_t n = 0; n < columns; n += kPanel<A>, b += panel_stride) {
    const int64_t width = columns - n < kPanel<A> ? columns - n : kPanel<A>;
    const bool last = n + kPanel<A> >= columns;
    for (int64_t m = 0, line = 0; m < M; m += kGemmRows, line += K * kLine<A>) {
      // The first tiles of a panel prefetch the next one, a line with each term.
      const A* ahead = last || line >= K * kPanel<A> ? b : b + panel_stride + line;
      const int64_t rows = M - m < kGemmRows ? M - m : kGemmRows;
      const A* a_rows = a + m * row_stride;
      A* c_tile = c + m * ldc + n;
      before(m, n, rows, width);
      if (width > kPanel<A> - W<A>) {
        panel_columns<A, kPanelVecs>(rows, K, a_rows, row_stride, k_stride, b, c_tile, ldc, accumulate, ahead);
      } else {
        for (int64_t v = 0; v < width; v += W<A>)
          panel_columns<A, 1>(rows, K, a_rows, row_stride, k_stride, b + v, c_tile + v, ldc, accumulate, ahead);
      }
      after(m, n, rows, width);
    }
  }
}

// Copies A(m0 .. m0 + rows, k0 .. k0 + depth) to [k][m], rows kBlockRows apart; k0 is the first number of a word.
template <class T>
void stage(const Product& p, int64_t m0, int64_t rows, int64_t k0, int64_t depth, acc_t<T>* staged) {
  using A = acc_t<T>;
  if (p.a_k_stride != 1) {
    const T* in = static_cast<const T*>(p.a) + m0 * p.a_row_stride + k0 * p.a_k_stride;
    for (int64_t k = 0; k < depth; k += kTerms, staged += kBlockRows) {
      const auto row = [&](int64_t i) { return k + i < depth ? in + (k + i) * p.a_k_stride : nullptr; };
      int64_t m = 0;
      for (; m + W<A> < rows; m += 2 * W<A>) {
        Vec<A> both[2];
        load_rows_twice<T>(row, m, rows - m, both);
        store(staged + m, both[0]);
        store(staged + m + W<A>, both[1]);
      }
      if (m < rows) store(staged + m, load_rows<T>(row, m, rows - m));
    }
    return;
  }
  for (int64_t m = 0; m < rows; m += W<A>) {
    const T* in[W<A>];
    for (int i = 0; i < W<A>; ++i) {
      const int64_t row = m0 + m + i;
      in[i] = m + i >= rows ? nullptr
              : p.a_rows    ? static_cast<const T*>(p.a_rows[row])
                            : static_cast<const T*>(p.a) + row * p.a_row_stride;
      if (in[i]) in[i] += k0;
    }
    for (int64_t k = 0; k < words(depth); k += W<A>) {
      const int64_t count = words(depth) - k < W<A> ? words(depth) - k : W<A>, first = k * kTerms;
      Vec<A> block[W<A>];
      for (int i = 0; i < W<A>; ++i) block[i] = in[i] ? load_words(in[i] + first, depth - first) : Vec<A>{};
      transpose_square<A>(block);
      for (int i = 0; i < W<A>; ++i)
        if (i < count) store(staged + (k + i) * kBlockRows + m, block[i]);
    }
  }
}

template <class A>
void stage_any(const Product& p, int64_t m0, int64_t rows, int64_t k0, int64_t depth, A* staged) {
  by_element<A>(p.a_type, [&](auto t) { stage<decltype(t)>(p, m0, rows, k0, depth, staged); });
}

// Where A(m0 .. m0 + rows, 0 ...) can be read in place: the address of its first element, and its row stride; else
// null.
template <class A>
const A* direct_rows(const Product& p, int64_t m0, int64_t rows, int64_t& row_stride) {
  if (!kReadInPlace || p.a_k_stride != 1 || size_of(p.a_type) != static_cast<int64_t>(sizeof(A))) return nullptr;
  const A* first = p.a_rows ? static_cast<const A*>(p.a_rows[m0]) : static_cast<const A*>(p.a) + m0 * p.a_row_stride;
  int64_t stride = p.a_row_stride;
  if (p.a_rows) {
    const auto address = [&](int64_t m) { return reinterpret_cast<intptr_t>(p.a_rows[m0 + m]); };
    const intptr_t step = rows > 1 ? address(1) - address(0) : 0;
    for (int64_t m = 0; m < rows; ++m)
      if (!p.a_rows[m0 + m] || address(m) != address(0) + m * step) return nullptr;
    stride = static_cast<int64_t>(step) / static_cast<int64_t>(sizeof(A));
  }
  if (stride * static_cast<int64_t>(sizeof(A)) % 4096 == 0 && rows > 1) return nullptr;
  row_stride = stride;
  return first;
}

template <class T>
void write_back_as(const Product& p, int64_t m0, int64_t rows, int64_t n0, int64_t columns, const acc_t<T>* c,
                   int64_t ldc) {
  using A = acc_t<T>;
  const A* bias = static_cast<const A*>(p.bias);
  for (int64_t m = 0; m < rows; ++m) {
    T* out = (p.c_rows ? static_cast<T*>(p.c_rows[m0 + m]) : static_cast<T*>(p.c) + (m0 + m) * p.c_stride) + n0;
    for (int64_t n = 0; n < columns; n += W<A>) {
      Vec<A> v = load(c + m * ldc + n);
      if (bias) v += load_upto(bias + n0 + n, columns - n);
      if (p.accumulate) v += load_upto(out + n, columns - n);
      store_upto(out + n, v, columns - n);
    }
  }
}
// Moves a finished tile of C from scratch to its place.
template <class A>
SK_INLINE void write_back(const Product& p, int64_t m0, int64_t rows, int64_t n0, int64_t columns, const A* c,
                          int64_t ldc) {
  by_element<A>(p.c_type, [&](auto t) { write_back_as<decltype(t)>(p, m0, rows, n0, columns, c, ldc); });
}
SK_INLINE void prefetch_tile(const Product& p, int64_t m0, int64_t rows, int64_t n0, int64_t columns) {
  const int64_t size = size_of(p.c_type);
  for (int64_t m = m0; m < m0 + rows; ++m) {
    const char* row = static_cast<const char*>(p.c_rows ? p.c_rows[m] : p.c) + (p.c_rows ? 0 : m * p.c_stride * size);
    for (int64_t byte = n0 * size; byte < (n0 + columns) * size; byte += 64) __builtin_prefetch(row + byte, 1);
  }
}

// Work item: one block of C; `item` counts the columns fastest. scratch: kStagedA + kBlockC elements.
template <class A>
void multiply_item(const Product& p, int64_t item, A* scratch) {
  const int64_t column_blocks = (p.columns + kBlockColumns - 1) / kBlockColumns;
  const int64_t m0 = item / column_blocks * p.block_rows, n0 = item % column_blocks * kBlockColumns;
  const int64_t rows = p.rows - m0 < p.block_rows ? p.rows - m0 : p.block_rows;
  const int64_t columns = p.columns - n0 < kBlockColumns ? p.columns - n0 : kBlockColumns;
  const int64_t all = words(p.depth), ldc = kBlockColumns + kPad<A>, panel_stride = all * kPanel<A>;
  const A* b = static_cast<const A*>(p.packed_b) + n0 / kPanel<A> * panel_stride;
  A* c = scratch + kStagedA;
  int64_t row_stride = 1;
  const A* direct = direct_rows<A>(p, m0, rows, row_stride);
  const bool by_rows = p.a_k_stride == 1;
  const int64_t k_stride = direct ? 1 : kBlockRows;
  // A depth of 0 gives a product of zero, which a tile of depth 0 writes.
  for (int64_t k = 0; k == 0 || k < all; k += kBlockDepth) {
    const int64_t depth = all - k < kBlockDepth ? all - k : kBlockDepth;
    if (!direct) {
      const int64_t first = k * kTerms, left = p.depth - first;
      stage_any(p, m0, rows, first, left < depth * kTerms ? left : depth * kTerms, scratch);
    }
    const A* a = direct ? direct + k : scratch;
    const auto product = [&](const auto& before, const auto& after) {
      multiply_panels<A>(rows, columns, depth, a, row_stride, k_stride, b + k * kPanel<A>, panel_stride, c, ldc, k > 0,
                         before, after);
    };
    // What is read next of A: the next slice, or the first one of the next item.
    const bool last = k + kBlockDepth >= all;
    const int64_t next = last ? 0 : (k + kBlockDepth) * kTerms, left = p.depth - next;
    const int64_t next_depth = left < kBlockDepth * kTerms ? left : kBlockDepth * kTerms;
    const int64_t next_m0 = last ? (item + 1) / column_blocks * p.block_rows : m0, behind = p.rows - next_m0;
    const int64_t next_rows = behind < p.block_rows ? behind : p.block_rows;
    const int64_t size = size_of(p.a_type), tiles = tile_count<A>(rows, columns);
    // Scattered rows are not prefetched.
    const bool prefetches = direct ? !last : !p.a_rows && next_rows > 0;
    const int64_t row_stride_of_a = direct ? row_stride : p.a_row_stride;
    Prefetcher prefetcher(tiles,
                          !prefetches ? nullptr
                          : direct
                              ? static_cast<const char*>(static_cast<const void*>(direct)) + next * size
                              : static_cast<const char*>(p.a) + (next_m0 * p.a_row_stride + next * p.a_k_stride) * size,
                          (by_rows ? row_stride_of_a : p.a_k_stride) * size,
                          !prefetches ? 0
                          : by_rows   ? next_rows
                                      : next_depth,
                          (by_rows ? next_depth : next_rows) * size);
    if (last)
      product(
          [&](int64_t m, int64_t n, int64_t tile_rows, int64_t width) SK_PREFETCHING {
            prefetcher.prefetch();
            prefetch_tile(p, m0 + m, tile_rows, n0 + n, width);
          },
          [&](int64_t m, int64_t n, int64_t tile_rows, int64_t width) {
            write_back<A>(p, m0 + m, tile_rows, n0 + n, width, c + m * ldc + n, ldc);
          });
    else
      product([&](int64_t, int64_t, int64_t, int64_t) SK_PREFETCHING { prefetcher.prefetch(); },
              [](int64_t, int64_t, int64_t, int64_t) {});
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
