#pragma once

#include <cstdint>

#include "vector.h"

// The canonical dot product (dmtp_kernels/ops/lm_head/canonical.py) of rows of any float type with fp32 states.
// Products and sums round separately: the build turns contraction off.

namespace dmtp::DMTP_CAPABILITY {

constexpr int kCanonicalLanes = 256;
constexpr int kPair = 32;

// Calls `body` with a null pointer of the element type that `dtype` names.
template <class Body>
auto with_float_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::bf16:
      return body(static_cast<const Bf16*>(nullptr));
    case DType::f16:
      return body(static_cast<const Fp16*>(nullptr));
    default:
      return body(static_cast<const float*>(nullptr));
  }
}

// States are kept in the order in which rows are read: per 32 elements the even ones, then the odd ones (which is how
// two shifts take bf16 pairs apart), padded with zeros to whole 32s. Without AVX-512: as they are.
inline int64_t state_stride(int64_t width) {
  // one pair more: the same column of several states would fall into one set of the cache
  return (width + kPair - 1) / kPair * kPair + kPair;
}

inline int64_t state_position(int64_t i) {
#ifdef __AVX512BW__
  return i / kPair * kPair + (i % 2) * (kPair / 2) + i % kPair / 2;
#else
  return i;
#endif
}

#ifdef __AVX512BW__

struct Pair {
  __m512 even, odd;
};

// A value that is loaded once: compilers would make it a memory operand of each of its uses.
inline __m512 held(__m512 x) {
  asm("" : "+v"(x));
  return x;
}
inline __m512i held(__m512i x) {
  asm("" : "+v"(x));
  return x;
}

inline Pair split_pair(__m512i bf16) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bf16, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(bf16, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

inline Pair split_pair(__m512 first, __m512 second) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second)};
}

inline Pair take_apart(const Bf16*, __m512i both) {
  return split_pair(both);
}
inline Pair take_apart(const Fp16*, __m512i both) {
  return split_pair(_mm512_cvtph_ps(_mm512_castsi512_si256(both)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1)));
}

// 32 elements.
template <class T>
Pair load_pair(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return split_pair(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16));
  } else {
    return take_apart(p, held(_mm512_loadu_si512(p)));
  }
}

// The first `count` (1..32) of 32 elements, zeros after them; nothing behind them is read.
template <class T>
Pair load_pair(const T* p, int64_t count) {
  const uint32_t mask = ~uint32_t{0} >> (kPair - count);
  if constexpr (sizeof(T) == 4) {
    return split_pair(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p),
                      _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + 16));
  } else {
    return take_apart(p, _mm512_maskz_loadu_epi16(mask, p));
  }
}

// The sum of 128 values, neighbours first: value 16 b + j is lane j of x[b].
inline float sum_neighbours(const __m512 (&x)[8]) {
  __m512 y[4], z[2];
  for (int i = 0; i < 4; ++i) {
    y[i] =
        _mm512_add_ps(_mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x88), _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    z[i] =
        _mm512_add_ps(_mm512_shuffle_ps(y[2 * i], y[2 * i + 1], 0x88), _mm512_shuffle_ps(y[2 * i], y[2 * i + 1], 0xdd));
  }
  const __m512 quarters = _mm512_add_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x88), _mm512_shuffle_f32x4(z[0], z[1], 0xdd));
  const __m512 halves = _mm512_add_ps(quarters, _mm512_shuffle_f32x4(quarters, quarters, 0xb1));
  const __m128 low = _mm512_castps512_ps128(halves), high = _mm512_extractf32x4_ps(halves, 2);
  const __m128 fours = _mm_hadd_ps(low, high), twos = _mm_hadd_ps(fours, fours);
  return _mm_cvtss_f32(_mm_hadd_ps(twos, twos));
}

template <class T>
float canonical_dot(const float* state, const T* row, int64_t width) {
  __m512 even[8], odd[8];
  for (int b = 0; b < 8; ++b) {
    even[b] = odd[b] = _mm512_setzero_ps();
  }
  const auto add = [&](int b, Pair w, const float* h) __attribute__((always_inline)) {
    even[b] = _mm512_add_ps(even[b], _mm512_mul_ps(w.even, _mm512_loadu_ps(h)));
    odd[b] = _mm512_add_ps(odd[b], _mm512_mul_ps(w.odd, _mm512_loadu_ps(h + 16)));
  };
  int64_t i = 0;
  for (; i + kCanonicalLanes <= width; i += kCanonicalLanes) {
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
      add(b, load_pair(row + i + b * kPair), state + i + b * kPair);
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < 8; ++b) {
    const int64_t at = i + b * kPair, left = width - at;
    if (left > 0) {
      add(b, left < kPair ? load_pair(row + at, left) : load_pair(row + at), state + at);
    }
  }
  __m512 sum[8];
  for (int b = 0; b < 8; ++b) {
    sum[b] = _mm512_add_ps(even[b], odd[b]);
  }
  return sum_neighbours(sum);
}

#else

template <class T>
float canonical_dot(const float* state, const T* row, int64_t width) {
  alignas(64) float lanes[kCanonicalLanes] = {};
  int64_t i = 0;
  for (; i + kCanonicalLanes <= width; i += kCanonicalLanes) {
    for (int j = 0; j < kCanonicalLanes; ++j) {
      lanes[j] += state[i + j] * to_float(row[i + j]);
    }
  }
  for (int j = 0; i + j < width; ++j) {
    lanes[j] += state[i + j] * to_float(row[i + j]);
  }
  for (int half = kCanonicalLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) {
      lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    }
  }
  return lanes[0];
}

#endif

}  // namespace dmtp::DMTP_CAPABILITY
