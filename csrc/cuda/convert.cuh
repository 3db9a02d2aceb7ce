#pragma once

#include <cstring>

#include "cuda/device.cuh"

// Elements of tensors as float or double, one rounding to nearest even back; the same bits on every processor.
namespace dmtp::cuda {

template <class To, class From>
__device__ inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

__device__ inline float from_fp16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude < 0x0400) {  // zero or subnormal: a multiple of 2^-24
    return bits_as<float>(bits_as<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f) | sign);
  }
  const uint32_t exponent = magnitude >= 0x7c00 ? 0x70000000u : 0x38000000u;
  return bits_as<float>(sign | ((magnitude << 13) + exponent));
}

__device__ inline float from_bf16(uint16_t half) {
  return bits_as<float>(static_cast<uint32_t>(half) << 16);
}

__device__ inline uint16_t to_bf16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  return static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

__device__ inline uint16_t to_fp16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return static_cast<uint16_t>(sign | 0x7e00);
  }
  if (magnitude >= 0x477ff000) {  // 65520 and above round to infinity
    return static_cast<uint16_t>(sign | 0x7c00);
  }
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the multiple of 2^-24, rounded to nearest even
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13));
}

// Saturated to the greatest finite number `top`; the format has this many fraction bits, and 2^(1 - bias) is its
// smallest normal number.
__device__ inline uint8_t to_fp8(float x, float top, int fraction, int bias) {
  if (x != x) {
    return 0x7f;
  }
  x = x < -top ? -top : x > top ? top : x;
  const uint32_t bits = bits_as<uint32_t>(x), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffff;
  const int drop = 23 - fraction;
  uint32_t code;
  if (magnitude < static_cast<uint32_t>(128 - bias) << 23) {
    // the sum's unit in the last place is the format's smallest number
    const uint32_t unit = static_cast<uint32_t>(128 - bias + drop) << 23;
    code = bits_as<uint32_t>(bits_as<float>(magnitude) + bits_as<float>(unit)) - unit;
  } else {
    const uint32_t half = (1u << (drop - 1)) - 1 + ((magnitude >> drop) & 1);
    code = (magnitude + half - (static_cast<uint32_t>(127 - bias) << 23)) >> drop;
  }
  return static_cast<uint8_t>(sign | code);
}

__device__ __host__ inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    default:
      return 1;
  }
}

// Element i of floating-point memory; fp8 is only written.
template <class Wide>
__device__ inline Wide load_as(DType dtype, const void* from, int64_t i) {
  switch (dtype) {
    case DType::f64:
      return static_cast<Wide>(load_global(static_cast<const double*>(from) + i));
    case DType::f32:
      return load_global(static_cast<const float*>(from) + i);
    case DType::f16:
      return from_fp16(load_global(static_cast<const uint16_t*>(from) + i));
    default:
      return from_bf16(load_global(static_cast<const uint16_t*>(from) + i));
  }
}

// double goes through float, as torch's conversions do
template <class Wide>
__device__ inline void store_as(DType dtype, void* to, int64_t i, Wide x) {
  switch (dtype) {
    case DType::f64:
      store_global(static_cast<double*>(to) + i, static_cast<double>(x));
      return;
    case DType::f32:
      store_global(static_cast<float*>(to) + i, static_cast<float>(x));
      return;
    case DType::f16:
      store_global(static_cast<uint16_t*>(to) + i, to_fp16(static_cast<float>(x)));
      return;
    case DType::bf16:
      store_global(static_cast<uint16_t*>(to) + i, to_bf16(static_cast<float>(x)));
      return;
    case DType::f8e4m3:
      store_global(static_cast<uint8_t*>(to) + i, to_fp8(static_cast<float>(x), 448.0f, 3, 7));
      return;
    default:
      store_global(static_cast<uint8_t*>(to) + i, to_fp8(static_cast<float>(x), 57344.0f, 2, 15));
  }
}

}  // namespace dmtp::cuda
