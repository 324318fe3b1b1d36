// Fiber stacks and context switches.
#pragma once

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "simt_core.h"

namespace simt {

constexpr size_t kStackBytes = 256 << 10;  // reserved; pages that no kernel touches cost nothing

// With a guard page below.
char* new_stack();
// Makes the first switch to the context call `entry`, `offset` bytes below the top of its stack.
void prepare(Context& context, void (*entry)(), size_t offset);
// Context switch; returns when something switches back to `from`.
void exchange(Context& from, Context& to);

// Around every switch, AddressSanitizer is told which stack is current.
inline void start_switch(Context& from, const Context& to, bool ending) {
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(ending ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#else
  (void)from, (void)to, (void)ending;
#endif
}
// The first switch away from the host thread's stack tells its bounds, kept in `main`.
inline void finish_switch(Context* self, Context& main) {
#if defined(SIMT_ASAN)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(self == nullptr ? nullptr : self->fake_stack, &bottom, &bytes);
  if (main.stack == nullptr) {
    main.stack = static_cast<char*>(const_cast<void*>(bottom));
    main.stack_bytes = bytes;
  }
#else
  (void)self, (void)main;
#endif
}

}  // namespace simt
