// Context switches (simt_fiber.h): assembly on x86-64, ucontext elsewhere (or with SIMT_UCONTEXT).
#include "simt_fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#if !defined(__x86_64__)
#define SIMT_UCONTEXT
#endif
#if defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

namespace simt {

char* new_stack() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* p =
      mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || mprotect(p, page, PROT_NONE) != 0) throw std::bad_alloc();
  return static_cast<char*>(p) + page;
}

#if !defined(SIMT_UCONTEXT)

// Pushes the callee-saved registers, switches the stack pointer, and returns on the other stack.
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

void prepare(Context& context, void (*entry)(), size_t offset) {
  void** top = reinterpret_cast<void**>(context.stack + context.stack_bytes - offset);
  *--top = nullptr;  // return address of entry, which does not return
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // callee-saved registers
  context.stack_pointer = top;
}
void exchange(Context& from, Context& to) { simt_switch(&from.stack_pointer, to.stack_pointer); }

#else

static ucontext_t* state_of(Context& context) {
  if (context.stack_pointer == nullptr) context.stack_pointer = new ucontext_t;  // reused, as the stack is
  return static_cast<ucontext_t*>(context.stack_pointer);
}
void prepare(Context& context, void (*entry)(), size_t offset) {
  ucontext_t* state = state_of(context);
  getcontext(state);
  state->uc_stack.ss_sp = context.stack;
  state->uc_stack.ss_size = context.stack_bytes - offset;
  state->uc_link = nullptr;
  makecontext(state, entry, 0);
}
void exchange(Context& from, Context& to) { swapcontext(state_of(from), state_of(to)); }

#endif

}  // namespace simt
