#pragma once

#include <cstdint>
#include <cstring>

namespace dmtp::DMTP_CAPABILITY {

// out[i] = exp(x[i]) to about an ulp, for x <= 0; results below 2^-1021 become 0. No NaN.
inline void exps(const double* x, int64_t n, double* out) {
  constexpr double kMagic = 0x1.8p52, kLeast = -707.0;
  constexpr double kLog2e = 0x1.71547652b82fep0, kHigh = 0x1.62e42fefa0000p-1, kLow = 0x1.cf79abc9e3b3ap-40;
  for (int64_t i = 0; i < n; ++i) {
    const double at = x[i] < kLeast ? kLeast : x[i];
    const double shifted = at * kLog2e + kMagic, whole = shifted - kMagic;
    const double r = (at - whole * kHigh) - whole * kLow;
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
    out[i] = x[i] < kLeast ? 0.0 : s * scale;
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
