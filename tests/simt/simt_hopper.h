// The functions of csrc/common/cuda/hopper/device.cuh on the host: instructions that go on behind the thread's back.
//
// A product (wgmma) reads its operands in shared memory at a moment that the schedule draws, between the call of the
// warpgroup's last thread and the first wgmma_wait that covers it; until a thread's own wait its sums hold a NaN of
// their own kind, and somebody who writes them is found out. A TMA load fills its tile with NaN and completes when the
// schedule says so, a TMA store or addition reads shared memory at any moment before bulk_wait_read and writes before
// bulk_wait. Some schedules do all of this at once, some as late as it may be.
//
// What is checked on the way: descriptors (swizzle, alignment, bounds), that all 128 threads of a warpgroup call the
// same products with the same descriptors, wgmma_fence after a wait, alignments and bounds of TMA, named barriers
// (counts that agree, nobody twice in a round), registers handed from warpgroup to warpgroup (simt_hopper.cpp,
// simt_tma.cpp, simt_wgmma.cpp). In the build that looks for races, products and bulk copies are actors with clocks of
// their own, and an ordinary store that one of them reads without fence_async_shared by who wrote is reported too.
//
// Not seen: a register of an operand A changed between wgmma and wait (its value at the call is taken), registers
// touched between wgmma_fence and wgmma, a ptxas that serialises, warps that are not converged at an instruction that
// wants them so, a missing fence_async_global, and in the build without races a missing fence_async_shared.
#pragma once

#include "simt.h"

namespace seqkern {

// What tensor_map writes down.
struct alignas(128) TensorMap {
  const unsigned char* data;
  int64_t sizes[4], strides[4];  // in elements
  int box[4];
  uint64_t magic;  // kKnownMap, or the map is none
};

}  // namespace seqkern

namespace simt {

constexpr uint64_t kMapMagic = 0x7E4504A950C0FFEEu;

void tma_load(void* shared, const seqkern::TensorMap& map, uint64_t* barrier, const int (&at)[4]);
void tma_store(const seqkern::TensorMap& map, const void* shared, const int (&at)[4]);
void bulk_reduce_add(float* global, const void* shared, int bytes);
void bulk_commit_group();
void bulk_wait_group(unsigned open, bool written);
void proxy_fence(bool shared);
void named_barrier(int id, int threads, bool waits, const Place& at);
void set_registers(int count, bool up);
bool elect(const Place& at);

struct WgmmaCall {
  bool half, transpose_a, transpose_b, registers, accumulate;
  int n;
  uint64_t a, b;  // descriptors
  bool operator==(const WgmmaCall& o) const {
    return half == o.half && transpose_a == o.transpose_a && transpose_b == o.transpose_b && registers == o.registers &&
           accumulate == o.accumulate && n == o.n && a == o.a && b == o.b;
  }
};
void wgmma_fence();
void wgmma_issue(const WgmmaCall& call, float* d, const uint32_t* a, const Place& at);
void wgmma_commit();
void wgmma_wait(unsigned open, const Place& at);

}  // namespace simt

#define SK_SHARED_TILES(name) SK_SHARED(name)
#define SIMT_INLINE inline __attribute__((always_inline))

namespace seqkern {

SIMT_INLINE void tma_load_4d(void* shared, const TensorMap& map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
  simt::tma_load(shared, map, barrier, {c0, c1, c2, c3});
}
SIMT_INLINE void tma_store_4d(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3) {
  simt::tma_store(map, shared, {c0, c1, c2, c3});
}
SIMT_INLINE void bulk_reduce_add_f32(float* global, const void* shared, int bytes) {
  simt::bulk_reduce_add(global, shared, bytes);
}
inline void bulk_commit() { simt::bulk_commit_group(); }
template <int N>
inline void bulk_wait_read() {
  simt::bulk_wait_group(N, false);
}
template <int N>
inline void bulk_wait() {
  simt::bulk_wait_group(N, true);
}
inline void fence_async_shared() { simt::proxy_fence(true); }
inline void fence_async_global() { simt::proxy_fence(false); }
inline void prefetch_map(const TensorMap& map) {
  if (map.magic != simt::kMapMagic) simt::fail("prefetch_map: there is no tensor map");
}

inline void named_barrier_sync(int id, int threads, simt::Place at = simt::Place()) {
  simt::named_barrier(id, threads, true, at);
}
inline void named_barrier_arrive(int id, int threads, simt::Place at = simt::Place()) {
  simt::named_barrier(id, threads, false, at);
}
template <int N>
inline void set_registers_up() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers");
  simt::set_registers(N, true);
}
template <int N>
inline void set_registers_down() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers");
  simt::set_registers(N, false);
}
inline bool elect_one(simt::Place at = simt::Place()) { return simt::elect(at); }

inline void wgmma_fence() { simt::wgmma_fence(); }
inline void wgmma_commit() { simt::wgmma_commit(); }
template <int N>
inline void wgmma_wait(simt::Place at = simt::Place()) {
  static_assert(N >= 0 && N <= 7, "open groups");
  simt::wgmma_wait(N, at);
}
template <class R, int kCount>
inline void wgmma_pin(R (&)[kCount]) {
  static_assert(sizeof(R) == 4, "registers");
}
template <class T, int N, int kTransposeA, int kTransposeB>
SIMT_INLINE void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, simt::Place at = simt::Place()) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>, "16-bit operands");
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "columns");
  simt::wgmma_issue({std::is_same_v<T, Half>, kTransposeA != 0, kTransposeB != 0, false, accumulate, N, a, b}, d,
                    nullptr, at);
}
template <class T, int N, int kTransposeB>
SIMT_INLINE void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                          simt::Place at = simt::Place()) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>, "16-bit operands");
  static_assert(N % 16 == 0 && N >= 16 && N <= 256, "columns");
  simt::wgmma_issue({std::is_same_v<T, Half>, false, kTransposeB != 0, true, accumulate, N, 0, b}, d, a, at);
}

}  // namespace seqkern
