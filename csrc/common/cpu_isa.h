// The instruction-set tiers of the CPU kernels, and which of them runs.
//
// Every csrc/<op>/cpu/*.cpp is compiled once per tier, with the tier's flags, inside `namespace seqkern::SK_TIER`,
// and exports one table of entry points. The op's host code asks for the active tier's table on every call. The tiers
// avx512bf16 and amx have tables of their own for bfloat16 only, from cpu/bf16.cpp; for everything else they use
// avx512's.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#define SK_X86_TIERS 1
#else
#define SK_X86_TIERS 0
#endif

namespace seqkern {

// avx512bf16: AVX-512 with bf16 dot products (Zen 4, Cooper Lake); amx: with matrix tiles too.
enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, amx = 4 };

// The tier in use: the best one this machine has, unless SEQKERN_CPU_ISA or set_isa() chose another.
Isa active_isa();
Isa best_isa();
const char* isa_name(Isa isa);
// Whether this is an AMD processor: its best prefetch policy differs from Intel's.
bool is_amd();
// False when the name is unknown or the machine lacks the tier; nothing changes then.
bool set_isa(const char* name);

}  // namespace seqkern

// Declares `name` in every tier's namespace and a function `name()` that returns the active tier's table.
#if SK_X86_TIERS
#define SK_DECLARE_KERNEL_TABLE(Table, name) \
  namespace generic {                        \
  extern const Table name;                   \
  }                                          \
  namespace avx2 {                           \
  extern const Table name;                   \
  }                                          \
  namespace avx512 {                         \
  extern const Table name;                   \
  }                                          \
  inline const Table& name() {               \
    switch (active_isa()) {                  \
      case Isa::amx:                         \
      case Isa::avx512bf16:                  \
      case Isa::avx512: return avx512::name; \
      case Isa::avx2: return avx2::name;     \
      default: return generic::name;         \
    }                                        \
  }
#else
#define SK_DECLARE_KERNEL_TABLE(Table, name) \
  namespace generic {                        \
  extern const Table name;                   \
  }                                          \
  inline const Table& name() { return generic::name; }
#endif

// Declares `name` in the bf16 tiers and a function `name()` that returns the active tier's table. It returns null where
// another tier is active or the compiler knows none of these.
#if SK_BF16_TIERS
#define SK_DECLARE_BF16_TABLE(Table, name)            \
  namespace avx512bf16 {                              \
  extern const Table name;                            \
  }                                                   \
  namespace amx {                                     \
  extern const Table name;                            \
  }                                                   \
  inline const Table* name() {                        \
    switch (active_isa()) {                           \
      case Isa::amx: return &amx::name;               \
      case Isa::avx512bf16: return &avx512bf16::name; \
      default: return nullptr;                        \
    }                                                 \
  }
#else
#define SK_DECLARE_BF16_TABLE(Table, name) \
  inline const Table* name() { return nullptr; }
#endif
