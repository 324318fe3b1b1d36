// Split-KV decode: few queries over many keys in a cache, which the same call extends.
//
// Equations: attention.cuh with the band of causal attention, lower right. In a sequence of `keys` keys, new ones
// included, query i of n is at position keys - n + i.
//
// The idea (Flash-Decoding: Dao et al. 2023). What matters is how fast keys and values come from memory. So the queries
// of all heads that share a key head are rows of one matrix, row r being query r % n of the group's head r / n. A block
// has up to 64 rows in tiles of 16, for which keys and values are read once. The visible keys are divided among
// `splits` blocks in whole tiles. The number of blocks follows from shapes alone, so a recorded CUDA graph serves every
// length. Which tiles a block takes is decided on the device by the sequence's length, so a short sequence in a large
// cache keeps all blocks busy, and a window costs only what it shows. Paged caches and new rows:
// decode_cache.cuh.
//
//     a block:  for its tiles t:  S = Q K_t^T,  m' = max(m, rowmax S),  P = 2^(c S - c m'),  O = O 2^(c m - c m') + P
//               V_t
//     a row:    out = sum_s 2^(m_s - M) O_s / sum_s 2^(m_s - M) l_s,  M = max_s m_s, over its splits s in order
//
// with c = scale log2 e. With options on the scores, S is the score itself and c = log2 e.
//
// The last step is a second kernel. A counter that tells the last block it is the last would save this launch, but must
// be zero beforehand: memory shared by calls of several streams or replayed graphs, or a launch that clears it.
//
// Warps. A block has four. They divide the tiles of rows, and what is left of them divides the keys of a tile, 16 at a
// time: with one tile of rows every warp has its own keys, with four every warp its own rows. Each holds the sums of 16
// rows, so code and registers are the same. Slices of keys are combined through shared memory at the end, in order.
//
// Shared memory. A ring of 64 KB; a stage holds a tile of keys and a tile of values: 64 rows of up to 256 bytes, 32 of
// up to 512, else 16. All stages but the current one are in flight: 32 KB a block, 48 KB where rows have 128 bytes.
// With 4 KB of queries three blocks fit a multiprocessor of sm_90 (two with 256 columns, for their registers), two of
// sm_80, one of sm_120: 96, 64 and 32 KB. At 4.8 TB/s and 1 us, each of 132 multiprocessors needs 36 KB in flight.
// Beside the ring: the queries, and for paged caches the rows' places for the next tiles.
//
// Bytes: keys x (D + Dv), once; and 8 Dv for a row and split. FLOP: 2 rows x keys x (D + Dv), rows rounded up to 16; at
// 64 rows of bfloat16 that is 64 FLOP a byte.
//
// float32: products of 8 terms start at zero and are added by ordinary additions (mma.cuh). NOTES.md
// lists what was tried.
#pragma once

#include "decode_cache.cuh"

namespace seqkern {
namespace attention_decode {

constexpr int slices_of(int tiles, int groups) { return kWarps / tiles < groups ? kWarps / tiles : groups; }

template <class T, int kDim>
constexpr int shared_bytes(int tiles, bool paged) {
  using S = Shape<T, kDim>;
  const int table = paged ? S::kStages * S::kKeys * static_cast<int>(sizeof(int2)) : 0;
  const int loop = kRing + S::Tile::bytes(kRows * tiles) + table;
  const int sums = kWarps * kRows * (S::kSumRow + 2) * 4;
  return loop > sums ? loop : sums;
}

// The tiles of keys that a sequence's queries see, from `first` on: `each` tiles a split, in the first `used` splits.
struct Division {
  int first, tiles, each, used;
};
SK_DEVICE Division divide(const AttentionRange& range, int keys, int splits) {
  Division d{range.first, (range.last - range.first + keys - 1) / keys, 0, 0};
  d.each = (d.tiles + splits - 1) / splits;
  d.used = d.each > 0 ? (d.tiles + d.each - 1) / d.each : 0;
  return d;
}

// ---- what a warp holds ---------------------------------------------------------------------------------------------

// 16 rows over the keys of a slice. Lane l has rows l / 4 and l / 4 + 8, and of every 8 columns 2 (l % 4) and the next.
template <class T, int kDim>
struct WarpRows {
  using S = Shape<T, kDim>;
  using Tile = typename S::Tile;
  static constexpr int kDepth = attention_mma::Operand<T>::kDepth;

  float out[kDim / 8][4];
  float scores[2][4];
  float largest[2], sum[2];
  uint32_t held[S::kHeld ? kDim / 16 : 1][4];
  const unsigned char* queries;
  int query[2];
  float slope[2];

  // Scores of 16 rows of the queries' tile and 16 of the keys'.
  SK_DEVICE void products(const unsigned char* keys, int group, int head_dim, int query_row, bool tf32, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[0][i] = scores[1][i] = 0;
#pragma unroll
    for (int k = 0; k < kDim; k += kDepth) {
      if (k < head_dim) {
        uint32_t raw[4], b[4];
        if constexpr (S::kHeld) {
#pragma unroll
          for (int i = 0; i < 4; ++i) raw[i] = held[k / 16][i];
        } else {
          Tile::a(raw, queries, query_row, k, lane);
        }
        Tile::b_rows(b, keys, group * 16, k, lane);
        attention_mma::multiply<T>(scores[0], scores[1], attention_mma::A<T>(raw), b, tf32);
      }
    }
  }

  // Applies options and the band: products become exponents, hidden ones -inf.
  SK_DEVICE void bias(const AttentionCuda& call, const AttentionPlace& at, int key0, bool plain, bool edge, int lane) {
    if (plain && !edge) return;
    AttentionCuda own = call;
    own.mask = nullptr;  // decode has no mask: `biased` without one
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + n * 8 + lane % 4 * 2 + i % 2;
        float ignored;
        if (!plain) scores[n][i] = biased(own, {nullptr, slope[i / 2]}, at, scores[n][i], query[i / 2], key, &ignored);
        if (edge && !sees(at, query[i / 2], key)) scores[n][i] = -INFINITY;
      }
    }
  }

  // A step of online softmax: scores become weights.
  SK_DEVICE void softmax(float c) {
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = largest[r];
#pragma unroll
      for (int n = 0; n < 2; ++n) most = fmaxf(most, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float shift = most == -INFINITY ? 0 : most * c;
      decay[r] = exp2f(fmaf(largest[r], c, -shift));
      largest[r] = most;
      float total = 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          scores[n][i] = exp2f(fmaf(scores[n][i], c, -shift));
          total += scores[n][i];
        }
      }
      sum[r] = fmaf(sum[r], decay[r], total);
    }
    // If no row's maximum grew, which is the usual case, all factors are 1.
    if (__any_sync(~0u, decay[0] != 1 || decay[1] != 1)) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][i] *= decay[i / 2];
      }
    }
  }

  SK_DEVICE void add_values(const unsigned char* values, int group, int value_dim, bool tf32, int lane) {
#pragma unroll
    for (int step = 0; step < 16 / kDepth; ++step) {
      uint32_t raw[4];
      attention_mma::a_of_sums<T>(raw, scores[step], scores[1]);
      const attention_mma::A<T> a(raw);
#pragma unroll
      for (int c = 0; c < kDim; c += 16) {
        if (c >= value_dim) continue;
        uint32_t b[4];
        Tile::b_columns(b, values, c, group * 16 + step * kDepth, lane);
        attention_mma::multiply<T>(out[c / 8], out[c / 8 + 1], a, b, tf32);
      }
    }
  }
};

// A row's lse (natural) and the weight of its values, from its largest exponent and its sum. A row that sees nothing
// has lse -inf and weight 0.
struct End {
  float weight, lse;
};
SK_DEVICE End finish(float largest, float sum, const float* sinks, int64_t head) {
  float decay = 1;
  if (sinks != nullptr) {
    const float sink = sinks[head] * kLog2e, most = fmaxf(largest, sink);
    const float shift = most == -INFINITY ? 0 : most;
    decay = exp2f(largest - shift);
    sum = fmaf(sum, decay, exp2f(sink - shift));
    largest = most;
  }
  const bool none = sum == 0;
  return {none ? 0 : decay / sum, none ? -INFINITY : (largest + log2f(sum)) * kLn2};
}

// ---- the kernels ---------------------------------------------------------------------------------------------------

// Block: one split of the keys, for up to 16 * tiles rows of a key head of a sequence.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, (Shape<T, kDim>::kBlocks)) decode_kernel(Decode p) {
  using S = Shape<T, kDim>;
  using Tile = typename S::Tile;
  constexpr int kAhead = S::kStages - 1;  // tiles in flight
  SK_SHARED(shared);
  const AttentionCuda& call = p.call;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int split = static_cast<int>(blockIdx.x % p.splits);
  const int head_block = static_cast<int>(blockIdx.x / p.splits), row_block = head_block % p.row_blocks;
  const int kv_head = head_block / p.row_blocks % call.kv_heads, sequence = head_block / p.row_blocks / call.kv_heads;
  const int queries = call.max_queries, group = call.heads / call.kv_heads;
  const int row0 = row_block * p.tiles * kRows, rows = min(group * queries - row0, p.tiles * kRows);

  Source from{sequence, kv_head, 0, 0, 0, nullptr};
  const AttentionPlace at = place_of(p, sequence, &from.old);
  const AttentionRange range = key_range(at, 0, queries, S::kKeys);
  const Division division = divide(range, S::kKeys, p.splits);
  const int tile0 = split * division.each, count = max(0, min(division.each, division.tiles - tile0));
  const int base = division.first + tile0 * S::kKeys;
  from.first = max(0, at.low);
  from.last = range.last;
  unsigned char* const query_tile = shared + kRing;
  if (p.pages != nullptr) from.table = reinterpret_cast<int2*>(query_tile + Tile::bytes(p.tiles * kRows));

  // Loads the queries and, for a paged cache, the places of the first tiles.
  const auto query_row = [&](int row) {
    row += row0;
    return call.query.at<T>(sequence, kv_head * group + row / queries, row % queries);
  };
  for (int n = thread; count > 0 && n < p.tiles * kRows * Tile::kChunks; n += kThreads) {
    const int row = n / Tile::kChunks, chunk = n % Tile::kChunks, left = call.head_dim - chunk * Tile::kChunk;
    if (call.vectors) {
      const int bytes = row < rows ? max(0, min(left * static_cast<int>(sizeof(T)), 16)) : 0;
      cp_async_16(query_tile + Tile::offset(row, chunk),
                  bytes > 0 ? query_row(row) + chunk * Tile::kChunk : call.query.at<T>(0, 0, 0), bytes);
    } else {
      for (int c = 0; c < Tile::kChunk; ++c) {
        *Tile::element(query_tile, row, chunk * Tile::kChunk + c) =
            row < rows && c < left ? query_row(row)[chunk * Tile::kChunk + c] : T{};
      }
    }
  }
  int2 place{};  // of a key of the tile whose places are written next
  if (from.table != nullptr) {
    for (int n = thread; n < S::kStages * S::kKeys; n += kThreads) {
      if (n < count * S::kKeys) from.table[n] = page_of(p, from, base + n);
    }
    if (thread < S::kKeys && S::kStages < count) place = page_of(p, from, base + S::kStages * S::kKeys + thread);
    __syncthreads();
  }
  const auto prefetch = [&](int t) {
    if (t < count) {
      unsigned char* const to = shared + t % S::kStages * 2 * S::kTile;
      // One copy of the code where float32's sums leave no registers for two.
#pragma unroll(sizeof(T) == 4 ? 1 : 2)
      for (int n = 0; n < 2; ++n) {
        load<T, kDim>(p, from, n == 0 ? p.key_cache : p.value_cache, n == 0 ? p.new_key : p.new_value,
                      to + n * S::kTile, t, base + t * S::kKeys, n == 0 ? call.head_dim : call.value_dim, thread);
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int t = 0; t < kAhead; ++t) prefetch(t);
  if (row_block == 0) {
    for (int n = split; n < at.keys - from.old; n += p.splits) append<T>(p, from, n, thread);
  }

  WarpRows<T, kDim> warp_rows;
  const int slices = slices_of(p.tiles, S::kGroups), row_tile = warp % p.tiles;
  warp_rows.queries = query_tile;
  const int slice = warp / p.tiles;
  const bool works = slice < slices && row_tile * kRows < rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(row0 + row_tile * kRows + lane / 4 + 8 * r, group * queries - 1);
    warp_rows.query[r] = row % queries;
    warp_rows.slope[r] =
        call.slopes != nullptr ? call.slopes[int64_t{sequence} * call.heads + kv_head * group + row / queries] : 0;
    warp_rows.largest[r] = -INFINITY;
    warp_rows.sum[r] = 0;
  }
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) warp_rows.out[n][i] = 0;
  }
  const bool plain = call.plain();
  const float c = plain ? call.scale * kLog2e : kLog2e;

#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    const int key0 = base + t * S::kKeys;
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    prefetch(t + kAhead);
    if (from.table != nullptr && thread < S::kKeys) {  // tile t's slot was read before the barrier
      from.table[t % S::kStages * S::kKeys + thread] = place;
      if (t + S::kStages + 1 < count) place = page_of(p, from, key0 + (S::kStages + 1) * S::kKeys + thread);
    }
    if (!works) continue;
    if constexpr (S::kHeld) {
      if (t == 0) {
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) Tile::a(warp_rows.held[k], query_tile, row_tile * kRows, k * 16, lane);
      }
    }
    const unsigned char* const keys = shared + t % S::kStages * 2 * S::kTile;
#pragma unroll 1
    for (int group = slice; group < S::kGroups; group += slices) {
      warp_rows.products(keys, group, call.head_dim, row_tile * kRows, call.tf32, lane);
      warp_rows.bias(call, at, key0 + group * 16, plain, key0 < range.full || key0 >= range.edge, lane);
      warp_rows.softmax(c);
      warp_rows.add_values(keys + S::kTile, group, call.value_dim, call.tf32, lane);
    }
  }

  // Combines the slices of each row and stores the result.
  cp_async_wait<0>();
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(shared);
  float* const extents = sums + kWarps * kRows * S::kSumRow;
  if (works) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = warp_rows.sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = warp * kRows + lane / 4 + 8 * r;
      if (lane % 4 == 0) {
        extents[2 * row] = warp_rows.largest[r] * c;
        extents[2 * row + 1] = sum;
      }
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(sums + row * S::kSumRow + n * 8 + lane % 4 * 2) =
            make_float2(warp_rows.out[n][2 * r], warp_rows.out[n][2 * r + 1]);
      }
    }
  }
  __syncthreads();
  if (p.splits > 1 && split >= division.used) return;
  for (int n = warp; n < rows; n += kWarps) {
    const int row = row0 + n, step = p.tiles * kRows;  // to the row's next slice
    float largest = -INFINITY, sum = 0, weight[kWarps];
    for (int s = 0; s < slices; ++s) largest = fmaxf(largest, extents[2 * (n + s * step)]);
    const float shift = largest == -INFINITY ? 0 : largest;
#pragma unroll
    for (int s = 0; s < kWarps; ++s) {
      weight[s] = s < slices ? exp2f(extents[2 * (n + s * step)] - shift) : 0;
      if (s < slices) sum = fmaf(extents[2 * (n + s * step) + 1], weight[s], sum);
    }
    const int head = kv_head * group + row / queries;
    const int64_t to = (int64_t{sequence} * call.heads + head) * queries + row % queries;
    const auto column = [&](int i) {
      float x = 0;
#pragma unroll
      for (int s = 0; s < kWarps; ++s) {
        if (s < slices) x = fmaf(sums[(n + s * step) * S::kSumRow + i], weight[s], x);
      }
      return x;
    };
    if (p.splits > 1) {
      float* partial = p.partial + (to * p.splits + split) * call.value_dim;
      for (int i = lane; i < call.value_dim; i += 32) partial[i] = column(i);
      if (lane < 2) p.extent[2 * (to * p.splits + split) + lane] = lane == 0 ? largest : sum;
    } else {
      const End end = finish(largest, sum, call.sinks, head);
      T* out = static_cast<T*>(p.out) + to * call.value_dim;
      for (int i = lane; i < call.value_dim; i += 32) out[i] = narrow<T>(column(i) * end.weight);
      if (lane == 0) p.lse[to] = end.lse;
    }
  }
}

// Block: one row, combined from its splits. Every warp computes the weights for itself.
template <class T>
__global__ void __launch_bounds__(kThreads) combine_kernel(Decode p, int keys) {
  const AttentionCuda& call = p.call;
  const int64_t row = blockIdx.x, head = row / call.max_queries % call.heads;
  int old;
  const AttentionPlace at = place_of(p, row / call.max_queries / call.heads, &old);
  const int used = divide(key_range(at, 0, call.max_queries, keys), keys, p.splits).used;
  const float* extent = p.extent + 2 * row * p.splits;
  float largest = -INFINITY, sum = 0;
  const int lane = threadIdx.x % 32;
  for (int s = lane; s < used; s += 32) largest = fmaxf(largest, extent[2 * s]);
#pragma unroll
  for (int n = 16; n > 0; n /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, n));
  const float shift = largest == -INFINITY ? 0 : largest;
  for (int s = lane; s < used; s += 32) sum = fmaf(extent[2 * s + 1], exp2f(extent[2 * s] - shift), sum);
#pragma unroll
  for (int n = 16; n > 0; n /= 2) sum += __shfl_xor_sync(~0u, sum, n);
  const End end = finish(largest, sum, call.sinks, head);
  for (int i = threadIdx.x; i < call.value_dim; i += kThreads) {
    const float* partial = p.partial + row * p.splits * call.value_dim + i;
    float x = 0;
#pragma unroll 4
    for (int s = 0; s < used; ++s) {
      x = fmaf(partial[static_cast<int64_t>(s) * call.value_dim], exp2f(extent[2 * s] - shift), x);
    }
    static_cast<T*>(p.out)[row * call.value_dim + i] = narrow<T>(x * end.weight);
  }
  if (threadIdx.x == 0) p.lse[row] = end.lse;
}

}  // namespace attention_decode
}  // namespace seqkern
