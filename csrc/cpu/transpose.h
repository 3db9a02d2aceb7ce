#pragma once

#ifdef __AVX512F__

#include <immintrin.h>

#include <cstdint>

namespace dmtp::DMTP_CAPABILITY {

// Lane i of the vectors x[16], for the first `count` lanes, as one vector at out + i * stride.
inline void transpose(const __m512* x, int count, float* out, int64_t stride) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d p = _mm512_castps_pd(a[i + j]), q = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
    }
  }
  // b[4 g + c] holds, per quarter q, lane 4 q + c of rows 4 g .. 4 g + 3
  for (int c = 0; c < 4; ++c) {
    const __m512 low02 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), low13 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 high02 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 high13 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    const __m512 lanes[4] = {_mm512_shuffle_f32x4(low02, high02, 0x88), _mm512_shuffle_f32x4(low13, high13, 0x88),
                             _mm512_shuffle_f32x4(low02, high02, 0xdd), _mm512_shuffle_f32x4(low13, high13, 0xdd)};
    for (int q = 0; q < 4; ++q) {
      if (4 * q + c < count) {
        _mm512_storeu_ps(out + (4 * q + c) * stride, lanes[q]);
      }
    }
  }
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
