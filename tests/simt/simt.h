// CUDA's own names, and the functions of csrc/common/cuda/device.cuh that stand for instructions, on the host: what
// the project's kernels are compiled against when SK_SIMT is defined. simt_core.h tells how the threads are scheduled.
//
// Dynamic shared memory is filled with NaN bytes before a block starts, and so is the target of cp_async_16 and
// store_async_16 until the wait that covers it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtype.h"
#include "simt_core.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

// ---- vectors -------------------------------------------------------------------------------------------------------

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

#define threadIdx (::simt::running->thread)
#define blockIdx (::simt::running->block->index)
#define blockDim (::simt::machine.threads)
#define gridDim (::simt::machine.grid)

namespace simt {

template <class To, class From>
To bits_to(From from) {
  To to{};
  memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}

// simt_mma.cpp
enum class MmaKind { bf16, f16, tf32 };
struct Mma {
  float* d;
  const uint32_t *a, *b;
};
struct Ldmatrix {
  uint32_t* r;
  const void* row;
};
struct Shuffle {
  uint64_t value, result;
  int source;
};
void warp_mma(MmaKind kind, float* d, const uint32_t* a, const uint32_t* b, const Place& at);
void warp_ldmatrix(int matrices, bool transposed, uint32_t* r, const void* row, const Place& at);
uint64_t warp_shuffle(const char* name, unsigned mask, uint64_t value, int source, const Place& at);
unsigned warp_ballot(const char* name, unsigned mask, bool vote, const Place& at);

// simt_memory.cpp
void cp_async(void* shared, const void* global, int bytes);
void cp_async_commit_group();
void cp_async_wait_group(unsigned open);
unsigned rank_in_cluster();
unsigned blocks_in_cluster();
void cluster_barrier_arrive();
void cluster_barrier_wait(const Place& at);
void* mapa(const void* p, unsigned rank);
void mbarrier_init(uint64_t* word, unsigned arrivals);
void mbarrier_arrive(uint64_t* word, unsigned bytes);
void mbarrier_arrive_remote(uint64_t* word, unsigned rank);
bool mbarrier_done(uint64_t* word, unsigned parity, bool cluster_scope, const Place& at);
void st_async(void* p, uint64_t* word, unsigned rank, const uint32_t (&v)[4]);

template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, const Place& at) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  return bits_to<T>(warp_shuffle(name, mask, bits_to<uint64_t>(value), source, at));
}
// The lane that `lane` reads: its own where `other` lies outside its group of `width` lanes.
inline int shuffle_source(int other, int width) {
  const int lane = static_cast<int>(running->lane);
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("shuffle: a width of %d", width);
  return other >= lane / width * width && other < (lane / width + 1) * width ? other : lane;
}
template <class T>
void check_aligned(const char* what, const T* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail("%s: the address is not a multiple of %zu bytes", what, bytes);
}

}  // namespace simt

// ---- barriers, votes, shuffles -------------------------------------------------------------------------------------

inline void __syncthreads(simt::Place at = simt::Place()) { simt::block_barrier("__syncthreads", 0, at); }
inline int __syncthreads_count(int predicate, simt::Place at = simt::Place()) {
  return simt::block_barrier("__syncthreads_count", predicate != 0, at);
}
inline int __syncthreads_or(int predicate, simt::Place at = simt::Place()) {
  return simt::block_barrier("__syncthreads_or", predicate != 0, at) != 0;
}
inline int __syncthreads_and(int predicate, simt::Place at = simt::Place()) {
  return simt::block_barrier("__syncthreads_and", predicate == 0, at) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, simt::Place at = simt::Place()) {
  simt::collective("__syncwarp", mask, nullptr, nullptr, at);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Place at = simt::Place()) {
  return simt::warp_ballot("__ballot_sync", mask, predicate != 0, at);
}
inline int __any_sync(unsigned mask, int predicate, simt::Place at = simt::Place()) {
  return simt::warp_ballot("__any_sync", mask, predicate != 0, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Place at = simt::Place()) {
  return simt::warp_ballot("__all_sync", mask, predicate == 0, at) == 0;
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, simt::Place at = simt::Place()) {
  const int lane = static_cast<int>(simt::running->lane);
  return simt::shuffle("__shfl_sync", mask, v,
                       simt::shuffle_source(lane / width * width + (source & (width - 1)), width), at);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, simt::Place at = simt::Place()) {
  // Of a lane of a later group the lane's own value comes, of an earlier one the other's: as the hardware does.
  const int lane = static_cast<int>(simt::running->lane), other = lane ^ lanes;
  return simt::shuffle("__shfl_xor_sync", mask, v, other < (lane / width + 1) * width ? other : lane, at);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned lanes, int width = 32, simt::Place at = simt::Place()) {
  const int lane = static_cast<int>(simt::running->lane);
  return simt::shuffle("__shfl_down_sync", mask, v, simt::shuffle_source(lane + static_cast<int>(lanes), width), at);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned lanes, int width = 32, simt::Place at = simt::Place()) {
  const int lane = static_cast<int>(simt::running->lane);
  return simt::shuffle("__shfl_up_sync", mask, v, simt::shuffle_source(lane - static_cast<int>(lanes), width), at);
}

// ---- memory --------------------------------------------------------------------------------------------------------

// What may be read and written at the same time is no race.
#define SIMT_NO_TSAN __attribute__((no_sanitize_thread))

namespace simt {
// Reads, writes what `f` makes of it, returns what was there: in one piece. Relaxed, unless it acquires.
template <bool kAcquires = false, class T, class F>
SIMT_NO_TSAN T atomic(T* p, F f, const Place& at = Place()) {
  maybe_yield();
  if (kAcquires) {
    race_load_acquire(p);
  } else {
    race_load_relaxed(p);
  }
  race_store_relaxed(p, true);
  const T old = *p;
  const T next = f(old);
  if (memcmp(&old, &next, sizeof(T)) != 0) {
    progress();
    *p = next;
    maybe_yield();
  } else {
    poll("an atomic operation", at);
  }
  return old;
}
}  // namespace simt

// Integers wrap around.
template <class T>
inline T atomicAdd(T* p, std::common_type_t<T> v) {
  return simt::atomic(p, [v](T old) -> T {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(old) + static_cast<U>(v));
    } else {
      return old + v;
    }
  });
}
inline void __threadfence() {
  simt::race_threadfence();
  simt::maybe_yield();
}
template <class T>
inline T __ldg(const T* p) {
  simt::check_aligned("__ldg", p, alignof(T));
  return *p;
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

#define SIMT_MIN_MAX(T)                            \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
// The number, where the other is NaN.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

#define SK_SHARED(name) unsigned char* const name = ::simt::running->block->shared

namespace seqkern {

// ---- numbers -------------------------------------------------------------------------------------------------------

inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31,
                 fraction = x.bits & 1023;
  if (exponent == 0) {
    const float small = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -small : small;
  }
  return simt::bits_to<float>(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

template <class T>
struct Narrow;
template <>
struct Narrow<BFloat16> {
  static BFloat16 from(float x) {
    const uint32_t bits = simt::bits_to<uint32_t>(x);
    if (x != x) return {0x7FFF};
    return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
  }
};
template <>
struct Narrow<Half> {
  static Half from(float x) {
    const uint32_t bits = simt::bits_to<uint32_t>(x), size = bits & 0x7FFFFFFF;
    const uint32_t sign = bits >> 16 & 0x8000;
    uint32_t half;
    if (size > 0x7F800000) return {0x7FFF};
    if (size >= 0x477FF000) {  // 65520 and more
      half = 0x7C00;
    } else if (size < 0x38800000) {  // below 2^-14: multiples of 2^-24, rounded by the addition
      half = simt::bits_to<uint32_t>(simt::bits_to<float>(size) + 0.5f) - 0x3F000000;
    } else {
      half = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    }
    return {static_cast<uint16_t>(sign | half)};
  }
};

inline float reciprocal(float x) { return 1.0f / x; }
inline int unknown(int x) { return x; }
template <class T>
inline uint32_t narrow_pair(float first, float second) {
  return Narrow<T>::from(first).bits | static_cast<uint32_t>(Narrow<T>::from(second).bits) << 16;
}
inline float power_of_two(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}

// ---- instructions --------------------------------------------------------------------------------------------------

// Stored in between: the compiler cannot make a multiply-add of it.
template <class A>
A product(A a, A b) {
  volatile A rounded = a * b;
  return rounded;
}
inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(simt::offset(*simt::running->block, p)); }
inline void cp_async_16(void* shared, const void* global, int bytes = 16) { simt::cp_async(shared, global, bytes); }
inline void cp_async_16_if(void* shared, const void* global, bool there) {
  simt::cp_async(shared, global, there ? 16 : 0);
}
inline void cp_async_commit() { simt::cp_async_commit_group(); }
template <int N>
inline void cp_async_wait() {
  simt::cp_async_wait_group(N);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, simt::Place at = simt::Place()) {
  simt::warp_ldmatrix(4, false, r, row, at);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row, simt::Place at = simt::Place()) {
  simt::warp_ldmatrix(2, false, r, row, at);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, simt::Place at = simt::Place()) {
  simt::warp_ldmatrix(4, true, r, row, at);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, simt::Place at = simt::Place()) {
  simt::warp_ldmatrix(2, true, r, row, at);
}
template <class T>
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], simt::Place at = simt::Place()) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>, "16-bit operands");
  simt::warp_mma(std::is_same_v<T, Half> ? simt::MmaKind::f16 : simt::MmaKind::bf16, d, a, b, at);
}
inline void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                          simt::Place at = simt::Place()) {
  simt::warp_mma(simt::MmaKind::tf32, d, a, b, at);
}
// To nearest, ties away from zero.
inline uint32_t to_tf32(float x) {
  const uint32_t bits = simt::bits_to<uint32_t>(x);
  return (bits & 0x7F800000) == 0x7F800000 ? bits : (bits + 0x1000) & 0xFFFFE000;
}

SIMT_NO_TSAN inline uint32_t load_acquire(const uint32_t* p, simt::Place at = simt::Place()) {
  simt::check_aligned("load_acquire", p, 4);
  simt::poll("load_acquire", at);
  simt::race_load_acquire(p);
  return *p;
}
SIMT_NO_TSAN inline void store_release(uint32_t* p, uint32_t v) {
  simt::check_aligned("store_release", p, 4);
  simt::maybe_yield();
  simt::progress();
  simt::race_store_release(p, false);
  *p = v;
  simt::maybe_yield();
}
inline uint32_t add_release(uint32_t* p, uint32_t v) {
  simt::race_store_release(p, true);
  return simt::atomic<true>(p, [v](uint32_t old) { return old + v; });
}
SIMT_NO_TSAN inline uint4 load_fresh_16(const void* p, simt::Place at = simt::Place()) {
  simt::check_aligned("load_fresh_16", static_cast<const char*>(p), 16);
  simt::poll("load_fresh_16", at);
  simt::race_load_relaxed(p);
  const auto* halves = static_cast<const uint2*>(p);
  const uint2 low = halves[0];
  simt::maybe_yield();  // between the halves
  const uint2 high = halves[1];
  return {low.x, low.y, high.x, high.y};
}
SIMT_NO_TSAN inline void store_fresh_16(void* p, uint4 v) {
  simt::check_aligned("store_fresh_16", static_cast<char*>(p), 16);
  simt::maybe_yield();
  simt::progress();
  simt::race_store_relaxed(p, false);
  auto* halves = static_cast<uint2*>(p);
  halves[0] = {v.x, v.y};
  simt::maybe_yield();
  halves[1] = {v.z, v.w};
  simt::progress();
  simt::maybe_yield();
}
inline void pause(simt::Place at = simt::Place()) { simt::poll(nullptr, at); }

inline unsigned cluster_rank() { return simt::rank_in_cluster(); }
inline unsigned cluster_size() { return simt::blocks_in_cluster(); }
inline void cluster_arrive() { simt::cluster_barrier_arrive(); }
inline void cluster_wait(simt::Place at = simt::Place()) { simt::cluster_barrier_wait(at); }
template <class T>
inline T* map_shared(T* p, unsigned rank) {
  return static_cast<T*>(simt::mapa(p, rank));
}
inline void mbarrier_init(uint64_t* barrier, unsigned arrivals) { simt::mbarrier_init(barrier, arrivals); }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(uint64_t* barrier) { simt::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes) { simt::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_arrive_remote(uint64_t* barrier, unsigned rank) { simt::mbarrier_arrive_remote(barrier, rank); }
inline bool mbarrier_done(uint64_t* barrier, unsigned parity, simt::Place at = simt::Place()) {
  return simt::mbarrier_done(barrier, parity, false, at);
}
inline bool mbarrier_done_cluster(uint64_t* barrier, unsigned parity, simt::Place at = simt::Place()) {
  return simt::mbarrier_done(barrier, parity, true, at);
}
inline void store_async_16(void* p, uint64_t* barrier, unsigned rank, uint4 v) {
  simt::st_async(p, barrier, rank, {v.x, v.y, v.z, v.w});
}

}  // namespace seqkern
