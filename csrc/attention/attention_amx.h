// Tiles of AMX for attention in bfloat16: the instructions, and how rows of inputs become operands of the products.
//
// A product takes A, (16 rows, 32 columns) of bfloat16, and B, (16, 16) pairs: row i of B holds the pairs of its rows 2i
// and 2i + 1. The sums are (16, 16) floats. All operands are packed tile by tile, 1 KB each, so that no load of a tile
// meets a stride that maps its rows to a few sets of the cache.
#pragma once

#include <immintrin.h>

#include "attention_scores.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// A work item's queries, the keys of a block, and what is computed at a time of both: 2 x 2 tiles.
constexpr int64_t kAmxQueries = 128, kAmxKeys = 128, kGroup = 32;
constexpr int64_t kQueryGroups = kAmxQueries / kGroup, kKeyGroups = kAmxKeys / kGroup;
constexpr int64_t kTile = 512;         // elements of an operand
constexpr int64_t kSums = 256;         // of a tile of sums
constexpr float kLog2e = 1.44269504f;

using bf16 = BFloat16;

// The statements that move tiles are ordered with all other memory accesses; the products only among each other and
// with these.
#define SK_TILE_LOAD(tile, from, bytes)                                                            \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(static_cast<const void*>(from)), \
                   "r"(static_cast<int64_t>(bytes))                                                \
                   : "memory")
#define SK_TILE_STORE(tile, to, bytes)                                                                             \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(static_cast<void*>(to)), \
                   "r"(static_cast<int64_t>(bytes))                                                                \
                   : "memory")
#define SK_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define SK_TILE_PRODUCT(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::)

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles that can be used. Other libraries configure them too, and release them: every entry of a kernel needs its own.
class Tiles {
 public:
  Tiles() {
    static constexpr TileShapes shapes;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Tiles() { __asm__ volatile("tilerelease" ::); }
  Tiles(const Tiles&) = delete;
};

// A count of tiles that the compiler knows, or not.
template <int N>
struct Known {
  constexpr operator int64_t() const { return N; }
};
struct Unknown {
  int64_t n;
  operator int64_t() const { return n; }
};

SK_INLINE int64_t tiles32(int64_t dim) { return (dim + 31) / 32; }

// Calls body(tiles of the head dimension, of the values'): known for the usual ones.
template <class Body>
SK_INLINE void with_tiles(const AttentionShape& s, const Body& body) {
  const int64_t nk = tiles32(s.head_dim), nv = tiles32(s.value_dim);
  if (nk == 2 && nv == 2) body(Known<2>{}, Known<2>{});
  else if (nk == 4 && nv == 4) body(Known<4>{}, Known<4>{});
  else body(Unknown{nk}, Unknown{nv});
}

// ---- 16 x 16 pairs in registers ------------------------------------------------------------------------------------

SK_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// The first n bits of 16 or 32.
SK_INLINE uint32_t first_bits(int64_t n) { return n >= 32 ? ~0u : (1u << max(0, n)) - 1; }

SK_INLINE void store_tile(const __m512i (&r)[16], bf16* tile) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 32 * i, r[i]);
}

// Up to 16 rows of up to 32 columns; the rest zero.
SK_INLINE void load_rows(const bf16* from, int64_t stride, int64_t rows, int64_t columns, __m512i (&r)[16]) {
  const __mmask32 kept = first_bits(columns);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(kept, from + i * stride) : _mm512_setzero_si512();
}

// Up to 32 rows of up to 16 columns as pairs: pair i is of the rows i * step and i * step + apart.
template <int step, int apart>
SK_INLINE void load_pairs(const bf16* from, int64_t stride, int64_t rows, int64_t columns, __m512i (&r)[16]) {
  const __mmask16 kept = static_cast<__mmask16>(first_bits(min(16, columns)));
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int low = i * step, high = low + apart;
    const __m256i a = low < rows ? _mm256_maskz_loadu_epi16(kept, from + low * stride) : _mm256_setzero_si256();
    const __m256i b = high < rows ? _mm256_maskz_loadu_epi16(kept, from + high * stride) : _mm256_setzero_si256();
    r[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
  }
}

// ---- operands ------------------------------------------------------------------------------------------------------
// `count` rows, padded with zeros to whole groups of 32; `n` is tiles32(columns).

// A, (rows, columns): tile (r, c) of 16 x 32 at r * n + c.
inline void pack_rows(Rows from, int64_t row, int64_t count, int64_t columns, int64_t n, bf16* to) {
  for (int64_t r = 0; r < count; r += kGroup)
    for (int64_t half = r; half < r + kGroup; half += 16)
      for (int64_t c = 0; c < n; ++c) {
        __m512i v[16];
        load_rows(at<bf16>(from, row + half) + 32 * c, from.stride, count - half, columns - 32 * c, v);
        store_tile(v, to + (half / 16 * n + c) * kTile);
      }
}

// B, (columns, rows): tile (c, r) of 32 x 16, pairs of columns, at r * n + c.
inline void pack_transposed_pairs(Rows from, int64_t row, int64_t count, int64_t columns, int64_t n, bf16* to) {
  for (int64_t r = 0; r < count; r += kGroup)
    for (int64_t half = r; half < r + kGroup; half += 16)
      for (int64_t c = 0; c < n; ++c) {
        __m512i v[16];
        load_rows(at<bf16>(from, row + half) + 32 * c, from.stride, count - half, columns - 32 * c, v);
        transpose16(v);
        store_tile(v, to + (half / 16 * n + c) * kTile);
      }
}

// A, (columns, rows): tile (c, r) of 16 x 32 at r * 2n + c. With `bad`, what is not finite becomes 0 and is noted there,
// one byte for 32 rows.
inline void pack_transposed(Rows from, int64_t row, int64_t count, int64_t columns, int64_t n, bf16* to,
                            uint8_t* bad = nullptr) {
  const __m512i exponent_low = _mm512_set1_epi32(0x7f80), exponent_high = _mm512_set1_epi32(0x7f800000);
  for (int64_t r = 0; r < count; r += kGroup) {
    __mmask16 found = 0;
    for (int64_t c = 0; c < 2 * n; ++c) {
      __m512i v[16];
      load_pairs<2, 1>(at<bf16>(from, row + r) + 16 * c, from.stride, count - r, columns - 16 * c, v);
      if (bad) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const __mmask16 low = _mm512_cmpeq_epi32_mask(_mm512_and_si512(v[i], exponent_low), exponent_low);
          const __mmask16 high = _mm512_cmpeq_epi32_mask(_mm512_and_si512(v[i], exponent_high), exponent_high);
          found = static_cast<__mmask16>(found | low | high);
          v[i] = _mm512_mask_and_epi32(v[i], low, v[i], _mm512_set1_epi32(static_cast<int>(0xffff0000)));
          v[i] = _mm512_mask_and_epi32(v[i], high, v[i], _mm512_set1_epi32(0xffff));
        }
      }
      transpose16(v);
      store_tile(v, to + (r / kGroup * 2 * n + c) * kTile);
    }
    if (bad) bad[r / kGroup] = found != 0;
  }
}

// B, (rows, columns): tile (r, c) of 32 x 16, the pairs of rows i and 16 + i, at r * 2n + c.
inline void pack_pairs(Rows from, int64_t row, int64_t count, int64_t columns, int64_t n, bf16* to) {
  for (int64_t r = 0; r < count; r += kGroup)
    for (int64_t c = 0; c < 2 * n; ++c) {
      __m512i v[16];
      load_pairs<1, 16>(at<bf16>(from, row + r) + 16 * c, from.stride, count - r, columns - 16 * c, v);
      store_tile(v, to + (r / kGroup * 2 * n + c) * kTile);
    }
}

// ---- exponentials and rounding -------------------------------------------------------------------------------------

// 2^x with a relative error of 1e-4, far below bfloat16's: x = floor + fraction, and a polynomial of degree 3 for the
// fraction. 0 for -infinity, infinity for large x, NaN for NaN.
SK_INLINE __m512 exp2_rough(__m512 x) {
  const __m512 fraction = _mm512_reduce_ps(x, 0x09);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.078024523f), fraction, _mm512_set1_ps(0.22606716f));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.69583356f));
  p = _mm512_fmadd_ps(p, fraction, _mm512_set1_ps(0.99992807f));
  return _mm512_scalef_ps(p, x);
}

// Two vectors rounded to bfloat16, `low` in the low halves: three cheap instructions and a shared shift, where the
// conversion instruction leaves its results in an order that needs a permutation.
struct Rounded {
  __m512i bits, shifted;
  SK_INLINE explicit Rounded(__m512 v)
      : bits(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000))),
        shifted(_mm512_srli_epi32(bits, 16)) {}
};
SK_INLINE __m512i pair(const Rounded& low, const Rounded& high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low.shifted, high.bits);
}

// fill_lanes, and the lanes of the last group that it leaves out: whatever they become, it is finite.
inline void fill_all_lanes(const AttentionShape& s, const AttentionSequence& band, const AttentionBias& bias,
                           int64_t q0, int64_t queries, Lanes<float>* lanes) {
  fill_lanes(s, band, bias, 0, q0, queries, 0, lanes);
  for (int64_t q = (queries + 15) / 16 * 16; q < kAmxQueries; ++q) {
    lanes->position[q] = lanes->slope[q] = 0;
    lanes->row_low[q] = lanes->row_high[q] = 0;
  }
}

// ---- groups of 32 keys by 32 queries -------------------------------------------------------------------------------

// Which lanes see a key: bit q of seen[half][key].
struct GroupMask {
  __mmask16 seen[2][kGroup];
};

// Queries [q, q + count) and keys [k, k + 32), count <= 32.
enum class Sight { none, some, all };
SK_INLINE Sight sight(const AttentionSequence& s, int64_t q, int64_t count, int64_t k) {
  const int64_t last = q + count - 1;
  if (count <= 0 || k >= s.keys || k + kGroup - 1 < q + s.lower || k > last + s.upper) return Sight::none;
  return k >= last + s.lower && k + kGroup - 1 <= q + s.upper && k + kGroup <= s.keys ? Sight::all : Sight::some;
}
inline void fill_mask(const AttentionSequence& s, int64_t q, int64_t k, GroupMask& mask) {
  for (int half = 0; half < 2; ++half) {
    for (int64_t i = 0; i < kGroup; ++i) {
      const int64_t key = k + i, first = clamp(key - s.upper - q - 16 * half, 0, 16);
      const int64_t end = key < s.keys ? clamp(key - s.lower - q - 16 * half + 1, 0, 16) : 0;
      mask.seen[half][i] = static_cast<__mmask16>(first_bits(end) & ~first_bits(first));
    }
  }
}

// scores (32 keys, 32 queries) += rows (32 x 32 n) times columns: the part [from, to) of the 32-wide steps.
SK_INLINE void score_products(const bf16* rows, const bf16* columns, int64_t n, int64_t from, int64_t to) {
#pragma GCC unroll 4
  for (int64_t d = from; d < to; ++d) {
    SK_TILE_LOAD(4, rows + d * kTile, 64);
    SK_TILE_LOAD(6, columns + d * kTile, 64);
    SK_TILE_PRODUCT(0, 4, 6);
    SK_TILE_LOAD(7, columns + (n + d) * kTile, 64);
    SK_TILE_PRODUCT(1, 4, 7);
    SK_TILE_LOAD(5, rows + (n + d) * kTile, 64);
    SK_TILE_PRODUCT(2, 5, 6);
    SK_TILE_PRODUCT(3, 5, 7);
  }
}
SK_INLINE void score_zero() {
  SK_TILE_ZERO(0);
  SK_TILE_ZERO(1);
  SK_TILE_ZERO(2);
  SK_TILE_ZERO(3);
}
SK_INLINE void score_store(float* scores) {
  SK_TILE_STORE(0, scores, 4 * kGroup);
  SK_TILE_STORE(1, scores + 16, 4 * kGroup);
  SK_TILE_STORE(2, scores + 16 * kGroup, 4 * kGroup);
  SK_TILE_STORE(3, scores + 16 * kGroup + 16, 4 * kGroup);
}

// 2 x 2 tiles of sums that stay in memory, in the other four registers.
SK_INLINE void sums_zero() {
  SK_TILE_ZERO(4);
  SK_TILE_ZERO(5);
  SK_TILE_ZERO(6);
  SK_TILE_ZERO(7);
}
SK_INLINE void sums_load(const float* top, const float* bottom, int64_t stride, int64_t right) {
  SK_TILE_LOAD(4, top, 4 * stride);
  SK_TILE_LOAD(5, top + right, 4 * stride);
  SK_TILE_LOAD(6, bottom, 4 * stride);
  SK_TILE_LOAD(7, bottom + right, 4 * stride);
}
SK_INLINE void sums_store(float* top, float* bottom, int64_t stride, int64_t right) {
  SK_TILE_STORE(4, top, 4 * stride);
  SK_TILE_STORE(5, top + right, 4 * stride);
  SK_TILE_STORE(6, bottom, 4 * stride);
  SK_TILE_STORE(7, bottom + right, 4 * stride);
}
SK_INLINE void sums_product(const bf16* top, const bf16* bottom, const bf16* left, const bf16* right) {
  SK_TILE_LOAD(0, top, 64);
  SK_TILE_LOAD(2, left, 64);
  SK_TILE_PRODUCT(4, 0, 2);
  SK_TILE_LOAD(3, right, 64);
  SK_TILE_PRODUCT(5, 0, 3);
  SK_TILE_LOAD(1, bottom, 64);
  SK_TILE_PRODUCT(6, 1, 2);
  SK_TILE_PRODUCT(7, 1, 3);
}

// Pieces of a packed buffer or of scratch memory, in bytes, each aligned to 64.
struct Pieces {
  char* base;
  int64_t used = 0;
  template <class T>
  SK_INLINE T* take(int64_t elements) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// What `pack` makes of one key head.
struct PackedKeys {
  bf16 *key, *key_t, *value, *value_t;  // forward: key, value_t; backward: key, key_t, value
  uint8_t* bad;                         // forward: groups of 32 keys with values that are not finite
  int64_t bytes;
  SK_INLINE PackedKeys(const AttentionShape& s, int64_t keys, bool backward, const void* memory) {
    Pieces pieces{static_cast<char*>(const_cast<void*>(memory))};
    const int64_t groups = tiles32(keys), nk = tiles32(s.head_dim), nv = tiles32(s.value_dim);
    key = pieces.take<bf16>(groups * 2 * nk * kTile);
    key_t = pieces.take<bf16>(backward ? groups * 2 * nk * kTile : 0);
    value = pieces.take<bf16>(backward ? groups * 2 * nv * kTile : 0);
    value_t = pieces.take<bf16>(backward ? 0 : groups * 2 * nv * kTile);
    bad = pieces.take<uint8_t>(backward ? 0 : groups);
    bytes = pieces.used;
  }
};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
