// What the device code of every op is written in: short names for instructions that CUDA C++ has no function for,
// 16-bit numbers, and common arithmetic. Torch-free.
//
// The same sources run without a GPU. tests/simt/simt.h gives CUDA's own names (threadIdx, __syncthreads, __shfl_sync
// ...), and everything under "instructions" below, a meaning on the host. A kernel may therefore use only what this
// file declares and the CUDA names that simt.h lists. Shared memory is dynamic (SK_SHARED).
#pragma once

#include <cstdint>

#include "dtype.h"

#if defined(SK_SIMT)
#include "simt.h"
#else
#include <cuda_runtime.h>
#endif

#define SK_DEVICE __device__ __forceinline__

namespace seqkern {

// ---- numbers -------------------------------------------------------------------------------------------------------

template <class To, class From>
SK_DEVICE To device_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

SK_DEVICE double widen(double x) { return x; }
SK_DEVICE float widen(float x) { return x; }
SK_DEVICE float widen(BFloat16 x) { return device_bits<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest even, as torch does.
template <class T>
struct Narrow;
template <>
struct Narrow<double> {
  static SK_DEVICE double from(double x) { return x; }
};
template <>
struct Narrow<float> {
  static SK_DEVICE float from(float x) { return x; }
};

#if !defined(SK_SIMT)

SK_DEVICE float widen(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
template <>
struct Narrow<BFloat16> {
  static SK_DEVICE BFloat16 from(float x) {
    BFloat16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <>
struct Narrow<Half> {
  static SK_DEVICE Half from(float x) {
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};

// 1 / x, correct to the last place for numbers neither tiny nor huge; 0 for infinity.
SK_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x, correct to the last two places; results below 2^-126 are 0.
SK_DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, hidden from the optimiser: what depends on it is recomputed where it is used, instead of being kept in registers
// across the surrounding loop.
SK_DEVICE int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Two 16-bit numbers in a word, the first in the low half.
template <class T>
SK_DEVICE uint32_t narrow_pair(float first, float second);
template <>
SK_DEVICE uint32_t narrow_pair<BFloat16>(float first, float second) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}
template <>
SK_DEVICE uint32_t narrow_pair<Half>(float first, float second) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}

// ---- instructions --------------------------------------------------------------------------------------------------

// a b, rounded: never contracted into a multiply-add.
SK_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
SK_DEVICE double product(double a, double b) { return __dmul_rn(a, b); }

// The block's dynamic shared memory, aligned to 128 bytes.
#define SK_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

SK_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes from global to shared memory asynchronously, past the registers. This thread sees them after
// cp_async_wait, other threads after a barrier that follows it. Reads only the first `bytes`; the rest becomes 0.
SK_DEVICE void cp_async_16(void* shared, const void* global, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
// Copies 16 bytes, or writes zeros without reading if not `there`. A sixth of cp_async_16's instructions.
SK_DEVICE void cp_async_16_if(void* shared, const void* global, bool there) {
  asm volatile(
      "{\n .reg .pred absent;\n setp.eq.u32 absent, %2, 0;\n"
      " cp.async.cg.shared.global [%0], [%1], 16, absent;\n}" ::"r"(shared_address(shared)),
      "l"(global), "r"(static_cast<uint32_t>(there))
      : "memory");
}
// Closes the group of this thread's copies since the last commit.
SK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups are pending.
template <int N>
SK_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements, rows of 16 bytes. Lane l of the warp gives the address of row l % 8 of
// matrix l / 8. It receives, of each matrix, elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 (transposed: of column l
// / 4).
SK_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
SK_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
}
SK_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
SK_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared_row))
               : "memory");
}

// d (16 x 8) += a (16 x 16) b (16 x 8) by a warp: 16-bit operands, float accumulators. With g = lane / 4, q = lane % 4:
//     a[0]   (g, 2q), (g, 2q + 1)     a[1] the same of row g + 8     a[2], a[3] the same of columns + 8
//     b[0]   (2q, g), (2q + 1, g)     b[1] the same of rows + 8
//     d[0], d[1] are (g, 2q), (g, 2q + 1)     d[2], d[3] the same of row g + 8
template <class T>
SK_DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
SK_DEVICE void mma_16816<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
SK_DEVICE void mma_16816<Half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d (16 x 8) += a (16 x 8) b (8 x 8) of tf32 numbers (`to_tf32`): a[0] is (g, q), a[1] (g + 8, q), a[2] (g, q + 4),
// a[3] (g + 8, q + 4); b[0] is (q, g), b[1] (q + 4, g).
SK_DEVICE void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
SK_DEVICE uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// Words that other blocks write while this kernel runs. A loop that polls one calls `pause` in every iteration.
SK_DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
SK_DEVICE void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
SK_DEVICE uint32_t add_release(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
// 16 bytes that other blocks write or read, in one access. Only each half of 8 bytes is relied on to arrive whole, so
// both halves carry their own tag. (A vector access of four words guarantees only each word.) Relaxed: it does not make
// the writer's earlier stores visible.
SK_DEVICE uint4 load_fresh_16(const void* p) {
  uint64_t low, high;
  asm volatile("{\n .reg .b128 v;\n ld.relaxed.gpu.global.b128 v, [%2];\n mov.b128 {%0, %1}, v;\n}"
               : "=l"(low), "=l"(high)
               : "l"(p)
               : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
SK_DEVICE void store_fresh_16(void* p, uint4 v) {
  asm volatile("{\n .reg .b128 v;\n mov.b128 v, {%1, %2};\n st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(p),
               "l"(v.x | static_cast<uint64_t>(v.y) << 32), "l"(v.z | static_cast<uint64_t>(v.w) << 32)
               : "memory");
}
SK_DEVICE void pause() {}

// Thread block clusters, compute capability 9.0 and later. On older devices a cluster is one block, and these functions
// do nothing or must not be reached.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
SK_DEVICE unsigned cluster_rank() {
  unsigned r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
SK_DEVICE unsigned cluster_size() {
  unsigned r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
// Not `.aligned`: that form requires all lanes of the warp to be converged.
SK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
SK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// The address, in the shared memory of block `rank` of the cluster, that corresponds to `p` here; for ordinary loads
// and stores.
template <class T>
SK_DEVICE T* map_shared(T* p, unsigned rank) {
  uint64_t q;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(q) : "l"(reinterpret_cast<uint64_t>(p)), "r"(rank));
  return reinterpret_cast<T*>(q);
}

// A barrier in shared memory that also counts bytes: a phase ends when all expected arrivals and bytes are in.
SK_DEVICE void mbarrier_init(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes the initialisation visible to the cluster. A cluster barrier (or __syncthreads) must follow.
SK_DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
SK_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and adds `bytes` to what the current phase waits for.
SK_DEVICE void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Arrives at the corresponding barrier of block `rank`. This thread's earlier writes are visible to those who wait
// there.
SK_DEVICE void mbarrier_arrive_remote(uint64_t* barrier, unsigned rank) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
// Whether the phase of that parity (0 first, then 1, 0 ...) has ended. Then the earlier writes of this block's threads,
// and of TMA on its behalf, are visible.
SK_DEVICE bool mbarrier_done(uint64_t* barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
// The same when other blocks of the cluster arrive or store: their writes are visible too. It invalidates the L1 cache
// (CCTL.IVALL), so a loop around it should keep what it reads of global memory in registers or shared memory.
SK_DEVICE bool mbarrier_done_cluster(uint64_t* barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
// Writes 16 bytes into the shared memory of block `rank`, at the address corresponding to `p`, and counts them at the
// corresponding `barrier`. The cluster must have more than one block: PTX does not define the store for a single one.
SK_DEVICE void store_async_16(void* p, uint64_t* barrier, unsigned rank, uint4 v) {
  asm volatile(
      "{\n .reg .b32 to, at;\n mapa.shared::cluster.u32 to, %0, %2;\n mapa.shared::cluster.u32 at, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, [at];\n}" ::"r"(
          shared_address(p)),
      "r"(shared_address(barrier)), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
#else
SK_DEVICE unsigned cluster_rank() { return 0; }
SK_DEVICE unsigned cluster_size() { return 1; }
SK_DEVICE void cluster_arrive() {}
SK_DEVICE void cluster_wait() {}
template <class T>
SK_DEVICE T* map_shared(T* p, unsigned) {
  return p;
}
SK_DEVICE void mbarrier_init(uint64_t*, unsigned) {}
SK_DEVICE void mbarrier_fence_init() {}
SK_DEVICE void mbarrier_arrive(uint64_t*) {}
SK_DEVICE void mbarrier_arrive_expect(uint64_t*, unsigned) {}
SK_DEVICE void mbarrier_arrive_remote(uint64_t*, unsigned) {}
SK_DEVICE bool mbarrier_done(uint64_t*, unsigned) { return true; }
SK_DEVICE bool mbarrier_done_cluster(uint64_t*, unsigned) { return true; }
SK_DEVICE void store_async_16(void*, uint64_t*, unsigned, uint4) {}
#endif

#endif  // !SK_SIMT

template <class T, class A>
SK_DEVICE T narrow(A x) {
  return Narrow<T>::from(x);
}

SK_DEVICE void mbarrier_wait(uint64_t* barrier, unsigned parity) {
  while (!mbarrier_done(barrier, parity)) pause();
}
SK_DEVICE void mbarrier_wait_cluster(uint64_t* barrier, unsigned parity) {
  while (!mbarrier_done_cluster(barrier, parity)) pause();
}

// ---- random numbers ------------------------------------------------------------------------------------------------

// The four words of the counter (column / 4, row low, row high, 0) under the key `seed`: Philox4x32 of 7 rounds, as in
// csrc/common/philox.h. Element (row, column) takes word column % 4 and is kept if that is >= threshold.
SK_DEVICE uint4 philox(uint64_t seed, int64_t row, int64_t column) {
  uint32_t c0 = static_cast<uint32_t>(column / 4), c1 = static_cast<uint32_t>(row);
  uint32_t c2 = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{c0} * 0xD2511F53u, b = uint64_t{c2} * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

}  // namespace seqkern
