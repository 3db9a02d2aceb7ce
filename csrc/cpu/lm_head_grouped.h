#pragma once

#ifdef __AVX512VNNI__

#include "lm_head_vnni.h"

namespace dmtp::DMTP_CAPABILITY {

// 128 six-bit codes + 32 from 64 bytes of nibbles and 32 bytes of high bits: columns 0..31, 64..95,
// then 32..63, 96..127.
inline void unpack_int6(const char* nibbles, const char* planes, __m512i (&code)[2]) {
  const __m512i both = _mm512_loadu_si512(nibbles), nibble = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
  const __m512i plane = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes)));
  // bit pairs 0 and 1 for the first 64 columns, 2 and 3 for the rest
  const __m512i pairs = _mm512_srlv_epi32(plane, _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1));
  code[0] = _mm512_or_si512(_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_slli_epi32(pairs, 4), two));
  code[1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(both, 4), nibble),
                            _mm512_and_si512(_mm512_slli_epi32(pairs, 2), two));
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
