// How the threads of the norms share a row: vectors of 16 bytes, the team that holds them, and sums over the team.
//
// A vector is 16 bytes of a row (8 elements of 16 bits, 4 floats; for doubles 4 elements, 32 bytes). It always consists
// of whole groups of the 4 columns that share a random counter. Thread t of a team of n threads owns vectors t, t + n,
// t + 2 n ...: neighbouring threads read neighbouring vectors. A team is a warp or several warps (several teams a
// block), a block, or a cluster of blocks.
//
// The shape alone decides the order of every sum: in a thread by pairs within a vector, then vector by vector; over a
// warp by a butterfly (each lane adds the same two numbers, so all lanes hold the same bits); over the warps of a block
// and the blocks of a cluster by another butterfly of their totals. The totals alternate between two buffers, so a sum
// costs one barrier: whoever writes a buffer again has passed the barrier of the sum between.
#pragma once

#include "common/cuda/device.cuh"

namespace seqkern {
namespace norm_cuda {

template <class T>
constexpr int kElements = sizeof(T) == 2 ? 8 : 4;  // of a vector
template <class T, int U>
constexpr int kRowBytes = U * kElements<T> * sizeof(acc_t<T>);  // held by a thread of U vectors, widened
constexpr int kMostWarps = 16;                                  // of a block
constexpr int kMostSums = 3;                                    // at a time
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Bytes of shared memory for a team's totals.
template <class A>
constexpr int kTeamBytes = (2 * kMostSums * (kMostWarps + 1) * sizeof(A) + 127) / 128 * 128;

// A kernel's view of dropout. The seed is in device memory.
struct NormDropout {
  const int64_t* seed;  // null: no dropout
  uint32_t threshold;
  double scale;
};

// ---- vectors
// ---------------------------------------------------------------------------------------------------------

template <class T>
struct Vector {
  static constexpr int kParts = sizeof(T) * kElements<T> / 16;
  uint4 part[kParts];
};

template <class T>
SK_DEVICE Vector<T> load_vector(const T* p, bool inside) {
  Vector<T> vector;
#pragma unroll
  for (int i = 0; i < Vector<T>::kParts; ++i) vector.part[i] = inside ? reinterpret_cast<const uint4*>(p)[i] : uint4{};
  return vector;
}

template <class T, class A>
SK_DEVICE void widen_vector(const Vector<T>& vector, A (&v)[kElements<T>]) {
  T elements[kElements<T>];
  __builtin_memcpy(elements, vector.part, sizeof(elements));
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) v[i] = widen(elements[i]);
}

template <class T, class A>
SK_DEVICE Vector<T> narrow_vector(const A (&v)[kElements<T>]) {
  T elements[kElements<T>];
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) elements[i] = narrow<T>(v[i]);
  Vector<T> vector;
  __builtin_memcpy(vector.part, elements, sizeof(elements));
  return vector;
}

template <class T>
SK_DEVICE void store_vector(T* p, const Vector<T>& vector) {
#pragma unroll
  for (int i = 0; i < Vector<T>::kParts; ++i) reinterpret_cast<uint4*>(p)[i] = vector.part[i];
}

// The first `count` elements (at most a vector), zeros after them: 16 bytes at a time if `aligned`, else one by one.
template <class T, class A>
SK_DEVICE void load_upto(const T* p, int count, bool aligned, A (&v)[kElements<T>]) {
  if (aligned) {
    widen_vector<T>(load_vector(p, true), v);
  } else {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) v[i] = i < count ? widen(p[i]) : A(0);
  }
}

template <class T, class A>
SK_DEVICE void store_upto(T* p, int count, bool aligned, const A (&v)[kElements<T>]) {
  if (aligned) {
    store_vector(p, narrow_vector<T>(v));
  } else {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i)
      if (i < count) p[i] = narrow<T>(v[i]);
  }
}

// A vector of accumulators, contiguous.
template <class A, int E>
SK_DEVICE void store_sums(A* p, int count, bool aligned, const A (&v)[E]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < E * static_cast<int>(sizeof(A)) / 16; ++i) {
      uint4 part;
      __builtin_memcpy(&part, reinterpret_cast<const char*>(v) + 16 * i, 16);
      reinterpret_cast<uint4*>(p)[i] = part;
    }
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i)
      if (i < count) p[i] = v[i];
  }
}

// A parameter of the input's dtype or, if `wide`, of the accumulation type.
template <class T, class A>
SK_DEVICE void load_parameter(const void* parameter, bool wide, int64_t column, int count, bool aligned,
                              A (&v)[kElements<T>]) {
  if (sizeof(T) == sizeof(A) || !wide) {
    load_upto(static_cast<const T*>(parameter) + column, count, aligned, v);
    return;
  }
  const A* p = static_cast<const A*>(parameter) + column;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kElements<T> * static_cast<int>(sizeof(A)) / 16; ++i) {
      const uint4 part = reinterpret_cast<const uint4*>(p)[i];
      __builtin_memcpy(reinterpret_cast<char*>(v) + 16 * i, &part, 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) v[i] = i < count ? p[i] : A(0);
  }
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

template <class A, int E>
SK_DEVICE A sum_of(const A (&v)[E]) {
  A sum = (v[0] + v[1]) + (v[2] + v[3]);
  if constexpr (E == 8) sum += (v[4] + v[5]) + (v[6] + v[7]);
  return sum;
}

SK_DEVICE float root(float x) { return sqrtf(x); }
SK_DEVICE double root(double x) { return sqrt(x); }

// Which of the E columns from `column` on are kept, a bit each.
template <int E>
SK_DEVICE unsigned kept(const NormDropout& dropout, uint64_t seed, int64_t row, int64_t column) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < E; i += 4) {
    const uint4 words = philox(seed, row, column + i);
    bits |= (words.x >= dropout.threshold ? 1u << i : 0u) | (words.y >= dropout.threshold ? 2u << i : 0u) |
            (words.z >= dropout.threshold ? 4u << i : 0u) | (words.w >= dropout.threshold ? 8u << i : 0u);
  }
  return bits;
}

// The same for U vectors, E bits each. Not unrolled: it runs while the row's loads are in flight, in few registers.
template <int E, int U>
SK_DEVICE unsigned kept_vectors(const NormDropout& dropout, uint64_t seed, int64_t row, int first, int step) {
  static_assert(E * U <= 32, "a bit a column");
  unsigned bits = 0;
  if (dropout.seed == nullptr) return bits;
#pragma unroll 1
  for (int u = 0; u < U; ++u) bits |= kept<E>(dropout, seed, row, first + u * step) << (u * E);
  return bits;
}

// ---- teams ---------------------------------------------------------------------------------------------------------

template <class A>
class Team {
 public:
  // `team_warps` warps of a block form a team; in a cluster of several `blocks`, all of it is one team.
  SK_DEVICE Team(unsigned char* memory, int team_warps, int blocks)
      : totals_(reinterpret_cast<A*>(memory)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32),
        warps_(team_warps),
        blocks_(blocks),
        turn_(0) {
    const int rank = blocks > 1 ? static_cast<int>(cluster_rank()) : 0;
    within = warp_ / team_warps;
    per_block = static_cast<int>(blockDim.x) / (32 * team_warps);
    thread = (rank - within) * 32 * team_warps + static_cast<int>(threadIdx.x);
    threads = blocks * 32 * team_warps;
    block = blockIdx.x / blocks;
    block_count = gridDim.x / blocks;
  }

  int thread, threads;         // of this team
  int per_block, within;       // teams of this block, and the index of this one
  int64_t block, block_count;  // index of this block, and their number; a cluster counts as one

  // Replaces each number by its sum over the team. All threads of the team call it; if a team is more than a warp, all
  // threads of the block.
  template <int K>
  SK_DEVICE void sum(A (&v)[K]) {
    static_assert(K <= kMostSums, "room for the totals");
    add_lanes(v);
    if (warps_ > 1) {
      A* mine = totals_ + turn_ * kMostSums * kMostWarps;
      if (lane_ == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) mine[k * kMostWarps + warp_] = v[k];
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < K; ++k) v[k] = lane_ < warps_ ? mine[k * kMostWarps + within * warps_ + lane_] : A(0);
      add_lanes(v);
    }
    if (blocks_ > 1) {
      A* mine = totals_ + 2 * kMostSums * kMostWarps + turn_ * kMostSums;
      if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) mine[k] = v[k];
      }
      cluster_arrive();
      cluster_wait();
      const A* theirs = map_shared(mine, lane_ < blocks_ ? lane_ : 0);
#pragma unroll
      for (int k = 0; k < K; ++k) v[k] = lane_ < blocks_ ? theirs[k] : A(0);
      add_lanes(v);
    }
    turn_ ^= 1;
  }

  // Call before the end: no block leaves while another may still read its totals.
  SK_DEVICE void leave() {
    if (blocks_ > 1) {
      cluster_arrive();
      cluster_wait();
    }
  }

 private:
  template <int K>
  SK_DEVICE void add_lanes(A (&v)[K]) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) v[k] += __shfl_xor_sync(kAllLanes, v[k], distance);
    }
  }

  A* totals_;
  int lane_, warp_, warps_, blocks_, turn_;
};

}  // namespace norm_cuda
}  // namespace seqkern
