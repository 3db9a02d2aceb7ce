#pragma once

#ifdef __AVX512VNNI__

#include <immintrin.h>

#include "lm_head_scorer.h"

namespace dmtp::DMTP_CAPABILITY {

// Up to this many states tiles cost more than they save where rows must be unpacked or closed per group.
constexpr int kFewStates = 4;

// The digits of 128 columns as nibbles hold them: columns 0..31, 64..95 (low), then 32..63, 96..127 (high).
const int8_t* nibble_order(const Digits& digits, Scratch& scratch);

inline int32_t load_int32(const char* p) {
  int32_t out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

// fp32(double(c0 + 256 c1 + 65536 c2) * step * scale) of 16 rows or states, every step but the last two exact.
inline __m512 whole_scores(__m512i c0, __m512i c1, __m512i c2, const __m512d (&step)[2], __m512 scale) {
  const auto half = [&](__m256i a, __m256i b, __m256i c, __m512d step_of, __m256 scale_of) {
    const __m512d low = _mm512_fmadd_pd(_mm512_cvtepi32_pd(b), _mm512_set1_pd(256.0), _mm512_cvtepi32_pd(a));
    const __m512d total = _mm512_fmadd_pd(_mm512_cvtepi32_pd(c), _mm512_set1_pd(65536.0), low);
    return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_mul_pd(total, step_of), _mm512_cvtps_pd(scale_of)));
  };
  const __m256 first = half(_mm512_castsi512_si256(c0), _mm512_castsi512_si256(c1), _mm512_castsi512_si256(c2), step[0],
                            _mm512_castps512_ps256(scale));
  const __m256 second = half(_mm512_extracti64x4_epi64(c0, 1), _mm512_extracti64x4_epi64(c1, 1),
                             _mm512_extracti64x4_epi64(c2, 1), step[1], _mm512_extractf32x8_ps(scale, 1));
  return _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
}

// The sums of the lanes of 16 vectors: less than a third of the instructions of 16 sums of one vector's lanes.
inline __m512i lane_sums(const __m512i* v) {
  __m512i pairs[8], fours[4];
  for (int i = 0; i < 8; ++i) {
    const __m512i a = v[2 * i], b = v[2 * i + 1];
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const auto halves = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  return halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]));
}

// The scores of one state from the digit sums of up to kBlock rows.
inline void rows_scores(const int32_t* c0, const int32_t* c1, const int32_t* c2, int rows, double step,
                        const float* scale, float* scores) {
  const __m512d steps[2] = {_mm512_set1_pd(step), _mm512_set1_pd(step)};
  for (int r = 0; r < rows; r += 16) {
    const auto mask = static_cast<__mmask16>(rows - r < 16 ? (1 << (rows - r)) - 1 : 0xffff);
    const __m512 out = whole_scores(_mm512_load_si512(c0 + r), _mm512_load_si512(c1 + r), _mm512_load_si512(c2 + r),
                                    steps, _mm512_maskz_loadu_ps(mask, scale + r));
    _mm512_storeu_ps(scores + r, out);
  }
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
