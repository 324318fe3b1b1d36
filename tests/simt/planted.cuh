// Small kernels in the manner of the project's own, and the same with one fault planted in each: what the executor's
// own tests run (planted_cuda.cu, tests/simt/test_simt.py). Every right kernel uses one of the means by which threads
// talk to each other; `Fault` takes one thing out.
#pragma once

#include "common/cuda/device.cuh"

namespace seqkern {

enum class Fault {
  none,
  no_barrier,       // a __syncthreads left out
  no_last_barrier,  // the one at the end of a loop, before its memory is used again
  no_wait,          // what was asked for is read without a wait
  early_wait,       // one group too few is waited for
  swapped,          // two registers of a fragment
  outside_shared,   // one element behind
  outside_global,
  leaves,  // a block ends while others read its shared memory
  too_many_arrivals,
  too_few_bytes,  // of which a barrier is told
  no_fence,       // between data and the flag that tells of them
  narrow_wait,    // for other blocks of the cluster, of which only this block's threads are seen
  no_acquire,     // a fence left out between the relaxed read of a flag and what it tells of
  one_tag,        // only one half of 16 bytes tells what they belong to
};

// ---- sums of rows: shuffles, shared memory, __syncthreads ----------------------------------------------------------

// x (rows, columns), y (rows): a block of 128 threads a row.
template <Fault fault>
__global__ void row_sums(const float* x, float* y, int64_t columns) {
  SK_SHARED(memory);
  float* parts = reinterpret_cast<float*>(memory);  // one a warp
  const int warps = static_cast<int>(blockDim.x) / 32;
  const float* row = x + blockIdx.x * columns;
  float sum = 0;
  const int64_t end = fault == Fault::outside_global ? columns + 1 : columns;
  for (int64_t i = threadIdx.x; i < end; i += blockDim.x) sum += row[i];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  if (fault != Fault::no_barrier) __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int w = 0; w < (fault == Fault::outside_shared ? warps + 1 : warps); ++w) total += parts[w];
    y[blockIdx.x] = total;
  }
}

// ---- a matrix product: cp.async, ldmatrix, mma.sync ----------------------------------------------------------------

constexpr int kTileM = 32, kTileN = 32, kTileK = 32,
              kPad = 16;  // bytes behind a row, so that ldmatrix meets no bank twice

// c (m, n) = a (m, k) b (k, n), sizes multiples of 32. Four warps, each 16 x 16 of a tile of 32 x 32; two stages of
// 32 columns of a and 32 rows of b.
template <class T, Fault fault>
__global__ void matmul(const T* a, const T* b, float* c, int n, int k) {
  SK_SHARED(memory);
  constexpr int kRow = kTileK * static_cast<int>(sizeof(T)) + kPad;  // bytes: 32 elements, for a's rows and b's
  constexpr int kStage = (kTileM + kTileK) * kRow;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, q = lane % 4;
  const int64_t m0 = int64_t{blockIdx.y} * kTileM, n0 = int64_t{blockIdx.x} * kTileN;
  const int row0 = warp / 2 * 16, column0 = warp % 2 * 16;

  const auto fetch = [&](int tile) {
    unsigned char* stage = memory + tile % 2 * kStage;
    constexpr int kPieces = kTileK * static_cast<int>(sizeof(T)) / 16;  // of 16 bytes, a row
    for (int i = static_cast<int>(threadIdx.x); i < (kTileM + kTileK) * kPieces; i += static_cast<int>(blockDim.x)) {
      const int row = i / kPieces, piece = i % kPieces * 16 / static_cast<int>(sizeof(T));
      const T* from = row < kTileM ? a + (m0 + row) * k + tile * kTileK + piece
                                   : b + (int64_t{tile} * kTileK + row - kTileM) * n + n0 + piece;
      cp_async_16(stage + row * kRow + i % kPieces * 16, from);
    }
    cp_async_commit();
  };

  float sums[2][4] = {};  // two tiles of 16 x 8
  const int tiles = k / kTileK;
  fetch(0);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      fetch(tile + 1);
    } else {
      cp_async_commit();  // an empty group, so that the wait below always leaves one open
    }
    if (fault == Fault::early_wait) {
      cp_async_wait<2>();
    } else if (fault != Fault::no_wait) {
      cp_async_wait<1>();
    }
    if (fault != Fault::no_barrier) __syncthreads();
    const unsigned char* stage = memory + tile % 2 * kStage;
    const unsigned char* rows_b = stage + kTileM * kRow;
    if constexpr (sizeof(T) == 2) {
      for (int k0 = 0; k0 < kTileK; k0 += 16) {
        // The four matrices of a's fragment: rows, rows + 8, then the same of columns + 8.
        uint32_t fa[4], fb[2][2];
        ldmatrix_x4(fa, stage + (row0 + lane % 16) * kRow + (k0 + lane / 16 * 8) * 2);
        if (fault == Fault::swapped) {
          const uint32_t other = fa[1];
          fa[1] = fa[2];
          fa[2] = other;
        }
        for (int j = 0; j < 2; ++j) {
          ldmatrix_x2_trans(fb[j], rows_b + (k0 + lane % 16) * kRow + (column0 + j * 8) * 2);
          mma_16816<T>(sums[j], fa, fb[j]);
        }
      }
    } else {
      const auto at = [](const unsigned char* rows, int row, int column) {
        return to_tf32(reinterpret_cast<const float*>(rows + row * kRow)[column]);
      };
      for (int k0 = 0; k0 < kTileK; k0 += 8) {
        uint32_t fa[4] = {at(stage, row0 + group, k0 + q), at(stage, row0 + group + 8, k0 + q),
                          at(stage, row0 + group, k0 + q + 4), at(stage, row0 + group + 8, k0 + q + 4)};
        if (fault == Fault::swapped) {
          const uint32_t other = fa[1];
          fa[1] = fa[2];
          fa[2] = other;
        }
        for (int j = 0; j < 2; ++j) {
          const uint32_t fb[2] = {at(rows_b, k0 + q, column0 + j * 8 + group),
                                  at(rows_b, k0 + q + 4, column0 + j * 8 + group)};
          mma_1688_tf32(sums[j], fa, fb);
        }
      }
    }
    // The next turn's fetch writes the stage that was read here.
    if (fault != Fault::no_last_barrier) __syncthreads();
  }
  for (int j = 0; j < 2; ++j) {
    for (int i = 0; i < 4; ++i) {
      c[(m0 + row0 + group + (i >= 2 ? 8 : 0)) * n + n0 + column0 + j * 8 + q * 2 + (i & 1)] = sums[j][i];
    }
  }
}

// ---- a cluster: distributed shared memory and mbarriers ------------------------------------------------------------

constexpr int kWidth = 32;  // values a block owns

// x (teams, size * 32): a cluster of `size` blocks of 32 threads a row, which keeps 32 values each. In every step each
// block sends its values to all, and every value becomes the row's mean plus the step's number; after the last one the
// blocks read the row's maximum from each other. Two buffers, so that a block may be one step ahead.
template <Fault fault>
__global__ void cluster_steps(const float* x, float* y, int steps) {
  SK_SHARED(memory);
  const int size = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  const int lane = static_cast<int>(threadIdx.x);
  uint64_t* full = reinterpret_cast<uint64_t*>(memory);  // one barrier a buffer
  float* own_max = reinterpret_cast<float*>(memory + 16);
  float* buffers = reinterpret_cast<float*>(memory + 128);  // 2 x size x 32
  const int64_t at = int64_t{blockIdx.x} * kWidth + lane;
  if (lane == 0) {
    mbarrier_init(&full[0], 1);
    mbarrier_init(&full[1], 1);
    mbarrier_fence_init();
  }
  cluster_arrive();
  cluster_wait();

  float value = x[at];
  for (int step = 0; step < steps; ++step) {
    const int buffer = step % 2, parity = step / 2 % 2;
    float* row = buffers + buffer * size * kWidth;
    if (lane == 0) {
      const unsigned bytes = static_cast<unsigned>(size) * kWidth * 4;
      mbarrier_arrive_expect(&full[buffer], fault == Fault::too_few_bytes ? bytes - 16 : bytes);
      if (fault == Fault::too_many_arrivals) mbarrier_arrive(&full[buffer]);
    }
    // Lane 4 i sends the values of lanes 4 i to 4 i + 3.
    uint4 packet;
    packet.x = device_bits<uint32_t>(__shfl_sync(~0u, value, lane & ~3));
    packet.y = device_bits<uint32_t>(__shfl_sync(~0u, value, lane | 1));
    packet.z = device_bits<uint32_t>(__shfl_sync(~0u, value, lane | 2));
    packet.w = device_bits<uint32_t>(__shfl_sync(~0u, value, lane | 3));
    if (lane % 4 == 0) {
      for (int r = 0; r < size; ++r) {
        store_async_16(row + rank * kWidth + lane, &full[buffer], static_cast<unsigned>(r), packet);
      }
    }
    if (fault == Fault::narrow_wait) {
      mbarrier_wait(&full[buffer], static_cast<unsigned>(parity));
    } else if (fault != Fault::no_wait) {
      mbarrier_wait_cluster(&full[buffer], static_cast<unsigned>(parity));
    }
    float sum = 0;
    for (int i = 0; i < size * kWidth; ++i) sum += row[i];
    value = sum / static_cast<float>(size * kWidth) + static_cast<float>(step) + static_cast<float>(rank);
    __syncwarp();
  }
  float largest = value;
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
  if (lane == 0) *own_max = largest;
  cluster_arrive();
  if (fault != Fault::no_barrier) cluster_wait();
  for (int r = 0; r < size; ++r) largest = fmaxf(largest, *map_shared(own_max, static_cast<unsigned>(r)));
  if (fault == Fault::no_barrier) cluster_wait();
  if (fault != Fault::leaves) {
    cluster_arrive();
    cluster_wait();
  }
  y[at] = value + largest;
}

// ---- the whole grid: the flag in the data --------------------------------------------------------------------------

// x, y (blocks, 3): in every step each block, of one warp, publishes three words with the step's number beside them,
// and all blocks add up what all published. packets: (3, blocks) of 16 bytes, 0 at the start; done: a counter, 0 at
// the start. The last block to end leaves the number of blocks in y's last element.
template <Fault fault>
__global__ void grid_steps(const float* x, float* y, uint4* packets, uint32_t* done, int steps) {
  const int lane = static_cast<int>(threadIdx.x), blocks = static_cast<int>(gridDim.x);
  float values[3];
  for (int i = 0; i < 3; ++i) values[i] = x[blockIdx.x * 3 + i];
  for (int step = 0; step < steps; ++step) {
    uint4* slab = packets + step % 3 * blocks;
    const uint32_t number = static_cast<uint32_t>(step) + 1;
    if (lane == 0) {
      // The third value by halves, beside the number in each.
      const uint32_t third = device_bits<uint32_t>(values[2]);
      store_fresh_16(slab + blockIdx.x, {device_bits<uint32_t>(values[0]), number << 16 | third >> 16,
                                         device_bits<uint32_t>(values[1]), number << 16 | (third & 0xFFFF)});
    }
    float sums[3] = {};
    for (int b = lane; b < blocks; b += 32) {
      uint4 packet = load_fresh_16(slab + b);
      while (fault != Fault::no_wait &&
             (packet.w >> 16 != number || (fault != Fault::one_tag && packet.y >> 16 != number))) {
        pause();
        packet = load_fresh_16(slab + b);
      }
      sums[0] += device_bits<float>(packet.x);
      sums[1] += device_bits<float>(packet.z);
      sums[2] += device_bits<float>(packet.y << 16 | (packet.w & 0xFFFF));
    }
    for (int i = 0; i < 3; ++i) {
      for (int lanes = 16; lanes > 0; lanes /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], lanes);
      values[i] = sums[i] / static_cast<float>(blocks) + static_cast<float>(blockIdx.x);
    }
  }
  if (lane < 3) y[blockIdx.x * 3 + lane] = values[lane];
  __syncwarp();
  if (lane == 0 && add_release(done, 1) + 1 == gridDim.x) y[blocks * 3] = static_cast<float>(load_acquire(done));
}

// One warp a block: writes a value that lane 0 reads, and which no schedule may show: the last lane to come has it
// right. y (blocks): the sum of the lanes' numbers.
template <Fault fault>
__global__ void warp_sums(float* y) {
  SK_SHARED(memory);
  float* values = reinterpret_cast<float*>(memory);
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (fault != Fault::no_barrier) {
    __syncwarp();
  } else {
    __any_sync(~0u, 1);  // all have come, and nothing says that what they wrote is there
  }
  float sum = 0;
  for (int i = 0; i < 32; ++i) sum += values[i];
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

// Each block sums its row of x (blocks, 128) into parts, the last one to end sums those: y (1).
template <Fault fault>
__global__ void last_block_sums(const float* x, float* parts, uint32_t* done, float* y) {
  const float* row = x + blockIdx.x * 128;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < 128; i += 32) sum += row[i];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = sum;
  if (fault != Fault::no_fence) __threadfence();
  if (atomicAdd(done, 1u) + 1 != gridDim.x) return;
  if (fault != Fault::no_acquire) __threadfence();
  float total = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) total += parts[b];
  y[0] = total;
}

// ---- one instruction -----------------------------------------------------------------------------------------------

// a (32, 4), b (32, 2), d (32, 4): the registers of each lane. kind: 0 bfloat16, 1 float16, 2 tf32.
__global__ void mma_registers(int kind, const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t fa[4], fb[2];
  float fd[4];
  for (int i = 0; i < 4; ++i) fa[i] = a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) fb[i] = b[lane * 2 + i];
  for (int i = 0; i < 4; ++i) fd[i] = d[lane * 4 + i];
  if (kind == 0) {
    mma_16816<BFloat16>(fd, fa, fb);
  } else if (kind == 1) {
    mma_16816<Half>(fd, fa, fb);
  } else {
    mma_1688_tf32(fd, fa, fb);
  }
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = fd[i];
}

// rows (8 matrices, 8) of 16 bytes; r (32, matrices).
template <int matrices, bool transposed>
__global__ void ldmatrix_registers(const uint4* rows, uint32_t* r) {
  SK_SHARED(memory);
  uint4* shared = reinterpret_cast<uint4*>(memory);
  const int lane = static_cast<int>(threadIdx.x), named = lane % (8 * matrices);
  shared[named] = rows[named];
  __syncwarp();
  uint32_t registers[matrices];
  if constexpr (matrices == 4) {
    transposed ? ldmatrix_x4_trans(registers, shared + named) : ldmatrix_x4(registers, shared + named);
  } else {
    transposed ? ldmatrix_x2_trans(registers, shared + named) : ldmatrix_x2(registers, shared + named);
  }
  for (int m = 0; m < matrices; ++m) r[lane * matrices + m] = registers[m];
}

// The first i bytes of 16, for i = 0 ... 16: x (16), y (17, 16).
__global__ void part_copies(const unsigned char* x, unsigned char* y) {
  SK_SHARED(memory);
  const int thread = static_cast<int>(threadIdx.x);
  cp_async_16(memory + thread * 16, x, thread);
  cp_async_commit();
  cp_async_wait<0>();
  for (int i = 0; i < 16; ++i) y[thread * 16 + i] = memory[thread * 16 + i];
}

// Of 32 values: which = 0 from a lane, 1 xor, 2 down, 3 up; 4 to 6 the votes (ballot, any, all) on value > argument;
// 7 to 9 the same of a block by __syncthreads_count, _or, _and.
__global__ void exchange_values(int which, int argument, int width, const float* x, float* y) {
  const float v = x[threadIdx.x];
  const unsigned lanes = static_cast<unsigned>(argument);
  const int vote = v > static_cast<float>(argument);
  float result = 0;
  switch (which) {
    case 0: result = __shfl_sync(~0u, v, argument, width); break;
    case 1: result = __shfl_xor_sync(~0u, v, argument, width); break;
    case 2: result = __shfl_down_sync(~0u, v, lanes, width); break;
    case 3: result = __shfl_up_sync(~0u, v, lanes, width); break;
    case 4: result = static_cast<float>(__popc(__ballot_sync(~0u, vote))); break;
    case 5: result = static_cast<float>(__any_sync(~0u, vote)); break;
    case 6: result = static_cast<float>(__all_sync(~0u, vote)); break;
    case 7: result = static_cast<float>(__syncthreads_count(vote)); break;
    case 8: result = static_cast<float>(__syncthreads_or(vote)); break;
    case 9: result = static_cast<float>(__syncthreads_and(vote)); break;
  }
  y[threadIdx.x] = result;
}

// x (n) in float32, as T and back.
template <class T>
__global__ void round_trip(const float* x, float* y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = widen(narrow<T>(x[i]));
}

// ---- misuse that has no right counterpart --------------------------------------------------------------------------

// One block of 64 threads; by the number of the fault.
__global__ void misuse(int which, float* x) {
  SK_SHARED(memory);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  uint64_t* barrier = reinterpret_cast<uint64_t*>(memory);
  switch (which) {
    case 0:  // half the block leaves before the barrier
      if (thread >= 32) return;
      __syncthreads();
      break;
    case 1:  // two barriers in two branches
      if (thread < 32) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case 2:  // a lane is named and does not come
      if (lane != 7) x[thread] = __shfl_down_sync(~0u, x[thread], 1);
      break;
    case 3:  // masks that do not agree, in a ring
      if (lane < 3) __syncwarp(lane == 0 ? 3u : lane == 1 ? 6u : 5u);
      break;
    case 4:  // two kinds of collectives
      if (lane % 2 == 0) {
        x[thread] = static_cast<float>(__ballot_sync(~0u, 1));
      } else {
        x[thread] = __shfl_xor_sync(~0u, x[thread], 1);
      }
      break;
    case 5:  // half the block at one barrier, half at the other
      if (thread < 32) {
        __syncthreads();
      } else {
        cluster_arrive();
        cluster_wait();
      }
      break;
    case 6:  // nobody ever arrives
      if (thread == 0) mbarrier_init(barrier, 1);
      __syncthreads();
      mbarrier_wait(barrier, 0);
      break;
    case 7:  // the barrier is waited for before it is there
      mbarrier_wait(barrier, 0);
      break;
    case 8:  // something is written over a barrier
      if (thread == 0) {
        mbarrier_init(barrier, 1);
        *barrier = 0;
        mbarrier_arrive(barrier);
      }
      break;
    case 9: cp_async_16(memory + 4, x); break;
    case 10: cp_async_16(memory, x + 1); break;
    case 11: {
      uint32_t r[4];
      ldmatrix_x4(r, memory + lane * 8);
      break;
    }
    case 12: cp_async_16(memory + 1024, x); break;  // the shared memory's end
    case 13:                                        // a shuffle from a lane that the mask does not name
      if (lane < 16) x[thread] = __shfl_sync(0xFFFFu, x[thread], 20);
      break;
    case 14:  // a mask without the lane itself
      __syncwarp(1u);
      break;
    case 15:  // waits for a word that nobody writes
      while (load_acquire(reinterpret_cast<const uint32_t*>(x)) == 0) pause();
      break;
    case 16: x[thread] = reinterpret_cast<const float4*>(memory + 4)->x; break;  // UndefinedBehaviorSanitizer's
  }
}

}  // namespace seqkern
