// A memory pool for large results.
//
// A C library returns large blocks to the kernel as soon as they are freed, and the next result of the same size pays
// for fresh pages: a fault each, and zeroing. For an op that only streams that is most of its time (NOTES.md). So
// results of 1 MB and more take their memory from here, on huge pages from 4 MB on, and return it when their tensor
// dies. At most `limit` bytes stay unused in the pool; the least recently used go first.
#pragma once

#include <cstddef>

namespace seqkern {

// Uninitialised memory of at least `bytes`, or null: too small for the pool, or out of memory. pool_give needs `size`.
void* pool_take(size_t bytes, size_t& size);
void pool_give(void* block, size_t size);

// Returns unused memory to the kernel. Afterwards the pool keeps at most `limit` bytes (512 MB at the start, 0 for
// none).
void pool_release();
void pool_set_limit(size_t limit);
size_t pool_waiting();
// For tests: fills blocks with NaN before they are handed out, and asks other allocators here to do the same.
void pool_set_poison(bool poison);
bool pool_poisons();

}  // namespace seqkern
