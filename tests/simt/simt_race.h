// Looks for races: accesses of two threads to one byte, at least one of them a write, that no barrier, fence or release
// orders. Only where SIMT_RACE is defined (build.py: race=True); then the kernels are compiled with -fsanitize=thread,
// whose calls before every load and store end here, and threads change places between any two of them.
//
// Every thread has a vector clock (how much of every other thread's past it has seen), every byte remembers its last
// writer and some of its readers: "FastTrack", Flanagan and Freund, 2009.
//   __syncthreads, cluster barriers, __syncwarp      all threads that come have seen each other's past
//   mbarriers, store_release, add_release            who waits or acquires has seen the past of who arrived or released
//   named barriers                                   who waits has seen the past of all that came
//   wgmma_wait, bulk_wait                            what the product or the copy has read and written
//   atomics, load_fresh_16, store_fresh_16           what was before the writer's last __threadfence, for who has one
//                                                    behind the read: relaxed, they acquire nothing themselves
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
// Those that run together, so many actors for each block; nothing is remembered of others.
void race_start(size_t threads, size_t actors_each);
void race_sync(Block& block);
void race_sync(Warp& warp, unsigned mask);
void race_release(Clock& sync);  // adds the running thread's past
void race_acquire(const Clock& sync);
void race_store_release(const void* word, bool rmw);
void race_store_relaxed(const void* word, bool rmw);  // releases what was fenced
void race_load_acquire(const void* word);
void race_load_relaxed(const void* word);  // relaxed: acquires with the next race_fence
void race_threadfence();
void race_merge(Clock& sync, const Clock& other);
// By the executor, for an instruction at that place of the code.
void race_read(const void* p, size_t bytes, const void* pc);
void race_write(const void* p, size_t bytes, const void* pc);
// What goes on behind the threads' backs reads and writes as an actor, number `actor`, that has seen `past` and nothing
// else; `clock` becomes what its waiter acquires. Of shared memory that was written in the ordinary way it wants a
// race_proxy_fence by who wrote.
void race_release_meet(Clock& sync);  // of several threads: what all of them have seen
void race_actor_begin(size_t actor, const Clock& issue_clock, Clock* done_clock);
void race_actor_read(const void* p, size_t bytes, bool shared, const void* pc);
void race_actor_write(const void* p, size_t bytes, bool shared, const void* pc);
void race_actor_end();
void race_proxy_fence();
#else
inline void race_start(size_t, size_t) {}
inline void race_sync(Block&) {}
inline void race_sync(Warp&, unsigned) {}
inline void race_release(Clock&) {}
inline void race_acquire(const Clock&) {}
inline void race_store_release(const void*, bool) {}
inline void race_store_relaxed(const void*, bool) {}
inline void race_load_acquire(const void*) {}
inline void race_load_relaxed(const void*) {}
inline void race_threadfence() {}
inline void race_merge(Clock&, const Clock&) {}
inline void race_read(const void*, size_t, const void*) {}
inline void race_write(const void*, size_t, const void*) {}
inline void race_release_meet(Clock&) {}
inline void race_actor_begin(size_t, const Clock&, Clock*) {}
inline void race_actor_read(const void*, size_t, bool, const void*) {}
inline void race_actor_write(const void*, size_t, bool, const void*) {}
inline void race_actor_end() {}
inline void race_proxy_fence() {}
#endif

}  // namespace simt
