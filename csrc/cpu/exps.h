#pragma once

#include "dmtp/exps.h"

namespace dmtp::DMTP_CAPABILITY {

// out[i] = exp(x[i]) to about an ulp, for x <= 0; results below 2^-1021 become 0. No NaN.
inline void exps(const double* x, int64_t n, double* out) {
  for (int64_t i = 0; i < n; ++i) {
    const double y = exp_within(x[i] < kLeastExponent ? kLeastExponent : x[i]);
    out[i] = x[i] < kLeastExponent ? 0.0 : y;
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
