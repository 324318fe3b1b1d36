// The forward pass of attention with mma.sync: compute capability 8.0 and up, every option, bfloat16, float16, float32.
//
// The idea. A block of threads owns a tile of queries and walks the keys that any of them sees, block by block, with a
// running maximum and sum of each row (online softmax: Milakov & Gimelshein 2018; FlashAttention-2: Dao 2023). With m
// the running maximum, over the visible keys j of a block, equations of scores as in attention.cuh:
//
//    m' = max(m, max_j z_ij)
//    l' = l e^(m - m') + sum_j e^(z_ij - m')
//    o' = o e^(m - m') + sum_j r_ij e^(z_ij - m') v_j
//    out = o / l      lse = m + log l
//
// with r_ij = 1 / (1 - p) where dropout keeps (i, j), else 0 (the factor comes last). A sink is a key of its own that
// has no value. Rows that see nothing: out 0, lse -inf.
//
// Tiles. A warp owns 16 or 32 rows and all their keys, so no row crosses warps: scores, sums and the output stay in the
// registers in which the tensor cores leave them, and become operands of the second product where they are. Of 32 rows
// each operand from shared memory serves two products: with 16 rows shared memory alone (4 cycles for what feeds two
// products of 2 cycles each) is as slow as the tensor cores. Head dimension 256 has no registers for that.
//
// Shared memory. Queries once, keys and values in rings of one or two stages each. Keys of block j + 1 are under way
// during softmax and second product of j. Values, with two stages: of j + 1, during all of j, and there is one barrier
// a block. With one stage: of j, while its scores are computed, two barriers a block, half the memory: where that lets
// another block of threads be on the multiprocessor, it hides more than a second stage.
//
// Work that is not a product. Plain scores are never scaled: one multiply-add gives the exponent of two, one
// instruction the power. Only blocks at the edges of the band compare positions. The maximum is followed only when it
// has grown by more than 2^kSlack: what is exponentiated is then at most that, the result is the same, and the output
// is rescaled a few times a row instead of once a block (the idea is FlashAttention-4's, Dao 2026; exact, since out and
// lse are relative to whatever m is). A row decides for itself: its bits do not depend on its neighbours. Sums of a row
// are kept by the four lanes that share it, and put together at the end. Options run in natural units, since masks hold
// the most negative finite number, which times log2(e) would be -inf. Of dropout's four-key counters each lane computes
// every other one, and two lanes exchange halves.
//
// float32 takes three products of tf32 numbers for one, and every product of 8 terms begins at zero: tensor cores cut
// off what does not fit their sums, which over many keys would show (mma.cuh).
//
// What was tried, judged by the compiler's reports (no speed has been measured yet):
// - options looked up score by score, with 64 scores a lane: four times the instructions, a minute of compilation for
//   two kernels; option by option, with 16 scores a lane, a warp's rows fit 168 registers, three blocks of threads;
// - what the end needs of a tile (places, rows) in registers across the loop: some 200 bytes of spills at D 128; in
//   shared memory, and rows' addresses there as an exclusive or of constants: 52 on sm_90a, 12 on sm_100a and sm_120;
// - where the next keys and values are, how many rows are left and the ring's place, looked up for each block, copies
//   unrolled twice, not four times: 16 on sm_100a alone; operands' addresses made anew for each product, too: none;
// - copies of any number of bytes up to 16: each takes a dozen instructions; of 16 or nothing: two.
//
// FLOP: 2 (D + Dv) a visible pair; memory: query, out and lse once, keys and values once a tile of queries, from the
// second-level cache when their tiles run together (schedule.cuh).
#pragma once

#include "forward_rows.cuh"
#include "launch.h"
#include "schedule.cuh"

namespace seqkern {
namespace attention_forward {

// What a block of threads works at, in shared memory: registers are for the loop.
struct Work {
  int head, sequence, query0;
  AttentionRange range;  // of keys
  AttentionPlace at;
  const void *key, *value;  // the first rows of the sequence
};
static_assert(sizeof(Work) <= kWorkBytes, "room for it");

struct Arguments {
  AttentionForwardCuda forward;
  AttentionOrder order;
  int stages;
};

// Rows of packed results that no sequence has: out 0, lse -inf. All blocks of the grid share them.
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
    __syncthreads();  // the memory is free: the tile before is stored
    if (thread == 0) {
      const AttentionTile tile = p.order.walked(index);
      const AttentionPlace at = place_of(c, tile.sequence);
      const int query0 = tile.block * S::kRows;
      const int kv_head = tile.head / (c.heads / c.kv_heads);
      *work = {tile.head,
               tile.sequence,
               query0,
               key_range(at, query0, S::kRows, kKeys),
               at,
               c.key.at<T>(at.batch, kv_head, at.key_row),
               c.value.at<T>(at.batch, kv_head, at.key_row)};
    }
    __syncthreads();
    if (work->query0 >= work->at.queries) continue;
    Rows<T, kDim, kOptions> rows;
    {
      float sink = -INFINITY;
      if (c.sinks != nullptr) sink = c.sinks[work->head] * (kOptions ? 1.0f : kLog2e);
      rows.start(sink);
    }
    const int first = work->range.first;
    if (first < work->range.last) {
      // Blocks of keys and of values, by their first key. Each looks everything up again, a few instructions: nothing
      // has to be kept while scores and sums need the registers. The products hide the lane for the same reason.
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
        __syncthreads();  // keys are there (and values, of two stages), and all warps are done with the block before
        if (p.stages == 1) {
          load_values(key0);
        } else if (more) {
          load_values(key0 + kKeys);
        }
        cp_async_commit();
        rows.scores(query, keys + stage_of(key0) * kKeyBytes, warp_row, c.head_dim, unknown(lane), c.tf32);
        if (p.stages == 1) {
          cp_async_wait<0>();
          __syncthreads();  // values are there, and all warps are done with the keys
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

    // The rows' results: through the queries' memory, of which a warp reads and writes its own rows only.
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
        const bool seen = sum != 0;  // then it is 1 at least: the largest score's own
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
