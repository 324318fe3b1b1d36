// Memory of large results, kept for the next one.
//
// A C library gives large blocks back to the kernel as soon as they are freed, and the next result of the same size
// pays for fresh pages: zeroed, one fault each. For an op that only streams, that is most of its time (a layer norm of
// 32 MB takes 12 ms, of which the arithmetic and the memory traffic are 4). So blocks of 1 MB and more come from
// here, on huge pages from 4 MB on, and go back here when their tensor dies. At most `limit` bytes wait unused; what
// was not used for longest goes first.
#pragma once

#include <cstddef>

namespace seqkern {

// Uninitialised memory of at least `bytes`, or null: too small, or not to be had. `size` is what `pool_give` needs.
void* pool_take(size_t bytes, size_t& size);
void pool_give(void* block, size_t size);

// Gives what waits back to the kernel; afterwards at most `limit` bytes will wait (512 MB at the start, 0 for none).
void pool_release();
void pool_set_limit(size_t limit);
size_t pool_waiting();
// Fills blocks with NaN before they are given out, and asks whoever gives out other memory to do so: for tests.
void pool_set_poison(bool poison);
bool pool_poisons();

}  // namespace seqkern
