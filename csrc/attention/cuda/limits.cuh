// Which keys a mask lets a block of queries see, and which queries a block of keys: the first and the last of them.
//
// Masks come as matrices that are mostly causal, windowed or padded. A kernel of its own reads the mask once before the
// call, and tiles then walk what lies between their limits, as for a band. What is hidden within them is visited.
//
// Only masks that sequences or heads share are looked at, and boolean ones: to read a bias of every head a second time
// takes longer than it saves.
#pragma once

#include "attention.cuh"
#include "launch.h"

namespace seqkern {
namespace attention_limits {

constexpr int kWarps = 8;

struct Arguments {
  AttentionCuda call;
  AttentionLimits limits;  // to write
  int* data;
  bool queries;  // of blocks of queries; else of keys
};

// Whether the mask, which starts at `head`, shows a key to a query.
SK_DEVICE bool shows(const AttentionCuda& c, const AttentionHead& head, int i, int j) {
  return mask_value(c, head, i, j) != -INFINITY;
}

// A thread block: the limits of kLimitRows queries or keys of a mask. Lanes read along the keys, which are contiguous
// as a rule.
__global__ void __launch_bounds__(32 * kWarps) mask_limits_kernel(const Arguments p) {
  SK_SHARED(memory);
  int* const found = reinterpret_cast<int*>(memory);  // of each warp: first, last
  const AttentionCuda& c = p.call;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int own = p.queries ? c.max_queries : c.max_keys, blocks = (own + kLimitRows - 1) / kLimitRows;
  const int owner = static_cast<int>(blockIdx.x) / blocks, block = static_cast<int>(blockIdx.x) % blocks;
  const AttentionHead head = head_of(c, owner / p.limits.heads, owner % p.limits.heads);
  // A mask of one row or one column says the same of all.
  const int query0 = p.queries ? block * kLimitRows : 0, key0 = p.queries ? 0 : block * kLimitRows;
  const int query1 = p.queries ? min(query0 + kLimitRows, c.max_queries) : c.max_queries;
  const int key1 = p.queries ? c.max_keys : min(key0 + kLimitRows, c.max_keys);
  int first = kAttentionFar, last = 0;
  for (int i = query0 + warp; i < query1; i += kWarps) {
    for (int j = key0 + lane; j < key1; j += 32) {
      if (!shows(c, head, i, j)) continue;
      const int other = p.queries ? j : i;
      first = min(first, other);
      last = max(last, other + 1);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    first = min(first, __shfl_xor_sync(~0u, first, step));
    last = max(last, __shfl_xor_sync(~0u, last, step));
  }
  if (lane == 0) {
    found[2 * warp] = first;
    found[2 * warp + 1] = last;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int n = 1; n < kWarps; ++n) {
    first = min(first, found[2 * n]);
    last = max(last, found[2 * n + 1]);
  }
  p.data[2 * int64_t{blockIdx.x}] = first;
  p.data[2 * int64_t{blockIdx.x} + 1] = last;
}

}  // namespace attention_limits
}  // namespace seqkern
