#pragma once

#include <string>
#include <vector>

// Every kernel file of this folder is compiled once per capability, inside `namespace dmtp::DMTP_CAPABILITY`; which of
// them runs is decided at the first call from the processor and DMTP_CPU_CAPABILITY.
//
// The objects are linked lowest capability first, behind those for any processor (CMakeLists.txt): of an inline
// function that several of them emit the linker keeps the lowest copy, so no instruction reaches a processor that lacks
// it.

namespace dmtp {

// avx2: AVX2, FMA and F16C. avx512: F, BW, CD, DQ, VL, VNNI and VBMI. amx: avx512, and int8 and bf16 tiles
// that the system has granted.
enum class Capability { baseline, avx2, avx512, amx };

// The capability in force. Throws std::invalid_argument when DMTP_CPU_CAPABILITY names none.
Capability capability();

// Runs this and later calls at a lower capability (or back at a higher one, up to the processor's); it wins over the
// environment. Throws std::invalid_argument for a name that is unknown or not among `capabilities()`.
void set_capability(const std::string& name);

const char* name_of(Capability);

// What this processor runs and this build holds, lowest first.
std::vector<std::string> capabilities();

}  // namespace dmtp

// Declares `kernel(const Args&)` in every capability's namespace and `dmtp::kernel`, which calls the one in force.
#ifdef DMTP_ALL_CAPABILITIES
#define DMTP_CPU_KERNEL(kernel, Args)                                                                       \
  namespace dmtp {                                                                                          \
  namespace baseline {                                                                                      \
  void kernel(const Args&);                                                                                 \
  }                                                                                                         \
  namespace avx2 {                                                                                          \
  void kernel(const Args&);                                                                                 \
  }                                                                                                         \
  namespace avx512 {                                                                                        \
  void kernel(const Args&);                                                                                 \
  }                                                                                                         \
  namespace amx {                                                                                           \
  void kernel(const Args&);                                                                                 \
  }                                                                                                         \
  inline void kernel(const Args& args) {                                                                    \
    constexpr void (*table[])(const Args&) = {baseline::kernel, avx2::kernel, avx512::kernel, amx::kernel}; \
    table[static_cast<int>(capability())](args);                                                            \
  }                                                                                                         \
  }
#else
#define DMTP_CPU_KERNEL(kernel, Args)    \
  namespace dmtp {                       \
  namespace baseline {                   \
  void kernel(const Args&);              \
  }                                      \
  inline void kernel(const Args& args) { \
    baseline::kernel(args);              \
  }                                      \
  }
#endif
