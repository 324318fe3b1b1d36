// Stacks, and going from one to another.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "simt_core.h"

namespace simt {

constexpr size_t kStackBytes = 256 << 10;  // reserved; pages that no kernel touches cost nothing

// With a page below that nobody may touch.
inline char* new_stack() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* p =
      mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (mprotect(p, page, PROT_NONE) != 0) throw std::bad_alloc();
  return static_cast<char*>(p) + page;
}

#if defined(__x86_64__)

// Saves what a function must keep, and returns into the other stack.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

inline void prepare(Context& context, void (*entry)(), size_t offset) {
  void** top = reinterpret_cast<void**>(context.stack + context.stack_bytes - offset);
  *--top = nullptr;  // where entry would return to
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
inline void exchange(Context& from, Context& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

#else

inline ucontext_t* ucontext_of(Context& context) {
  if (context.stack_pointer == nullptr) context.stack_pointer = new ucontext_t;
  return static_cast<ucontext_t*>(context.stack_pointer);
}
inline void prepare(Context& context, void (*entry)(), size_t offset) {
  ucontext_t* u = ucontext_of(context);
  getcontext(u);
  u->uc_stack.ss_sp = context.stack;
  u->uc_stack.ss_size = context.stack_bytes - offset;
  u->uc_link = nullptr;
  makecontext(u, entry, 0);
}
inline void exchange(Context& from, Context& to) { swapcontext(ucontext_of(from), ucontext_of(to)); }

#endif

// AddressSanitizer has to know on which stack the program is.
inline void start_switch(Context& from, const Context& to, bool ending) {
#if defined(SIMT_ASAN)
  __sanitizer_start_switch_fiber(ending ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#else
  (void)from, (void)to, (void)ending;
#endif
}
// `main` learns its bounds from the first switch away from it.
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
