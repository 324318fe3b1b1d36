// The library's interface for Python: plain C functions, which ctypes finds in the loaded extension.
#include "cpu_isa.h"
#include "pool.h"

#define SK_EXPORT extern "C" __attribute__((visibility("default")))

SK_EXPORT const char* seqkern_active_isa() { return seqkern::isa_name(seqkern::active_isa()); }
SK_EXPORT const char* seqkern_best_isa() { return seqkern::isa_name(seqkern::best_isa()); }
// 0 when the name is unknown or this machine lacks the tier; nothing changes then.
SK_EXPORT int seqkern_set_isa(const char* name) { return seqkern::set_isa(name) ? 1 : 0; }

// What the CUDA kernels were compiled for, names of setup.py's table with a space between, or nothing.
SK_EXPORT const char* seqkern_cuda_archs() { return SK_CUDA_ARCHS; }

SK_EXPORT void seqkern_pool_release() { seqkern::pool_release(); }
SK_EXPORT void seqkern_pool_set_limit(size_t bytes) { seqkern::pool_set_limit(bytes); }
SK_EXPORT size_t seqkern_pool_waiting() { return seqkern::pool_waiting(); }
SK_EXPORT void seqkern_pool_set_poison(int poison) { seqkern::pool_set_poison(poison != 0); }
