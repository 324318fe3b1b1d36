// Instructions that only compute capability 9.0 has: products by a warpgroup (wgmma), box copies by the tensor memory
// accelerator (TMA), named barriers, and moving registers between warpgroups.
//
// They exist in code for exactly sm_90a and in the host executor (tests/simt). Elsewhere SK_HOPPER is 0 and the
// functions do nothing: a kernel keeps its body between #if SK_HOPPER and #endif and is not launched there.
//
// Tiles in shared memory have rows of 64 16-bit elements (128 bytes), chunk c of row r at position c ^ (r % 8), and
// start at multiples of 1024 bytes. That is what TMA writes with the 128-byte swizzle, what wgmma reads, and Tile<T,
// 64> of attention/cuda/mma.cuh. A matrix with more columns is several such tiles side by side.
//
// A product has these steps, which all 128 threads of a warpgroup execute together:
// 1. Write the operands. By TMA: whoever waits on its mbarrier sees them. By ordinary stores: every writer calls
//    fence_async_shared, then a barrier.
// 2. wgmma_fence.
// 3. wgmma_ss or wgmma_rs, once for every 16 of the summed index.
// 4. wgmma_commit.
// 5. wgmma_wait. Between the first wgmma and this wait nobody may touch the accumulators or an operand's registers, and
//    nobody may write the tiles.
#pragma once

#include "common/cuda/device.cuh"

#if defined(SK_SIMT) || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SK_HOPPER 1
#else
#define SK_HOPPER 0
#endif

#if defined(SK_SIMT)
#include "simt_hopper.h"
#endif

namespace seqkern {

#if !defined(SK_SIMT)

// A tensor of four dimensions with its address and box. tensor_map (launch.h) makes it; a kernel takes it as
// `const __grid_constant__ TensorMap`.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

// The block's dynamic shared memory, aligned for swizzled tiles.
#define SK_SHARED_TILES(name) extern __shared__ __align__(1024) unsigned char name[]

#if SK_HOPPER
#define SK_PTX(...) asm volatile(__VA_ARGS__)
#else
#define SK_PTX(...)
#endif

// ---- TMA -----------------------------------------------------------------------------------------------------------

SK_DEVICE uint64_t global_address(const void* p) { return static_cast<uint64_t>(__cvta_generic_to_global(p)); }

// Each of these is called by one thread.

// Loads the box that starts at (c0, c1, c2, c3), c0 along a row, into a tile. Elements outside the tensor become 0. All
// bytes of the box, zeros included, count at `barrier`, where a thread must expect them.
SK_DEVICE void tma_load_4d(void* shared, const TensorMap& map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
  SK_PTX(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
// Stores a tile as a box; elements outside the tensor are not written. After ordinary stores to the tile, each writer
// calls fence_async_shared, then a barrier.
SK_DEVICE void tma_store_4d(const TensorMap& map, const void* shared, int c0, int c1, int c2, int c3) {
  SK_PTX("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
         "r"(shared_address(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
// global[i] += shared[i] for `bytes` of float32: a multiple of 16, both addresses multiples of 16. Each addition is
// atomic; the order is not fixed where several blocks add to the same number.
SK_DEVICE void bulk_reduce_add_f32(float* global, const void* shared, int bytes) {
  SK_PTX("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global_address(global)),
         "r"(shared_address(shared)), "r"(bytes) : "memory");
}
// Closes the group of this thread's bulk stores and additions since the last commit.
SK_DEVICE void bulk_commit() { SK_PTX("cp.async.bulk.commit_group;" :: : "memory"); }
// bulk_wait_read waits until at most N of this thread's groups still read shared memory; bulk_wait, until at most N are
// not yet written.
template <int N>
SK_DEVICE void bulk_wait_read() {
  SK_PTX("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
SK_DEVICE void bulk_wait() {
  SK_PTX("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Makes this thread's ordinary stores to shared memory visible to later wgmma and TMA instructions (after a barrier,
// also to those of other threads).
SK_DEVICE void fence_async_shared() { SK_PTX("fence.proxy.async.shared::cta;" :: : "memory"); }
// The same for global memory: orders ordinary loads and stores against bulk additions before and after.
SK_DEVICE void fence_async_global() { SK_PTX("fence.proxy.async.global;" :: : "memory"); }
// Prefetches the map itself.
SK_DEVICE void prefetch_map(const TensorMap& map) { SK_PTX("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// ---- warps ---------------------------------------------------------------------------------------------------------

// Barriers 1 ... 15 of the block (__syncthreads uses 0). `threads` counts those that wait and those that only arrive:
// whole warps.
SK_DEVICE void named_barrier_sync(int id, int threads) {
  SK_PTX("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
SK_DEVICE void named_barrier_arrive(int id, int threads) {
  SK_PTX("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Sets the registers of each thread from here on, a multiple of 8 in 24 ... 256; all threads of a warpgroup call it.
// Down returns registers; up waits until enough are free. The kernel needs __launch_bounds__.
template <int N>
SK_DEVICE void set_registers_up() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers");
  SK_PTX("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
SK_DEVICE void set_registers_down() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "registers");
  SK_PTX("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// True in one lane of the warp, always the same one. All lanes must call it.
SK_DEVICE bool elect_one() {
  uint32_t elected = 0;
  SK_PTX("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected)::"memory");
  return elected != 0;
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

// Call before the first wgmma, and again after ordinary code has touched the accumulators or an operand's registers.
SK_DEVICE void wgmma_fence() { SK_PTX("wgmma.fence.sync.aligned;" :: : "memory"); }
// Closes the group of products since the last commit.
SK_DEVICE void wgmma_commit() { SK_PTX("wgmma.commit_group.sync.aligned;" :: : "memory"); }
// Waits until at most N groups are pending.
template <int N>
SK_DEVICE void wgmma_wait() {
  SK_PTX("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of the registers across this line: after the wait that makes them valid, and
// before the fence that hands them over.
template <int kCount>
SK_DEVICE void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) SK_PTX("" : "+f"(d[i])::"memory");
}
template <int kCount>
SK_DEVICE void wgmma_pin(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) SK_PTX("" : "+r"(a[i])::"memory");
}

// A product's registers, as the assembler names them and as the compiler does; each line adds eight.
#define SK_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SK_NAMES_16 SK_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SK_NAMES_24 SK_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SK_NAMES_32 SK_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SK_NAMES_40 SK_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SK_NAMES_48 SK_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SK_NAMES_56 SK_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SK_NAMES_64 SK_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SK_NAMES_72 SK_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SK_NAMES_80 SK_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define SK_NAMES_88 SK_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SK_NAMES_96 SK_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SK_NAMES_104 SK_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define SK_NAMES_112 SK_NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define SK_NAMES_120 SK_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SK_NAMES_128 SK_NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SK_SUMS(i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SK_SUMS_8 SK_SUMS(0)
#define SK_SUMS_16 SK_SUMS_8, SK_SUMS(8)
#define SK_SUMS_24 SK_SUMS_16, SK_SUMS(16)
#define SK_SUMS_32 SK_SUMS_24, SK_SUMS(24)
#define SK_SUMS_40 SK_SUMS_32, SK_SUMS(32)
#define SK_SUMS_48 SK_SUMS_40, SK_SUMS(40)
#define SK_SUMS_56 SK_SUMS_48, SK_SUMS(48)
#define SK_SUMS_64 SK_SUMS_56, SK_SUMS(56)
#define SK_SUMS_72 SK_SUMS_64, SK_SUMS(64)
#define SK_SUMS_80 SK_SUMS_72, SK_SUMS(72)
#define SK_SUMS_88 SK_SUMS_80, SK_SUMS(80)
#define SK_SUMS_96 SK_SUMS_88, SK_SUMS(88)
#define SK_SUMS_104 SK_SUMS_96, SK_SUMS(96)
#define SK_SUMS_112 SK_SUMS_104, SK_SUMS(104)
#define SK_SUMS_120 SK_SUMS_112, SK_SUMS(112)
#define SK_SUMS_128 SK_SUMS_120, SK_SUMS(120)

template <class T, int N>
struct Wgmma;

// r0 ... r6 number the operands that follow the accumulators %0 ... %(N / 2 - 1).
#if SK_HOPPER
#define SK_WGMMA_OF(T, type, N, regs, r0, r1, r2, r3, r4, r5, r6)                                                     \
  template <>                                                                                                         \
  struct Wgmma<T, N> {                                                                                                \
    template <int kTransposeA, int kTransposeB>                                                                       \
    static SK_DEVICE void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                             \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #r2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N           \
                   "k16.f32." type "." type " {" SK_NAMES_##regs "}, %" #r0 ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4    \
                                                                 ";\n}"                                               \
                   : SK_SUMS_##regs                                                                                   \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));                            \
    }                                                                                                                 \
    template <int kTransposeB>                                                                                        \
    static SK_DEVICE void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {                 \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #r5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N           \
                   "k16.f32." type "." type " {" SK_NAMES_##regs "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 \
                                                                 ", p, 1, 1, %" #r6 ";\n}"                            \
                   : SK_SUMS_##regs                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));          \
    }                                                                                                                 \
  };
#else
#define SK_WGMMA_OF(T, type, N, ...)                                                    \
  template <>                                                                           \
  struct Wgmma<T, N> {                                                                  \
    template <int, int>                                                                 \
    static SK_DEVICE void ss(float (&)[N / 2], uint64_t, uint64_t, int) {}              \
    template <int>                                                                      \
    static SK_DEVICE void rs(float (&)[N / 2], const uint32_t (&)[4], uint64_t, int) {} \
  };
#endif
#define SK_WGMMA(...) SK_WGMMA_OF(BFloat16, "bf16", __VA_ARGS__) SK_WGMMA_OF(Half, "f16", __VA_ARGS__)
SK_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
SK_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
SK_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
SK_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
SK_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
SK_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
SK_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
SK_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
SK_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
SK_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
SK_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
SK_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
SK_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
SK_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
SK_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
SK_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef SK_WGMMA
#undef SK_WGMMA_OF

// d (64 x N) += a (64 x 16) b (16 x N), or = a b without `accumulate`: 16-bit operands, float accumulators. Warp w of
// the warpgroup has rows 16 w ... 16 w + 15. With g = lane / 4, q = lane % 4: d[4 j], d[4 j + 1] are (g, 8 j + 2q), (g,
// 8 j + 2q + 1); d[4 j + 2], d[4 j + 3] are the same of row g + 8. An `a` in registers is mma_16816's operand of the
// warp's 16 rows. The tile of b has N rows of the summed index (k_major) or, transposed, rows of N columns (mn_major);
// likewise a, with 64 rows.
template <class T, int N, int kTransposeA, int kTransposeB>
SK_DEVICE void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  Wgmma<T, N>::template ss<kTransposeA, kTransposeB>(d, a, b, accumulate);
}
template <class T, int N, int kTransposeB>
SK_DEVICE void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  Wgmma<T, N>::template rs<kTransposeB>(d, a, b, accumulate);
}

#endif  // !SK_SIMT

// Describes a matrix in shared memory that starts at `start`, with the 128-byte swizzle. The strides are those of the
// canonical layouts. k_major has only the second: from eight rows to the next. mn_major has both: the first from 64
// columns to the next, the second from eight rows to the next.
SK_DEVICE uint64_t shared_descriptor(const void* start, int leading_bytes, int stride_bytes) {
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3FFFF) >> 4); };
  return field(shared_address(start)) | field(static_cast<uint32_t>(leading_bytes)) << 16 |
         field(static_cast<uint32_t>(stride_bytes)) << 32 | uint64_t{1} << 62;
}
// The operand of summed indices 16 step ... 16 step + 15 when these run along the tile's rows. `tile` may point to any
// multiple of 8 rows inside a tile; `tile_bytes` is the distance from one tile of 64 columns to the next.
SK_DEVICE uint64_t k_major_descriptor(const void* tile, int step, int tile_bytes) {
  return shared_descriptor(static_cast<const unsigned char*>(tile) + step / 4 * tile_bytes + step % 4 * 32, 16, 1024);
}
// The same when the summed index runs down the tile's rows: all columns from `tile` on, which starts a tile.
SK_DEVICE uint64_t mn_major_descriptor(const void* tile, int step, int tile_bytes) {
  return shared_descriptor(static_cast<const unsigned char*>(tile) + step * 2048, tile_bytes, 1024);
}

}  // namespace seqkern
