#include "cpu_isa.h"

#include <atomic>
#include <cstring>
#if SK_BF16_TIERS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace seqkern {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512bf16", "amx"};

#if SK_BF16_TIERS
bool has_avx512_bf16() {
  unsigned a, b, c, d;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvx512Bf16) != 0;
}

// Whether the processor has bfloat16 products on tiles, and Linux permits them: a process has to ask once, before its
// first use of tiles, for all its threads.
bool amx_usable() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kTile = 1u << 24, kTileBf16 = 1u << 22;
  if ((d & kTile) == 0 || (d & kTileBf16) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa detect() {
#if SK_X86_TIERS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
#if SK_BF16_TIERS
    if (has_avx512_bf16()) return amx_usable() ? Isa::amx : Isa::avx512bf16;
#endif
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::generic;
}

std::atomic<int>& active() {
  // Python checks SEQKERN_CPU_ISA at import, where a wrong value can raise; here the tier starts as the best one.
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return static_cast<Isa>(active().load(std::memory_order_relaxed)); }

bool is_amd() {
#if SK_X86_TIERS
  static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
  return amd;
#else
  return false;
#endif
}

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
