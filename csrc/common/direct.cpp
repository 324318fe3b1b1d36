#include "direct.h"

#include <cstring>

#define SK_EXPORT extern "C" __attribute__((visibility("default")))

namespace seqkern {
namespace {

const DirectOp* last_op = nullptr;
DirectAllocate allocate_function = nullptr;

}  // namespace

DirectOp::DirectOp(const char* name, const char* signature, const void* function)
    : name_(name), signature_(signature), function_(function), next_(last_op) {
  last_op = this;
}

const void* DirectOp::find(const char* name, const char* signature) {
  for (const DirectOp* op = last_op; op; op = op->next_)
    if (std::strcmp(op->name_, name) == 0) return std::strcmp(op->signature_, signature) == 0 ? op->function_ : nullptr;
  return nullptr;
}

DirectAllocate direct_allocate() { return allocate_function; }

}  // namespace seqkern

// For the library of the fast path.
SK_EXPORT const void* seqkern_direct_op(const char* name, const char* signature) {
  return seqkern::DirectOp::find(name, signature);
}
SK_EXPORT void seqkern_direct_set_allocate(seqkern::DirectAllocate allocate) { seqkern::allocate_function = allocate; }
