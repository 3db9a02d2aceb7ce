#include "capability.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#ifdef DMTP_ALL_CAPABILITIES
#include <cpuid.h>
#endif
#if defined(DMTP_ALL_CAPABILITIES) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dmtp {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "amx"};
constexpr int kUnset = -1;
std::atomic<int> in_force{kUnset};

#ifdef DMTP_ALL_CAPABILITIES

bool has_amx() {
#ifdef __linux__
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    return false;
  }
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  if ((d & kBf16) == 0 || (d & kTile) == 0 || (d & kInt8) == 0) {
    return false;
  }
  // the system keeps tiles only for a process that has asked
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Capability detect() {
  __builtin_cpu_init();
  const auto avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (!avx2) {
    return Capability::baseline;
  }
  const auto avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512vbmi");
  if (!avx512) {
    return Capability::avx2;
  }
  return has_amx() ? Capability::amx : Capability::avx512;
}

#else

Capability detect() {
  return Capability::baseline;
}

#endif

Capability best() {
  static const Capability found = detect();
  return found;
}

int parse(const std::string& name, const std::string& source) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) {
      return i;
    }
  }
  throw std::invalid_argument(source + ": is '" + name + "', must be one of baseline, avx2, avx512, amx");
}

}  // namespace

Capability capability() {
  int now = in_force.load(std::memory_order_relaxed);
  if (now == kUnset) {
    now = static_cast<int>(best());
    const char* wanted = std::getenv("DMTP_CPU_CAPABILITY");
    if (wanted != nullptr && *wanted != '\0') {
      const int lower = parse(wanted, "DMTP_CPU_CAPABILITY");
      now = lower < now ? lower : now;
    }
    in_force.store(now, std::memory_order_relaxed);
  }
  return static_cast<Capability>(now);
}

void set_capability(const std::string& name) {
  const int wanted = parse(name, "name");
  if (wanted > static_cast<int>(best())) {
    throw std::invalid_argument("name: is '" + name + "', this processor runs " + name_of(best()) + " at most");
  }
  in_force.store(wanted, std::memory_order_relaxed);
}

const char* name_of(Capability c) {
  return kNames[static_cast<int>(c)];
}

std::vector<std::string> capabilities() {
  return std::vector<std::string>(kNames, kNames + static_cast<int>(best()) + 1);
}

}  // namespace dmtp
