// Matrix tiles (AMX): their configuration, and blocks of a product C = A B in bfloat16 with sums in float32.
//
// TDPBF16PS adds the product of a left and a right tile to a tile of 16 x 16 floats: 16 384 operations in 16 cycles. A
// left tile is 16 rows of 32 bfloat16. Row i of a right tile holds rows 2i and 2i + 1 of its operand, interleaved as
// pairs. Of 32 terms the even and the odd ones are summed separately, each in order; then the two sums are added to
// each other and to C.
//
// A library that uses tiles may release their configuration when it is done (oneDNN does). So every kernel entry loads
// the configuration and releases it again, which takes some 200 cycles (Granite Rapids).
#pragma once

#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// The tiles of one operand. `outer`: bytes from one row tile to the next (in a right operand: column tile); `depth`:
// bytes to the next step of the depth; `stride`: bytes between the rows of a tile.
struct Tiles {
  const void* data;
  int64_t outer, depth, stride = 64;
  SK_INLINE Tiles at(int64_t outer_tiles, int64_t steps) const {
    return {static_cast<const char*>(data) + outer_tiles * outer + steps * depth, outer, depth, stride};
  }
};

#if defined(__AMX_BF16__)

struct alignas(64) TilePalette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TilePalette) == 64, "as the instruction reads it");

// By the number of rows of accumulators and left tiles. Static: the compiler's intrinsic reads 64 bytes but declares
// only 8, so parts of a local palette might never be written.
struct TilePalettes {
  TilePalette by_rows[17];
  constexpr TilePalettes() : by_rows() {
    for (int rows = 0; rows < 17; ++rows)
      for (int tile = 0; tile < 6; ++tile) by_rows[rows].rows[tile] = static_cast<uint8_t>(rows > 0 ? rows : 1);
  }
};
constexpr TilePalettes kPalettes;

// Configures tiles 0 to 5, C's and the left ones, for `rows` rows, at most 16.
class TileConfiguration {
 public:
  explicit TileConfiguration(int64_t rows = 16) { _tile_loadconfig(&kPalettes.by_rows[rows < 16 ? rows : 16]); }
  TileConfiguration(const TileConfiguration&) = delete;
  TileConfiguration& operator=(const TileConfiguration&) = delete;
  ~TileConfiguration() { _tile_release(); }
};

// A compiler barrier: the intrinsics do not tell the compiler which memory they access.
SK_INLINE void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// The compiler's intrinsics, but ordered with all other memory accesses.
#define SK_TILE_LOAD(tile, from, bytes)                                                     \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(static_cast<const void*>(from)), \
                   "r"(static_cast<int64_t>(bytes))                                         \
                   : "memory")
#define SK_TILE_STORE(tile, to, bytes)                                                   \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(static_cast<void*>(to)), \
                   "r"(static_cast<int64_t>(bytes))                                      \
                   : "memory")

// What is added to a product: rows of floats `ld` apart, the second row tile's `outer` after the first's; or nothing.
// One row for all: ld and outer are 0.
struct Addend {
  const float* data = nullptr;
  int64_t ld = 0, outer = 0;
};

// Other work, interleaved with the steps of a product while the tile unit computes.
struct NoOther {
  SK_INLINE void operator()() const {}
};

// C = A B + addend for M x N tiles of C: two by two, with accumulators in tiles 0 to 3, left tiles 4 and 5, right tiles
// 6 and 7. C's second row of tiles begins `c_outer` floats after the first. other() is called at every step.
template <int M, int N, class Other = NoOther>
SK_INLINE void tile_block(int64_t steps, const Tiles& a, const Tiles& b, float* c, int64_t ldc, int64_t c_outer,
                          const Addend& addend, const Other& other = Other{}) {
  static_assert(M <= 2 && N <= 2, "four accumulators");
  const int64_t row_bytes = ldc * 4;
  memory_barrier();
  if (addend.data) {
    const float *first = addend.data, *second = first + addend.outer;
    _tile_loadd(0, first, addend.ld * 4);
    if constexpr (N == 2) _tile_loadd(1, first + 16, addend.ld * 4);
    if constexpr (M == 2) _tile_loadd(2, second, addend.ld * 4);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, second + 16, addend.ld * 4);
  } else {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (M == 2) _tile_zero(2);
    if constexpr (M == 2 && N == 2) _tile_zero(3);
  }
  const char *left = static_cast<const char*>(a.data), *right = static_cast<const char*>(b.data);
  for (int64_t k = 0; k < steps; ++k, left += a.depth, right += b.depth) {
    _tile_loadd(4, left, a.stride);
    _tile_loadd(6, right, b.stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, right + b.outer, b.stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
      _tile_loadd(5, left + a.outer, a.stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (M == 2 && N == 2) _tile_dpbf16ps(3, 5, 7);
    other();
  }
  _tile_stored(0, c, row_bytes);
  if constexpr (N == 2) _tile_stored(1, c + 16, row_bytes);
  if constexpr (M == 2) _tile_stored(2, c + c_outer, row_bytes);
  if constexpr (M == 2 && N == 2) _tile_stored(3, c + c_outer + 16, row_bytes);
  memory_barrier();
}

// The same for one row of N tiles, two to four: with three, enough accumulators to hide a product's latency.
template <int N, class Other = NoOther>
SK_INLINE void tile_row(int64_t steps, const Tiles& a, const Tiles& b, float* c, int64_t ldc, const Addend& addend,
                        const Other& other = Other{}) {
  static_assert(N >= 2 && N <= 4, "two to four accumulators");
  const int64_t row_bytes = ldc * 4;
  memory_barrier();
  if (addend.data) {
    _tile_loadd(0, addend.data, addend.ld * 4);
    _tile_loadd(1, addend.data + 16, addend.ld * 4);
    if constexpr (N >= 3) _tile_loadd(2, addend.data + 32, addend.ld * 4);
    if constexpr (N == 4) _tile_loadd(3, addend.data + 48, addend.ld * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (N >= 3) _tile_zero(2);
    if constexpr (N == 4) _tile_zero(3);
  }
  const char *left = static_cast<const char*>(a.data), *right = static_cast<const char*>(b.data);
  for (int64_t k = 0; k < steps; ++k, left += a.depth, right += b.depth) {
    _tile_loadd(4, left, a.stride);
    _tile_loadd(6, right, b.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + b.outer, b.stride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (N >= 3) {
      _tile_loadd(6, right + 2 * b.outer, b.stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (N == 4) {
      _tile_loadd(7, right + 3 * b.outer, b.stride);
      _tile_dpbf16ps(3, 4, 7);
    }
    other();
  }
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + 16, row_bytes);
  if constexpr (N >= 3) _tile_stored(2, c + 32, row_bytes);
  if constexpr (N == 4) _tile_stored(3, c + 48, row_bytes);
  memory_barrier();
}

// The same for one column of M tiles, two to four, stacked in C.
template <int M>
SK_INLINE void tile_column(int64_t steps, const char* const (&left)[M], int64_t left_stride, int64_t left_step,
                           const Tiles& b, float* c, int64_t ldc, bool accumulate) {
  static_assert(M >= 2 && M <= 4, "two to four accumulators");
  memory_barrier();
  if (accumulate) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16 * ldc, ldc * 4);
    if constexpr (M >= 3) _tile_loadd(2, c + 32 * ldc, ldc * 4);
    if constexpr (M == 4) _tile_loadd(3, c + 48 * ldc, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (M >= 3) _tile_zero(2);
    if constexpr (M == 4) _tile_zero(3);
  }
  const char* right = static_cast<const char*>(b.data);
  for (int64_t k = 0; k < steps; ++k, right += b.depth) {
    _tile_loadd(6, right, b.stride);
    _tile_loadd(4, left[0] + k * left_step, left_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, left[1] + k * left_step, left_stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (M >= 3) {
      _tile_loadd(4, left[2] + k * left_step, left_stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (M == 4) {
      _tile_loadd(5, left[3] + k * left_step, left_stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16 * ldc, ldc * 4);
  if constexpr (M >= 3) _tile_stored(2, c + 32 * ldc, ldc * 4);
  if constexpr (M == 4) _tile_stored(3, c + 48 * ldc, ldc * 4);
  memory_barrier();
}

// Products of tiles in registers, whose four sums do not wait for each other. memory: 8 KB. Returns the multiply-adds.
inline int64_t spin_tiles(int64_t turns, float* memory) {
  const TileConfiguration configuration;
  memory_barrier();
  for (int i = 0; i < 8 * 256; ++i) memory[i] = 0;
  memory_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, memory, 64);
  _tile_loadd(5, memory + 256, 64);
  for (int64_t turn = 0; turn < turns; ++turn) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, memory, 64);
  _tile_stored(1, memory + 256, 64);
  _tile_stored(2, memory + 512, 64);
  _tile_stored(3, memory + 768, 64);
  memory_barrier();
  return turns * 4 * 16 * 16 * 32;
}

#endif

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
