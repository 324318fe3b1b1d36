// The arguments of decode (decode.cuh), and where its keys and values lie: in a cache, contiguous or
// paged, followed by the new rows of the call. Loads tiles of them into shared memory, and appends new rows to the
// cache.
//
// New rows are read from the call's tensors, never from the cache, so the blocks that append them need no barrier.
// Nothing is read that no query sees, so pages that have left a window may be gone. A new row is not written if it has
// no place (beyond the cache's room or in a missing page), nor if its sequence has a length below 0, which sees nothing
// at all. A recorded batch may therefore have unused places.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace seqkern {
namespace attention_decode {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRows = 16;       // of a tile of queries
constexpr int kRing = 1 << 16;  // bytes

// Blocks of a multiprocessor that shared memory has room for; more need not save registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostBlocks = 2;
#else
constexpr int kMostBlocks = 3;
#endif

template <class T, int kDim>
struct Shape {
  using Tile = attention_mma::Tile<T, kDim>;
  static constexpr int kKeys = Tile::kRowBytes <= 256 ? 64 : Tile::kRowBytes <= 512 ? 32 : 16;  // of a tile
  static constexpr int kGroups = kKeys / 16;
  static constexpr int kTile = Tile::bytes(kKeys);  // bytes of a tile of keys; the values follow it
  static constexpr int kStages = kRing / (2 * kTile);
  // 16-bit queries of up to 128 columns stay in registers.
  static constexpr bool kHeld = sizeof(T) == 2 && kDim <= 128;
  static constexpr int kBlocks = kDim <= 128 ? kMostBlocks : 2;  // as registers allow
  static constexpr int kSumRow = kDim + 8;                       // in floats; the 8 avoid bank conflicts
};

// The kernels' arguments. call.key_lengths: lengths before the new rows; call.max_keys: room in the cache.
struct Decode {
  AttentionCuda call;
  AttentionResult key_cache, value_cache;  // paged: `batch` is the stride of pages
  AttentionTensor new_key, new_value;
  int appended;  // new rows of a sequence
  const int32_t* pages;
  int64_t pages_row;
  int page_size, page_count;
  void* out;                      // (sequences, heads, queries, value_dim)
  float* lse;                     // (sequences, heads, queries)
  float *partial, *extent;        // rows as out: (.., splits, value_dim) O, (.., splits, 2) m and l; null: one split
  int splits, tiles, row_blocks;  // tiles: of rows in a block, 1, 2 or 4
};

// A sequence with its new rows, as far as there is room; `old` of its keys are in the cache. A length below 0: no keys.
SK_DEVICE AttentionPlace place_of(const Decode& p, int64_t s, int* old) {
  const int64_t length = p.call.key_lengths[s];
  *old = static_cast<int>(clamp_row(length, p.call.max_keys));
  const int keys = length < 0 ? 0 : min(*old + p.appended, p.call.max_keys);
  AttentionPlace at{s, 0, 0, p.call.max_queries, keys, 0, p.call.diagonal, p.call.low, p.call.high};
  at.key_rows = at.keys;
  const int shift = at.keys - at.queries;
  at.diagonal += shift;
  if (at.low != -kAttentionFar) at.low += shift;
  if (at.high != kAttentionFar) at.high += shift;
  return at;
}

// ---- where rows lie ------------------------------------------------------------------------------------------------

// Keys [first, last) of a key head. Others are not read and count as 0.
struct Source {
  int sequence, head;
  int old, first, last;
  int2* table;  // shared memory: page, and row in it, of the next tiles' keys; null: not paged
};

SK_DEVICE int2 page_of(const Decode& p, const Source& from, int key) {
  if (key < from.first || key >= from.last || key >= from.old) return {0, 0};
  const int n = key / p.page_size;
  const int page = p.pages[int64_t{from.sequence} * p.pages_row + n];
  return {max(0, min(page, p.page_count - 1)), key - n * p.page_size};
}

// Issues the loads of a tile's keys or values.
template <class T, int kDim>
SK_DEVICE void load(const Decode& p, const Source& from, const AttentionResult& cache, const AttentionTensor& added,
                    unsigned char* slot, int tile, int key0, int columns, int thread) {
  using S = Shape<T, kDim>;
  using Tile = typename S::Tile;
  const int place = tile % S::kStages * S::kKeys;
  const auto row_of = [&](int row) -> const T* {
    const int key = key0 + row;
    if (key < from.first || key >= from.last) return nullptr;
    if (key >= from.old) return added.template at<T>(from.sequence, from.head, key - from.old);
    if (from.table == nullptr) return cache.template at<T>(from.sequence, from.head, key);
    return cache.template at<T>(from.table[place + row].x, from.head, from.table[place + row].y);
  };
  if (p.call.vectors) {
    constexpr int kStep = kThreads / Tile::kChunks;
    const int chunk = thread % Tile::kChunks, left = columns - chunk * Tile::kChunk;
    if (left <= -16) return;  // columns that no product reads
    const int bytes = max(0, min(left * static_cast<int>(sizeof(T)), 16));
#pragma unroll 2
    for (int row = thread / Tile::kChunks; row < S::kKeys; row += kStep) {
      const T* at = row_of(row);
      const bool some = at != nullptr && bytes > 0;
      cp_async_16(slot + Tile::offset(row, chunk), some ? at + chunk * Tile::kChunk : cache.template at<T>(0, 0, 0),
                  some ? bytes : 0);
    }
  } else {
    for (int n = thread; n < S::kKeys * kDim; n += kThreads) {
      const int row = n / kDim, column = n % kDim;
      const T* at = row_of(row);
      *Tile::element(slot, row, column) = at != nullptr && column < columns ? at[column] : T{};
    }
  }
}

// Appends new row `n`, which has room, to the cache, unless its page is missing.
template <class T>
SK_DEVICE void append(const Decode& p, const Source& from, int n, int thread) {
  const int key = from.old + n;
  int64_t batch = from.sequence, row = key;
  if (p.pages != nullptr) {
    batch = p.pages[int64_t{from.sequence} * p.pages_row + key / p.page_size];
    if (batch < 0 || batch >= p.page_count) return;
    row = key % p.page_size;
  }
  T* k = p.key_cache.at<T>(batch, from.head, row);
  T* v = p.value_cache.at<T>(batch, from.head, row);
  const T* new_k = p.new_key.at<T>(from.sequence, from.head, n);
  const T* new_v = p.new_value.at<T>(from.sequence, from.head, n);
  for (int c = thread; c < p.call.head_dim; c += kThreads) k[c] = new_k[c];
  for (int c = thread; c < p.call.value_dim; c += kThreads) v[c] = new_v[c];
}

}  // namespace attention_decode
}  // namespace seqkern
