#include "cpu_isa.h"

#include <atomic>
#include <cstring>

namespace seqkern {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512"};

Isa detect() {
#if SK_X86_TIERS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::generic;
}

std::atomic<int>& active() {
  // SEQKERN_CPU_ISA is checked in Python at import, where a wrong value can raise; here it starts as the best tier.
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return static_cast<Isa>(active().load(std::memory_order_relaxed)); }

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool set_isa(const char* name) {
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    if (std::strcmp(name, kNames[i]) == 0) {
      active().store(i, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace seqkern
