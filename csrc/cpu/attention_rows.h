#pragma once

#include "vector.h"

// Rows of keys and values in any element type.
namespace dmtp::DMTP_CAPABILITY {

// Calls `body` with a null pointer of the element type that `dtype` names.
template <class Body>
auto with_row_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::bf16:
      return body(static_cast<const Bf16*>(nullptr));
    case DType::f16:
      return body(static_cast<const Fp16*>(nullptr));
    case DType::f8e4m3:
      return body(static_cast<const Fp8e4m3*>(nullptr));
    case DType::f8e5m2:
      return body(static_cast<const Fp8e5m2*>(nullptr));
    default:
      return body(static_cast<const float*>(nullptr));
  }
}

inline int64_t bytes_of(DType dtype) {
  return with_row_type(dtype, []<class T>(const T*) -> int64_t { return sizeof(T); });
}

template <class T>
inline Floats load_any(const T* p) {
  return Floats::load(p);
}

inline Floats load_any(const Fp8e5m2* p) {
  Fp16 wide[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    wide[i].bits = static_cast<uint16_t>(p[i].bits << 8);
  }
  return Floats::load(wide);
}

inline Floats load_any(const Fp8e4m3* p) {
  Fp16 wide[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int sign = (p[i].bits & 0x80) << 8, rest = p[i].bits & 0x7f;
    wide[i].bits = static_cast<uint16_t>(rest == 0x7f ? 0x7e00 : sign | rest << 7);
  }
  return Floats::load(wide) * Floats::all(256.0f);
}

// `width` elements as fp32, zeros up to the next multiple of 16.
template <class T>
inline void widen(const T* row, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    load_any(row + i).store(out + i);
  }
  if (i < width) {
    load_part(row + i, width - i).store(out + i);
  }
}

inline void widen(const char* row, DType dtype, int64_t width, float* out) {
  with_row_type(dtype, [&]<class T>(const T*) { widen(reinterpret_cast<const T*>(row), width, out); });
}

// exp(x) for x <= 0 (NaN for NaN), 0 below the least normal number: 1 ulp or so.
#if defined(__AVX512F__)

inline __m512 exp_lanes(__m512 x) {
  const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0x08);
  const __m512 r =
      _mm512_fnmadd_ps(k, _mm512_set1_ps(1.42860677e-6f), _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693145752f), x));
  __m512 p = _mm512_set1_ps(1.98412698e-4f);
  for (const float c : {1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f, 1.0f, 1.0f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(p, k), tiny, _mm512_setzero_ps());
}

inline void exp_lanes(float* x) {
  _mm512_storeu_ps(x, exp_lanes(_mm512_loadu_ps(x)));
}

#else

inline void exp_lanes(float* x) {
  for (int i = 0; i < kLanes; ++i) {
    const float shifted = x[i] * 1.44269504f + 12582912.0f, k = shifted - 12582912.0f;
    const float r = (x[i] - k * 0.693145752f) - k * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = ((bits & 0xff) + 127) << 23 & 0x7f800000;  // 2^k: the low bits of `shifted` are k's
    float power;
    std::memcpy(&power, &bits, sizeof power);
    x[i] = x[i] < -87.0f ? 0.0f : p * power;
  }
}

#endif

// c tanh(x / c)
inline void cap_lanes(float* x, float cap) {
  float e[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    x[i] /= cap;
    e[i] = -2.0f * (x[i] < 0 ? -x[i] : x[i]);
  }
  exp_lanes(e);
  for (int i = 0; i < kLanes; ++i) {
    const float z = x[i] * x[i];
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float small = x[i] + x[i] * z * p, large = (1.0f - e[i]) / (1.0f + e[i]);
    x[i] = cap * (z < 0.390625f ? small : x[i] < 0 ? -large : large);
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
