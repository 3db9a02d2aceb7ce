#include <bit>
#include <cmath>
#include <limits>

#include "lm_head_scorer.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int64_t kWorthSharing = 1 << 15;  // elements

template <class T>
float length_of(const T* h, int64_t width) {
  double part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    for (int j = 0; j < 8; ++j) {
      const double x = to_float(h[i + j]);
      part[j] += x * x;
    }
  }
  for (; i < width; ++i) {
    const double x = to_float(h[i]);
    part[0] += x * x;
  }
  const double square = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
  return static_cast<float>(std::sqrt(square)) * 0x1.00001p0f;
}

// The whole numbers of one state, digit by digit; the step that they count.
template <class T>
double digits_of(const T* h, int64_t width, int64_t stride, int8_t* out) {
  float greatest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < width; ++i) {
    const float x = std::fabs(to_float(h[i]));
    finite &= x <= std::numeric_limits<float>::max();
    greatest = x > greatest ? x : greatest;
  }
  const bool usable = finite && greatest >= 0x1p-100f && greatest <= 0x1p100f;
  if (!usable) {
    for (int64_t i = 0; i < 3 * stride; ++i) {
      out[i] = 0;
    }
    return finite && greatest == 0.0f ? 1.0 : std::numeric_limits<double>::quiet_NaN();
  }
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(greatest) >> 23) - 127 - 21;
  const float inverse = std::bit_cast<float>(static_cast<uint32_t>(127 - exponent) << 23);
  // |h * inverse| <= 2^22: the sum has no bits below one, the nearest even is taken
  constexpr float kRound = 0x1.8p23f;
  for (int64_t i = 0; i < width; ++i) {
    const int32_t q = static_cast<int32_t>((to_float(h[i]) * inverse + kRound) - kRound);
    const int32_t low = ((q + 128) & 255) - 128, rest = (q - low) >> 8, middle = ((rest + 128) & 255) - 128;
    out[i] = static_cast<int8_t>(low);
    out[stride + i] = static_cast<int8_t>(middle);
    out[2 * stride + i] = static_cast<int8_t>((rest - middle) >> 8);
  }
  for (int digit = 0; digit < 3; ++digit) {
    for (int64_t i = width; i < stride; ++i) {
      out[digit * stride + i] = 0;
    }
  }
  return std::ldexp(1.0, exponent);
}

// body(state, pointer to its row)
template <class Body>
void each_state(const Tensor& hidden, int64_t first, int64_t count, const ParallelFor& parallel, Body body) {
  const int64_t width = hidden.size[1] > 0 ? hidden.size[1] : 1;
  with_float_type(hidden.dtype, [&]<class T>(const T*) {
    parallel(count, ceil_div(kWorthSharing, width), [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        body(s, hidden.row<const T>(first + s));
      }
    });
  });
}

}  // namespace

States make_states(const Tensor& hidden, int64_t first, int64_t count, Scratch& scratch, const ParallelFor& parallel) {
  const int64_t width = hidden.size[1], stride = state_stride(width);
  float* rows = scratch.take<float>(count * stride);
  float* length = scratch.take<float>(count);
  each_state(hidden, first, count, parallel, [&](int64_t s, const auto* h) {
    float* out = rows + s * stride;
    for (int64_t i = 0; i < width; ++i) {
      out[state_position(i)] = to_float(h[i]);
    }
    for (int64_t i = width; i < stride; ++i) {
      out[state_position(i)] = 0.0f;
    }
    length[s] = length_of(h, width);
  });
  return {count, width, stride, rows, length};
}

Digits make_digits(const Tensor& hidden, int64_t first, int64_t count, Scratch& scratch, const ParallelFor& parallel) {
  const int64_t width = hidden.size[1],
                stride = round_up(width, 128) + 128;  // as states: not all into one set of the cache
  auto* rows = scratch.take<int8_t>(count * 3 * stride);
  auto* step = scratch.take<double>(count);
  each_state(hidden, first, count, parallel,
             [&](int64_t s, const auto* h) { step[s] = digits_of(h, width, stride, rows + s * 3 * stride); });
  return {count, width, stride, rows, step};
}

}  // namespace dmtp::DMTP_CAPABILITY
