// The forward pass of attention with mma.sync: compute capability 8.0 and up, all options, bfloat16, float16, float32.
//
// The idea. A thread block owns a tile of queries and walks the keys that any of them sees, block by block, with a
// running maximum and sum for each row (online softmax: Milakov & Gimelshein 2018; FlashAttention-2: Dao 2023). With m
// the running maximum, over the visible keys j of a block, and scores z as in attention.cuh:
//
//     m' = max(m, max_j z_ij)
//     l' = l e^(m - m') + sum_j e^(z_ij - m')
//     o' = o e^(m - m') + sum_j r_ij e^(z_ij - m') v_j
//     out = o / l      lse = m + log l
//
// with r_ij = 1 / (1 - p) where dropout keeps (i, j), else 0 (the factor is applied at the end). A sink is a key
// without a value. Rows that see nothing: out 0, lse -inf.
//
// Tiles. A warp owns 16 or 32 rows and all their keys, so no row crosses warps. Scores, sums and output stay in the
// registers where the tensor cores put them, and become operands of the second product there. With 32 rows each operand
// from shared memory serves two products. With 16 rows shared memory alone (4 cycles for what feeds two products of 2
// cycles each) takes as long as the tensor cores. Head dimension 256 has no registers for 32 rows.
//
// Shared memory. Queries are loaded once; keys and values go through rings of one or two stages each. The keys of block
// j + 1 are loaded during softmax and second product of block j. With two stages the values of j + 1 are loaded during
// all of j, with one barrier a block. With one stage the values of j are loaded while its scores are computed: two
// barriers a block, half the memory. If that lets another thread block be resident, it hides more than a second stage.
//
// Work beside the products. Plain scores are never scaled: one multiply-add gives the exponent, one instruction the
// power of two. Only blocks at the edges of the band compare positions. The running maximum is updated only when it has
// grown by more than 2^kSlack, which bounds the exponentials; the output is then rescaled a few times a row instead of
// once a block (idea: FlashAttention-4, Dao 2026; exact, because out and lse are relative to any m). Each row decides
// by itself, so its bits do not depend on its neighbours. The four lanes that share a row keep partial sums, which are
// added at the end. Options use natural units: masks hold the most negative finite number, which times log2(e) would be
// -inf. Each lane computes every other one of dropout's four-key counters, and two lanes exchange halves.
//
// float32: a product is three tf32 products, and every product of 8 terms starts at zero, because tensor cores truncate
// what does not fit their accumulators; over many keys that would show (mma.cuh).
//
// FLOP: 2 (D + Dv) a visible pair. Memory: query, out and lse once; keys and values once a tile of queries, from L2
// when their tiles run together (schedule.cuh). NOTES.md lists what was tried.
#pragma once

#include "forward_rows.cuh"
#include "launch.h"
#include "schedule.cuh"

namespace seqkern {
namespace attention_forward {

// A thread block's current tile, in shared memory because the loop needs the registers.
struct Work {
  int head, sequence, query0;
  AttentionRange range;  // of keys
  AttentionPlace at;
  const void *key, *value;  // the sequence's first rows
};
static_assert(sizeof(Work) <= kWorkBytes, "room for it");

struct Arguments {
  AttentionForwardCuda forward;
  AttentionOrder order;
  int stages;
};

// Packed result rows of no sequence: out 0, lse -inf. All blocks of the grid share the work.
template <class T>
SK_DEVICE void clear_gaps(const AttentionForwardCuda& p, int threads) {
  const AttentionCuda& c = p.call;
  const int64_t before = clamp_row(c.query_starts[0], c.query_rows);
  const int64_t behind = max(before, clamp_row(c.query_starts[c.sequences], c.query_rows));
  const int64_t gap = before + c.query_rows - behind;
  const int warps = threads / 32, warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t n = int64_t{blockIdx.x} * warps + warp; n < gap * c.heads; n += int64_t{gridDim.x} * warps) {
    const int64_t head = n / gap, row = n % gap < before ? n % gap : n % gap + behind - before;
    T* const out = p.out.at<T>(0, head, row);
    for (int column = lane; column < c.value_dim; column += 32) out[column] = T{};
    if (lane == 0) p.lse[head * c.query_rows + row] = -INFINITY;
  }
}

template <class T, int kDim, bool kOptions>
__global__ void __launch_bounds__(Shape<T, kDim, kOptions>::kThreads, Shape<T, kDim, kOptions>::kBlocks)
    attention_forward_kernel(const Arguments p) {
  using S = Shape<T, kDim, kOptions>;
  using Tile = attention_mma::Tile<T, kDim>;
  using KeyLoader = Loader<T, kDim, S::kKeys, S::kThreads>;
  using QueryLoader = Loader<T, kDim, S::kRows, S::kThreads>;
  constexpr int kThreads = S::kThreads, kKeys = S::kKeys, kKeyBytes = Tile::bytes(kKeys);
  SK_SHARED(memory);
  Work* const work = reinterpret_cast<Work*>(memory);
  unsigned char* const query = memory + kWorkBytes;
  unsigned char* const keys = query + Tile::bytes(S::kRows);
  unsigned char* const values = keys + p.stages * kKeyBytes;
  const AttentionCuda& c = p.forward.call;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warp_row = warp * 16 * S::kRowBlocks;
  const auto stage_of = [&](int key0) { return key0 / kKeys & (p.stages - 1); };

  int64_t index;
  for (int round = 0; (index = tile_of_round(round)) < p.order.tiles(); ++round) {
    __syncthreads();  // the previous tile is stored: its memory is free
    if (thread == 0) {
      const AttentionTile tile = p.order.walked(index);
      const AttentionPlace at = place_of(c, tile.sequence);
      const int query0 = tile.block * S::kRows;
      const int kv_head = tile.head / (c.heads / c.kv_heads);
      AttentionRange range = key_range(at, query0, S::kRows, kKeys);
      if constexpr (kOptions) {
        range = narrowed(range, c.query_limits, tile.sequence, tile.head, 1, query0, S::kRows, at.queries, kKeys);
      }
      *work = {tile.head,
               tile.sequence,
               query0,
               range,
               at,
               c.key.at<T>(at.batch, kv_head, at.key_row),
               c.value.at<T>(at.batch, kv_head, at.key_row)};
    }
    __syncthreads();
    if (work->query0 >= work->at.queries) continue;
    WarpRows<T, kDim, kOptions> rows;
    {
      float sink = -INFINITY;
      if (c.sinks != nullptr) sink = c.sinks[work->head] * (kOptions ? 1.0f : kLog2e);
      rows.start(sink);
    }
    const int first = work->range.first;
    if (first < work->range.last) {
      // Load a block of keys or values, given its first key. Each call recomputes its addresses, a few instructions, so
      // that nothing is kept while scores and sums need the registers. The products hide the lane for the same reason.
      const auto load_keys = [&](int key0) {
        const int t = unknown(thread);
        KeyLoader::load(keys + stage_of(key0) * kKeyBytes,
                        KeyLoader::begin(static_cast<const T*>(work->key) + key0 * c.key.row, c.key.row, c.vectors, t),
                        c.key.row, work->at.keys - key0, c.head_dim, c.vectors, t);
      };
      const auto load_values = [&](int key0) {
        const int t = unknown(thread);
        KeyLoader::load(
            values + stage_of(key0) * kKeyBytes,
            KeyLoader::begin(static_cast<const T*>(work->value) + key0 * c.value.row, c.value.row, c.vectors, t),
            c.value.row, work->at.keys - key0, c.value_dim, c.vectors, t);
      };
      {
        const AttentionPlace& at = work->at;
        const T* const from = c.query.at<T>(at.batch, work->head, at.query_row + work->query0);
        QueryLoader::load(query, QueryLoader::begin(from, c.query.row, c.vectors, thread), c.query.row,
                          at.queries - work->query0, c.head_dim, c.vectors, thread);
      }
      load_keys(first);
      if (p.stages == 2) load_values(first);
      cp_async_commit();

      for (int key0 = first; key0 < work->range.last; key0 += kKeys) {
        const bool more = key0 + kKeys < work->range.last;
        cp_async_wait<0>();
        __syncthreads();  // keys (with two stages values too) are loaded, and all warps have finished the block before
        if (p.stages == 1) {
          load_values(key0);
        } else if (more) {
          load_values(key0 + kKeys);
        }
        cp_async_commit();
        rows.scores(query, keys + stage_of(key0) * kKeyBytes, warp_row, c.head_dim, unknown(lane), c.tf32);
        if (p.stages == 1) {
          cp_async_wait<0>();
          __syncthreads();  // values are loaded, and all warps have read the keys
        }
        if (more) load_keys(key0 + kKeys);
        cp_async_commit();
        const bool edge = key0 < work->range.full || key0 >= work->range.edge;
        if constexpr (kOptions)
          rows.bias(c, head_of(c, work->sequence, work->head), work->at, work->query0 + warp_row, key0, lane);
        if (edge) {
          const AttentionPlace place = work->at;
          rows.for_scores(work->query0 + warp_row, key0, lane, [&](float& z, int i, int j) {
            if (!sees(place, i, j)) z = -INFINITY;
          });
        }
        rows.softmax(kOptions ? kLog2e : c.scale * kLog2e);
        if constexpr (kOptions) {
          if (c.seed != nullptr)
            rows.drop(static_cast<uint64_t>(*c.seed), c.threshold,
                      row_number(c, work->at, work->head, work->query0 + warp_row), key0, lane);
        }
        rows.values(values + stage_of(key0) * kKeyBytes, c.value_dim, unknown(lane), c.tf32);
      }
    }

    // Stores the rows' results through the queries' memory, where a warp reads and writes only its own rows.
    __syncwarp();
    const AttentionPlace at = work->at;
    const int head = work->head, query0 = work->query0 + warp_row;
    const float keep_scale = c.seed != nullptr ? c.keep_scale : 1.0f;
#pragma unroll
    for (int m = 0; m < S::kRowBlocks; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + 8 * h + lane / 4;
        float sum = rows.sum[m][h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool seen = sum != 0;  // then the sum is at least 1, the largest score's own term
        if (lane % 4 == 0 && query0 + row < at.queries) {
          const float bits = seen ? log2f(sum) : 0.0f, largest = rows.largest[m][h];
          p.forward.lse[row_number(c, at, head, query0 + row)] =
              kOptions ? fmaf(bits, kLn2, largest) : (largest + bits) * kLn2;
        }
        rows.store(query, warp_row, m, h, (seen ? reciprocal(sum) : 1.0f) * (kOptions ? keep_scale : 1.0f), lane);
      }
    }
    __syncwarp();
    const int left = min(16 * S::kRowBlocks, at.queries - query0);
    T* const out = p.forward.out.at<T>(at.batch, head, at.query_row + query0);
    const int64_t stride = p.forward.out.row;
    if (c.vectors) {
      const int chunks = c.value_dim / Tile::kChunk;
#pragma unroll 1
      for (int row = lane / Tile::kChunks; row < left; row += max(1, 32 / Tile::kChunks))
#pragma unroll 1
        for (int chunk = lane % Tile::kChunks; chunk < chunks; chunk += 32)
          *reinterpret_cast<uint4*>(out + row * stride + chunk * Tile::kChunk) =
              *reinterpret_cast<const uint4*>(query + Tile::offset(warp_row + row, chunk));
    } else {
#pragma unroll 1
      for (int row = 0; row < left; ++row)
#pragma unroll 1
        for (int column = lane; column < c.value_dim; column += 32)
          out[row * stride + column] = *Tile::element(query, warp_row + row, column);
    }
  }
  if (c.query_starts.data != nullptr) clear_gaps<T>(p.forward, kThreads);
}

}  // namespace attention_forward
}  // namespace seqkern
