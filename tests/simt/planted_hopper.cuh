// A matrix product as a Hopper kernel writes it, and the mistakes that one makes: what tests/simt/test_simt_hopper.py
// shows the host executor to compute right and to catch.
//
// A block has a warpgroup that loads tiles by TMA into a ring of two stages, and two that multiply 64 rows each by
// wgmma; the product leaves by TMA, or is added to float32 in memory.
#pragma once

#include "attention/cuda/mma.cuh"
#include "common/cuda/hopper/device.cuh"

namespace seqkern {

enum class HopperFault : int {
  none,
  no_wait,            // sums are read with a product under way
  no_commit,          // the wait covers nothing
  no_fence,           // wgmma without wgmma_fence
  no_proxy_fence,     // TMA reads what was stored without fence_async_shared
  unswizzled,         // the tile that TMA reads is written row by row
  wrong_stride,       // of a descriptor
  wrong_step,         // of a descriptor: twice the same half of k
  misaligned,         // tiles at a multiple of 512 bytes
  barrier_count,      // a named barrier of more threads than come
  barrier_counts,     // of which half say another number
  no_barrier,         // TMA reads what other threads may not have stored yet
  early_release,      // a stage is filled again while products read it
  no_full,            // one warp of four does not wait for the stage
  few_bytes,          // the mbarrier expects fewer than come
  no_bytes,           // or none
  touched,            // sums are written with a product under way
  other_descriptors,  // one warp names another operand
  reused,             // a tile is written again while TMA may read it
  no_store_wait,      // a thread ends while TMA may read its tile
  registers,          // more than there are
  part_of_registers,  // one warp of a warpgroup alone
  not_elected,        // lane 0 counts on being the one
  same_sums,          // several blocks add to one place, in any order
  split,              // all registers that there are, of which the block has not all
  count
};

constexpr int kHopperDepth = 64, kHopperStages = 2;

template <int kN>
struct HopperShared {  // bytes
  static constexpr int kTile = 64 * 128, kColumns = (kN + 63) / 64;
  static constexpr int kA = 2 * kTile, kB = kColumns * kTile, kStage = kA + kB;
  static constexpr int kOut = kHopperStages * kStage;  // the float sums need the most
  static constexpr int kBarriers = kOut + 128 * kColumns * 64 * 4;
  static constexpr int kBytes = kBarriers + 2 * kHopperStages * 8 + 1024;
};

// out = a b of (rows, depth) and (depth, kN) in `batches` x `outer` independent problems. a's rows lie in memory along
// the summed index, or, transposed, its columns; so b's columns or rows.
template <class T, int kN, bool kRegisters, bool kTransposeA, bool kTransposeB, bool kPlanted>
__global__ void __launch_bounds__(384, 1)
    hopper_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                   const __grid_constant__ TensorMap out, float* sums, int rows, int depth, int batches,
                   HopperFault planted) {
#if SK_HOPPER
  using F = HopperFault;
  const F fault = kPlanted ? planted : F::none;
  using S = HopperShared<kN>;
  using Tile = attention_mma::Tile<T, 64>;
  SK_SHARED_TILES(memory);
  unsigned char* const shared = memory + (fault == F::misaligned ? 512 : 0);
  auto* full = reinterpret_cast<uint64_t*>(memory + S::kBarriers);
  uint64_t* empty = full + kHopperStages;
  const int thread = static_cast<int>(threadIdx.x), group = thread / 128;
  const int first = static_cast<int>(blockIdx.x) * 128, c2 = static_cast<int>(blockIdx.y) % batches,
            c3 = static_cast<int>(blockIdx.y) / batches;
  const int steps = (depth + kHopperDepth - 1) / kHopperDepth;
  if (thread == 0) {
    for (int s = 0; s < kHopperStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 8);
    }
    mbarrier_fence_init();
    prefetch_map(a);
  }
  __syncthreads();
  if (group == 0) {
    if (fault == F::split) {
      set_registers_down<32>();
    } else if (fault != F::part_of_registers || thread < 32) {
      set_registers_down<40>();
    }
    if (thread < 32 && (fault == F::not_elected ? elect_one() && thread == 0 : elect_one())) {
      for (int n = 0; n < steps; ++n) {
        const int s = n % kHopperStages;
        if (n >= kHopperStages) mbarrier_wait(&empty[s], (n / kHopperStages - 1) & 1);
        unsigned char* stage = shared + s * S::kStage;
        if (fault == F::no_bytes) {
          mbarrier_arrive(&full[s]);
        } else {
          mbarrier_arrive_expect(&full[s], S::kStage - (fault == F::few_bytes ? S::kTile : 0));
        }
        const int k = n * kHopperDepth;
        for (int i = 0; i < 2; ++i) {
          const int row = first + i * 64;
          tma_load_4d(stage + i * S::kTile, a, &full[s], kTransposeA ? row : k, kTransposeA ? k : row, c2, c3);
        }
        for (int i = 0; i < S::kColumns; ++i) {
          tma_load_4d(stage + S::kA + i * S::kTile, b, &full[s], kTransposeB ? i * 64 : k, kTransposeB ? k : i * 64, c2,
                      c3);
        }
      }
    }
    return;
  }
  if (fault == F::registers) {
    set_registers_up<248>();
  } else if (fault == F::split) {
    set_registers_up<240>();
  } else {
    set_registers_up<232>();
  }
  const int own = group - 1, lane = thread % 32, warp = thread / 32 % 4;
  float d[kN / 2];
  for (float& x : d) x = 0.0f;
  for (int n = 0; n < steps; ++n) {
    const int s = n % kHopperStages;
    if (fault != F::no_full || warp != 1) mbarrier_wait(&full[s], n / kHopperStages & 1);
    unsigned char* stage = shared + s * S::kStage;
    unsigned char *tile_a = stage + own * S::kTile, *tile_b = stage + S::kA;
    uint32_t r[kHopperDepth / 16][4];
    if (kRegisters) {
      for (int k = 0; k < kHopperDepth / 16; ++k) Tile::a(r[k], tile_a, warp * 16, k * 16, lane);
    }
    wgmma_pin(d);
    if (fault != F::no_fence) wgmma_fence();
    for (int k = 0; k < kHopperDepth / 16; ++k) {
      const int step = fault == F::wrong_step ? k / 2 * 2 : k;
      const int shift = fault == F::other_descriptors && warp == 2 ? 1 : 0;
      // b's rows are more than one tile's without a gap, so that a k-major b is one matrix.
      uint64_t of_b = kTransposeB ? mn_major_descriptor(tile_b, step, S::kTile)
                                  : k_major_descriptor(tile_b, step ^ shift, S::kTile);
      if (fault == F::wrong_stride) of_b = shared_descriptor(tile_b + step % 4 * 32, 16, 2048);
      const bool accumulate = n > 0 || k > 0;
      if constexpr (kRegisters) {
        wgmma_rs<T, kN, kTransposeB>(d, r[k], of_b, accumulate);
      } else {
        const uint64_t of_a =
            kTransposeA ? mn_major_descriptor(tile_a, step, S::kTile) : k_major_descriptor(tile_a, step, S::kTile);
        wgmma_ss<T, kN, kTransposeA, kTransposeB>(d, of_a, of_b, accumulate);
      }
      if (fault == F::touched && n == 0 && k == 1) d[3] = 1.0f;
    }
    if (fault != F::no_commit) wgmma_commit();
    if (fault == F::early_release) {
      if (lane == 0) mbarrier_arrive(&empty[s]);
    }
    if (fault == F::no_wait && n == steps - 1) {
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    wgmma_pin(d);
    if (fault != F::early_release) {
      // A product has read what it reads of the stage, but what a lane has read by itself is its own affair.
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty[s]);
    }
  }
  const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
  if (sums != nullptr) {
    // 64 rows of kN floats, for as many as there are.
    float* part = reinterpret_cast<float*>(shared + S::kOut) + own * 64 * kN;
    for (int i = 0; i < kN / 2; ++i) part[(row + (i & 2) * 4) * kN + i / 4 * 8 + column + (i & 1)] = d[i];
    const int there = min(64, rows - first - own * 64);
    if (fault != F::no_proxy_fence) fence_async_shared();
    named_barrier_sync(1 + own, 128);
    if (thread % 128 == 0 && there > 0) {
      const int64_t problem = static_cast<int64_t>(fault == F::same_sums ? 0 : blockIdx.y) * rows + first + own * 64;
      bulk_reduce_add_f32(sums + problem * kN, part, there * kN * 4);
      bulk_commit();
      bulk_wait<0>();
    }
    return;
  }
  unsigned char* tiles = shared + S::kOut + own * S::kColumns * S::kTile;
  for (int i = 0; i < kN / 2; i += 2) {
    const int r = row + (i & 2) * 4, c = i / 4 * 8 + column;
    unsigned char* tile = tiles + c / 64 * S::kTile;
    const int place = fault == F::unswizzled ? r * 128 + c % 64 * 2 : Tile::offset(r, c % 64 / 8) + c % 8 * 2;
    *reinterpret_cast<uint32_t*>(tile + place) = narrow_pair<T>(d[i], d[i + 1]);
  }
  if (fault != F::no_proxy_fence) fence_async_shared();
  const int count = fault == F::barrier_count || (fault == F::barrier_counts && warp == 3) ? 256 : 128;
  if (fault != F::no_barrier) named_barrier_sync(1 + own, count);
  if (thread % 128 == 0) {
    for (int i = 0; i < S::kColumns; ++i) tma_store_4d(out, tiles + i * S::kTile, i * 64, first + own * 64, c2, c3);
    bulk_commit();
    if (fault != F::no_store_wait && fault != F::reused) bulk_wait_read<0>();
  }
  if (fault == F::reused) {
    if (thread % 128 == 0) *reinterpret_cast<uint32_t*>(tiles) = 0;
    if (thread % 128 == 0) bulk_wait_read<0>();
  }
#endif
}

// Who comes when to barrier 1 of 96 threads: warp 0 brings a number every round, warps 1 and 2 wait for it. With the
// fault nobody says when it has been read.
template <HopperFault kFault>
__global__ void __launch_bounds__(96) hopper_handover(int* out, int rounds) {
#if SK_HOPPER
  SK_SHARED_TILES(memory);
  int* slot = reinterpret_cast<int*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  for (int n = 0; n < rounds; ++n) {
    if (thread < 32) {
      if (n > 0 && kFault != HopperFault::early_release) named_barrier_sync(2, 96);
      slot[thread] = n * 100 + thread;
      named_barrier_arrive(1, 96);
    } else {
      named_barrier_sync(1, 96);
      out[n * 64 + thread - 32] = slot[thread % 32];
      if (n + 1 < rounds) named_barrier_arrive(2, 96);
    }
  }
#endif
}

}  // namespace seqkern
