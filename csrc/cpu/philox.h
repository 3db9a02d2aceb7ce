#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Philox4x32-10 as dmtp_kernels/ops/sample/philox.py defines it.
namespace dmtp::DMTP_CAPABILITY {

enum Stream : uint32_t { kSampleStream, kDraftStream, kAcceptStream, kResidualStream };

struct DrawKey {
  uint32_t key[2];       // seed, low word first
  uint32_t position[2];  // low word first
  uint32_t stream;

  DrawKey(int64_t seed, int64_t position_, uint32_t stream_)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
        position{static_cast<uint32_t>(position_), static_cast<uint32_t>(static_cast<uint64_t>(position_) >> 32)},
        stream(stream_) {}
};

constexpr uint32_t kPhiloxMultiply[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxWeyl[2] = {0x9E3779B9, 0xBB67AE85};
constexpr int kPhiloxRounds = 10;

// The four words of draws 4 * counter .. 4 * counter + 3.
inline void philox(const DrawKey& draw, uint32_t counter, uint32_t* words) {
  uint32_t c0 = counter, c1 = draw.stream, c2 = draw.position[0], c3 = draw.position[1];
  uint32_t k0 = draw.key[0], k1 = draw.key[1];
  for (int i = 0; i < kPhiloxRounds; ++i) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * kPhiloxMultiply[0];
    const uint64_t p1 = static_cast<uint64_t>(c2) * kPhiloxMultiply[1];
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxWeyl[0];
    k1 += kPhiloxWeyl[1];
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

constexpr int kDraws = 64;  // of one block

// Words of draws first .. first + 63; `first` is a multiple of 4.
inline void philox_block(const DrawKey& draw, int64_t first, uint32_t* words) {
  const auto counter = static_cast<uint32_t>(first / 4);
#if defined(__AVX512F__)
  // one counter in the low half of each 64-bit lane; what the high halves hold is never multiplied
  const auto all = [](uint32_t x) { return _mm512_set1_epi64(x); };
  const __m512i m0 = all(kPhiloxMultiply[0]), m1 = all(kPhiloxMultiply[1]), low = all(0xffffffff);
  for (int half = 0; half < 2; ++half) {
    const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i c0 = _mm512_and_si512(_mm512_add_epi64(all(counter + 8 * half), lane), low);
    __m512i c1 = all(draw.stream), c2 = all(draw.position[0]), c3 = all(draw.position[1]);
    uint32_t k0 = draw.key[0], k1 = draw.key[1];
    for (int i = 0; i < kPhiloxRounds; ++i) {
      const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
      c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), c1), all(k0));
      c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), c3), all(k1));
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxWeyl[0];
      k1 += kPhiloxWeyl[1];
    }
    const __m512i a = _mm512_or_si512(_mm512_and_si512(c0, low), _mm512_slli_epi64(c1, 32));
    const __m512i b = _mm512_or_si512(_mm512_and_si512(c2, low), _mm512_slli_epi64(c3, 32));
    const __m512i first_four = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i last_four = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    _mm512_storeu_si512(words + 32 * half, _mm512_permutex2var_epi64(a, first_four, b));
    _mm512_storeu_si512(words + 32 * half + 16, _mm512_permutex2var_epi64(a, last_four, b));
  }
#elif defined(__AVX2__)
  const auto all = [](uint32_t x) { return _mm256_set1_epi64x(x); };
  const __m256i m0 = all(kPhiloxMultiply[0]), m1 = all(kPhiloxMultiply[1]), low = all(0xffffffff);
  for (int part = 0; part < 4; ++part) {
    __m256i c0 = _mm256_and_si256(_mm256_add_epi64(all(counter + 4 * part), _mm256_set_epi64x(3, 2, 1, 0)), low);
    __m256i c1 = all(draw.stream), c2 = all(draw.position[0]), c3 = all(draw.position[1]);
    uint32_t k0 = draw.key[0], k1 = draw.key[1];
    for (int i = 0; i < kPhiloxRounds; ++i) {
      const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), all(k0));
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), all(k1));
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxWeyl[0];
      k1 += kPhiloxWeyl[1];
    }
    const __m256i a = _mm256_or_si256(_mm256_and_si256(c0, low), _mm256_slli_epi64(c1, 32));
    const __m256i b = _mm256_or_si256(_mm256_and_si256(c2, low), _mm256_slli_epi64(c3, 32));
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);  // counters 0, 2 and 1, 3
    auto* out = reinterpret_cast<__m256i*>(words + 16 * part);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
#else
  for (uint32_t i = 0; i < kDraws / 4; ++i) {
    philox(draw, counter + i, words + 4 * i);
  }
#endif
}

inline double uniform_of(uint32_t word) {
  return (static_cast<double>(word) + 0.5) * 0x1p-32;
}

// Gumbel noise -log E of the exponential E = -log(1 - u); 1 - u is exact.
inline double gumbel_of(uint32_t word) {
  return -std::log(-std::log((4294967295.5 - static_cast<double>(word)) * 0x1p-32));
}

// At least -log u, and so at least gumbel_of(word), by less than 0.07: a float's bits are its logarithm, cut in lines.
inline float gumbel_bound(uint32_t word) {
  const float u = static_cast<float>(word) + 0.5f;
  int32_t bits;
  std::memcpy(&bits, &u, sizeof bits);
  constexpr float kStep = 0.69314718f / (1 << 23), kOne = (127 + 32) * 0.69314718f;
  return kOne - static_cast<float>(bits) * kStep;
}

}  // namespace dmtp::DMTP_CAPABILITY
