#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "dmtp/types.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Sixteen fp32 lanes at every capability, so that a sum has one order; only `fma` differs (a baseline build rounds
// twice).
namespace dmtp::DMTP_CAPABILITY {

constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float to_float(float x) {
  return x;
}

inline float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

#if defined(__AVX2__)
inline float to_float(Fp16 x) {
  return _cvtsh_ss(x.bits);
}
#else
inline float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude < 0x0400) {  // zero or subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t exponent = magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u;
  const uint32_t bits = sign | ((magnitude << 13) + exponent);
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
#endif

// e4m3fn has the bits of a fp16 whose exponent is 8 less, but for NaN (there is no infinity)
inline float to_float(Fp8e4m3 x) {
  const int sign = (x.bits & 0x80) << 8, rest = x.bits & 0x7f;
  return to_float(Fp16{static_cast<uint16_t>(rest == 0x7f ? 0x7e00 : sign | rest << 7)}) * 256.0f;
}

inline float to_float(Fp8e5m2 x) {
  return to_float(Fp16{static_cast<uint16_t>(x.bits << 8)});
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline Bf16 from_float<Bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  }
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
inline Fp16 from_float<Fp16>(float x) {
#if defined(__AVX2__)
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return {static_cast<uint16_t>(sign | 0x7e00)};
  }
  if (magnitude >= 0x477ff000) {  // 65520 and above round to infinity
    return {static_cast<uint16_t>(sign | 0x7c00)};
  }
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the multiple of 2^-24, rounded to nearest even
    float value;
    std::memcpy(&value, &magnitude, sizeof value);
    value += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &value, sizeof rounded);
    return {static_cast<uint16_t>(sign | (rounded - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13))};
#endif
}

#if defined(__AVX512F__)

struct Floats {
  __m512 v;

  static Floats zero() { return {_mm512_setzero_ps()}; }
  static Floats all(float x) { return {_mm512_set1_ps(x)}; }
  static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Floats load(const Bf16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
  }
  static Floats load(const Fp16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};

inline Floats operator+(Floats a, Floats b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Floats operator*(Floats a, Floats b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}

#elif defined(__AVX2__)

struct Floats {
  __m256 lo, hi;

  static Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Floats load(const Bf16* p) { return {widen(p), widen(p + 8)}; }
  static Floats load(const Fp16* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }

 private:
  static __m256 widen(const Bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
};

inline Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

#else

#if defined(__GNUC__)
typedef float Four __attribute__((vector_size(16)));
#else
struct Four {
  float v[4];

  float& operator[](int i) { return v[i]; }
  float operator[](int i) const { return v[i]; }
};
inline Four operator+(Four a, Four b) {
  return {{a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]}};
}
inline Four operator*(Four a, Four b) {
  return {{a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]}};
}
#endif

struct Floats {
  Four v[kLanes / 4];

  static Floats zero() { return all(0.0f); }
  static Floats all(float x) {
    const Four four = {x, x, x, x};
    return {{four, four, four, four}};
  }
  static Floats load(const float* p) {
    Floats out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  template <class T>
  static Floats load(const T* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      lanes[i] = to_float(p[i]);
    }
    return load(lanes);
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
};

inline Floats operator+(const Floats& a, const Floats& b) {
  return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}};
}
inline Floats operator*(const Floats& a, const Floats& b) {
  return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}};
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return a * b + c;
}

#endif

// The first n < kLanes elements, zeros after them; nothing behind them is read.
template <class T>
inline Floats load_part(const T* p, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    lanes[i] = to_float(p[i]);
  }
  return Floats::load(lanes);
}

// The sum of all lanes by a pairwise tree over adjacent lanes.
#if defined(__AVX512F__)
inline float sum(Floats x) {
  __m512 v = _mm512_add_ps(x.v, _mm512_permute_ps(x.v, 0xb1));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
  v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  return _mm512_cvtss_f32(_mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e)));
}
#elif defined(__AVX2__)
inline float sum(Floats x) {
  const auto half = [](__m256 v) {
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4e));
    return _mm256_add_ps(v, _mm256_permute2f128_ps(v, v, 1));
  };
  return _mm256_cvtss_f32(_mm256_add_ps(half(x.lo), half(x.hi)));
}
#else
inline float sum(const Floats& x) {
  const auto four = [&](int i) { return (x.v[i][0] + x.v[i][1]) + (x.v[i][2] + x.v[i][3]); };
  return (four(0) + four(1)) + (four(2) + four(3));
}
#endif

}  // namespace dmtp::DMTP_CAPABILITY
