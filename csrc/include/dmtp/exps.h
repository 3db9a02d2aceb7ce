#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define DMTP_EVERYWHERE __host__ __device__
#else
#define DMTP_EVERYWHERE
#endif

namespace dmtp {

constexpr double kLeastExponent = -707.0;  // below it results would be less than 2^-1021

// exp(x) to about an ulp, for x from kLeastExponent to 0; products and sums round separately, so every processor has
// the same bits. Static: each set of instructions that a file is compiled for has its own.
DMTP_EVERYWHERE static inline double exp_within(double x) {
  constexpr double kMagic = 0x1.8p52;
  constexpr double kLog2e = 0x1.71547652b82fep0, kHigh = 0x1.62e42fefa0000p-1, kLow = 0x1.cf79abc9e3b3ap-40;
  const double shifted = x * kLog2e + kMagic, whole = shifted - kMagic;
  const double r = (x - whole * kHigh) - whole * kLow;
  double s = 1.0 / 6227020800;
  s = s * r + 1.0 / 479001600;
  s = s * r + 1.0 / 39916800;
  s = s * r + 1.0 / 3628800;
  s = s * r + 1.0 / 362880;
  s = s * r + 1.0 / 40320;
  s = s * r + 1.0 / 5040;
  s = s * r + 1.0 / 720;
  s = s * r + 1.0 / 120;
  s = s * r + 1.0 / 24;
  s = s * r + 1.0 / 6;
  s = s * r + 0.5;
  s = s * (r * r) + r + 1.0;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const uint64_t power = (bits + 1023) << 52;  // 2^whole
  double scale;
  std::memcpy(&scale, &power, sizeof scale);
  return s * scale;
}

}  // namespace dmtp
