#pragma once

#include <limits>

#include "cuda/convert.cuh"
#include "dmtp/exps.h"

// The draws of dmtp_kernels/ops/sample/philox.py, and the float64 functions they go through. Products and sums round
// separately, so a GPU and a CPU that runs these sources get the same bits.
namespace dmtp::cuda {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum Stream : uint32_t { kSampleStream, kDraftStream, kAcceptStream, kResidualStream };

struct DrawKey {
  int64_t seed, position;
  uint32_t stream;
};

// The words of draws 4 * counter .. 4 * counter + 3: Philox4x32-10.
__device__ inline void philox(const DrawKey& draw, uint32_t counter, uint32_t* words) {
  constexpr uint32_t kMultiply[2] = {0xD2511F53, 0xCD9E8D57}, kWeyl[2] = {0x9E3779B9, 0xBB67AE85};
  uint32_t c0 = counter, c1 = draw.stream, c2 = static_cast<uint32_t>(draw.position),
           c3 = static_cast<uint32_t>(draw.position >> 32);
  uint32_t k0 = static_cast<uint32_t>(draw.seed), k1 = static_cast<uint32_t>(draw.seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const uint32_t high0 = __umulhi(c0, kMultiply[0]), high1 = __umulhi(c2, kMultiply[1]);
    const uint32_t low0 = c0 * kMultiply[0], low1 = c2 * kMultiply[1];
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += kWeyl[0];
    k1 += kWeyl[1];
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

__device__ inline uint32_t word_at(const DrawKey& draw, int64_t index) {
  uint32_t words[4];
  philox(draw, static_cast<uint32_t>(index / 4), words);
  const int which = static_cast<int>(index % 4);
  return which == 0 ? words[0] : which == 1 ? words[1] : which == 2 ? words[2] : words[3];
}

__device__ inline double uniform_of(uint32_t word) {
  return (static_cast<double>(word) + 0.5) * 0x1p-32;
}

// Quotients of one positive divisor, rounded to nearest like a division: that is a call, with registers to save. An
// infinite product with the reciprocal stays.
struct Divisor {
  double scale, by, inverse;

  __device__ explicit Divisor(double divisor)
      : scale(divisor < 0x1p-900  ? 0x1p200
              : divisor > 0x1p900 ? 0x1p-200
                                  : 1.0),
        by(divisor * scale) {
    constexpr uint64_t kFraction = (uint64_t{1} << 52) - 1, kBias = 1023;
    const uint64_t bits = bits_as<uint64_t>(by), power = bits >> 52;
    const double m = bits_as<double>((bits & kFraction) | kBias << 52);  // in [1, 2)
    double y = 24.0 / 17 - 8.0 / 17 * m;                                 // off by 1 / 17 at most
    for (int i = 0; i < 4; ++i) {
      y = y * (2.0 - m * y);
    }
    y = fma(fma(-m, y, 1.0), y, y);
    inverse = y * bits_as<double>((2 * kBias - power) << 52);
  }

  __device__ double under(double x) const {
    x = x * scale;
    double q = x * inverse;
    if (q - q != 0) {
      return q;
    }
    // Newton's steps
    q = fma(fma(-by, q, x), inverse, q);
    return fma(fma(-by, q, x), inverse, q);
  }
};

// exp(x) to about an ulp, for x <= 0; results below 2^-1021 become 0.
__device__ inline double exp_of(double x) {
  return x >= kLeastExponent ? exp_within(x) : 0.0;
}

// log(x) to about an ulp, for x > 0 and finite; 0 gives -inf. With m in [sqrt 1/2, sqrt 2) and f = m - 1:
// log m = f - s (f - 2 (s^2 / 3 + s^4 / 5 + ...)), s = f / (2 + f).
__device__ inline double log_of(double x) {
  constexpr double kHigh = 0x1.62e42fefa0000p-1, kLow = 0x1.cf79abc9e3b3ap-40, kLine = 0.9851, kSlope = 0.2390;
  if (x == 0) {
    return -kInfinity;
  }
  int power = 0;
  if (x < 0x1p-1022) {
    x *= 0x1p54;
    power = -54;
  }
  const uint64_t bits = bits_as<uint64_t>(x);
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd;
  // the exponent that leaves m at sqrt 1/2 or above
  const int64_t exponent = static_cast<int64_t>(bits - kRootHalf) >> 52;
  const double m = bits_as<double>(bits - (static_cast<uint64_t>(exponent) << 52));
  const double f = m - 1.0, e = static_cast<double>(exponent + power);
  // 1 / (2 + f), from a line that is off by 1.6 % at most
  const double d = 2.0 + f;
  double inverse = kLine - kSlope * d;
  for (int i = 0; i < 4; ++i) {
    inverse = inverse * (2.0 - d * inverse);
  }
  const double s = f * inverse, z = s * s;
  double series = 1.0 / 21;
  series = series * z + 1.0 / 19;
  series = series * z + 1.0 / 17;
  series = series * z + 1.0 / 15;
  series = series * z + 1.0 / 13;
  series = series * z + 1.0 / 11;
  series = series * z + 1.0 / 9;
  series = series * z + 1.0 / 7;
  series = series * z + 1.0 / 5;
  series = series * z + 1.0 / 3;
  // the high part times the exponent is exact
  return e * kHigh + (e * kLow - s * (f - 2.0 * z * series) + f);
}

// Gumbel noise -log E of the exponential E = -log(1 - u); 1 - u is exact.
__device__ inline double gumbel_of(uint32_t word) {
  return -log_of(-log_of((4294967295.5 - static_cast<double>(word)) * 0x1p-32));
}

// At least -log u, and so at least gumbel_of(word), by less than 0.07: a float's bits are its logarithm, cut in lines.
__device__ inline float gumbel_bound(uint32_t word) {
  const float u = static_cast<float>(word) + 0.5f;
  constexpr float kStep = 0.69314718f / (1 << 23), kOne = (127 + 32) * 0.69314718f;
  return kOne - static_cast<float>(bits_as<int32_t>(u)) * kStep;
}

}  // namespace dmtp::cuda
