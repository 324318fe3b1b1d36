// Looks for races: accesses of two threads to one byte, at least one of them a write, that no barrier, fence or release
// orders. Only where SIMT_RACE is defined (build.py: race=True); then the kernels are compiled with -fsanitize=thread,
// whose calls before every load and store end here, and threads change places between any two of them.
//
// Every thread has a vector clock (how much of every other thread's past it has seen), every byte remembers its last
// writer and some of its readers: "FastTrack", Flanagan and Freund, 2009.
//   __syncthreads, cluster barriers, __syncwarp      all threads that come have seen each other's past
//   mbarriers, store_release, add_release            who waits or acquires has seen the past of who arrived or released
//   atomics, store_fresh_16                          what was before the writer's last __threadfence
// Shuffles, votes, mma and ldmatrix order nothing, as CUDA has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace simt {

struct Block;
struct Warp;
struct Cluster;
using Clock = std::shared_ptr<const std::vector<uint32_t>>;

#if defined(SIMT_RACE)
void race_start(size_t threads);  // those that run together; nothing is remembered of others
void race_sync(Block& block);
void race_sync(Warp& warp, unsigned mask);
void race_release(Clock& at);  // adds the running thread's past
void race_acquire(const Clock& at);
void race_release_word(const void* word, bool add);
void race_relaxed_word(const void* word, bool add);  // releases what was fenced
void race_acquire_word(const void* word);
void race_fence();
void race_merge(Clock& at, const Clock& other);
// By the executor, for an instruction at that place of the code.
void race_read(const void* p, size_t bytes, const void* at);
void race_write(const void* p, size_t bytes, const void* at);
#else
inline void race_start(size_t) {}
inline void race_sync(Block&) {}
inline void race_sync(Warp&, unsigned) {}
inline void race_release(Clock&) {}
inline void race_acquire(const Clock&) {}
inline void race_release_word(const void*, bool) {}
inline void race_relaxed_word(const void*, bool) {}
inline void race_acquire_word(const void*) {}
inline void race_fence() {}
inline void race_merge(Clock&, const Clock&) {}
inline void race_read(const void*, size_t, const void*) {}
inline void race_write(const void*, size_t, const void*) {}
#endif

}  // namespace simt
