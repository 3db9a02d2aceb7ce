#ifdef __AVX512VNNI__

#include "lm_head_vnni.h"

#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int kStep = 64;  // columns of int8 codes per instruction

// The digit sums of up to kBlock rows for S states, in lanes still to be added.
template <int S>
struct BlockSums {
  __m512i lanes[3 * S][kBlock];

  explicit BlockSums(int rows) {
    for (auto& of_digit : lanes) {
      std::fill(of_digit + rows, of_digit + kBlock, _mm512_setzero_si512());
    }
  }

  // With `offset` taken from the sums of each digit.
  void scores(const int32_t* offset, int rows, const double* step, const float* scale, float* out) const {
    alignas(64) int32_t sums[3][kBlock];
    for (int i = 0; i < S; ++i) {
      for (int d = 0; d < 3; ++d) {
        const __m512i from = _mm512_set1_epi32(offset != nullptr ? offset[3 * i + d] : 0);
        for (int r = 0; r < kBlock; r += 16) {
          _mm512_store_si512(sums[d] + r, _mm512_sub_epi32(lane_sums(lanes[3 * i + d] + r), from));
        }
      }
      rows_scores(sums[0], sums[1], sums[2], rows, step[i], scale, out + i * kBlock);
    }
  }
};

// Codes are taken as unsigned, code + 128; the digits' sums take 128 back.
struct RowScaleScorer final : Scorer {
  ByteRows codes;
  const float* scale;
  Digits digits;
  const int32_t* offset;  // [count, 3], 128 times the sum of a digit

  RowScaleScorer(const ByteRows& codes, const float* scale, const Digits& digits, Scratch& scratch)
      : codes(codes), scale(scale), digits(digits) {
    auto* sums = scratch.take<int32_t>(digits.count * 3);
    for (int64_t i = 0; i < digits.count * 3; ++i) {
      int32_t sum = 0;
      for (int64_t j = 0; j < digits.width; ++j) {
        sum += digits.rows[i * digits.stride + j];
      }
      sums[i] = 128 * sum;
    }
    offset = sums;
  }

  int64_t row_bytes() const override { return codes.bytes + 8; }

  void score(int64_t first, int rows, int64_t later, int, float* scores) const override {
    const int64_t passes = ceil_div(digits.count, 4);
    Ahead ahead = Ahead::of_lines(codes.block(later), passes * ceil_div(codes.bytes, kStep) * kBlock);
    int64_t s = 0;
    for (; s + 4 <= digits.count; s += 4) {
      states<4, 2>(first, rows, s, ahead, scores);
    }
    if (s + 2 <= digits.count) {
      states<2, 4>(first, rows, s, ahead, scores);
      s += 2;
    }
    if (s < digits.count) {
      states<1, 4>(first, rows, s, ahead, scores);
    }
  }

  template <int S, int R>
  void states(int64_t first, int rows, int64_t s, Ahead& ahead, float* scores) const {
    BlockSums<S> sums(rows);
    int r = 0;
    for (; r + R <= rows; r += R) {
      dots<S, R>(codes.row(first + r), s, ahead, r, sums);
    }
    for (; r < rows; ++r) {
      dots<S, 1>(codes.row(first + r), s, ahead, r, sums);
    }
    sums.scores(offset + 3 * s, rows, digits.step + s, scale + first, scores + s * kBlock);
  }

  template <int S, int R>
  void dots(const char* row, int64_t s, Ahead& ahead, int at, BlockSums<S>& sums) const {
    const int8_t* digit = digits.row(s, 0);
    __m512i acc[R][3 * S];
    for (auto& of_row : acc) {
      for (auto& a : of_row) {
        a = _mm512_setzero_si512();
      }
    }
    const auto step = [&](int64_t j, __mmask64 mask) __attribute__((always_inline)) {
      ahead.template step<R>();
      __m512i code[R];
      for (int r = 0; r < R; ++r) {
        code[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, row + r * codes.stride + j), _mm512_set1_epi8(-128));
      }
      for (int i = 0; i < 3 * S; ++i) {
        const __m512i d = held(_mm512_load_si512(digit + i * digits.stride + j));
        for (int r = 0; r < R; ++r) {
          acc[r][i] = _mm512_dpbusd_epi32(acc[r][i], code[r], d);
        }
      }
    };
    int64_t j = 0;
    for (; j + kStep <= codes.bytes; j += kStep) {
      step(j, ~uint64_t{0});
    }
    if (j < codes.bytes) {
      step(j, ~uint64_t{0} >> (kStep - (codes.bytes - j)));
    }
    for (int i = 0; i < 3 * S; ++i) {
      for (int r = 0; r < R; ++r) {
        sums.lanes[i][at + r] = acc[r][i];
      }
    }
  }
};

// Nibbles are unsigned codes + 8. A product of four of them with a digit's bytes fits 16 bits, so a second instruction
// applies the multipliers; the digits' sums per group take the 8 back.
struct MultiplierScorer final : Scorer {
  static constexpr int kColumns = 128;  // per 64 packed bytes

  ByteRows codes;
  const float* scale;
  Digits digits;
  int64_t packed, groups, group_stride;
  const int8_t* nibbles;     // digits in the order of the nibbles
  const int16_t* group_sum;  // [count, 3, group_stride], negated

  MultiplierScorer(const ByteRows& codes, const float* scale, const Digits& digits, Scratch& scratch)
      : codes(codes), scale(scale), digits(digits) {
    packed = round_up(digits.width, 64) / 2;
    groups = packed / 16;
    group_stride = round_up(groups, 32);
    nibbles = nibble_order(digits, scratch);
    auto* sums = scratch.fill<int16_t>(digits.count * 3 * group_stride, 0);
    for (int64_t i = 0; i < digits.count * 3; ++i) {
      for (int64_t j = 0; j < groups * 32; ++j) {
        sums[i * group_stride + j / 32] =
            static_cast<int16_t>(sums[i * group_stride + j / 32] - digits.rows[i * digits.stride + j]);
      }
    }
    group_sum = sums;
  }

  int64_t row_bytes() const override { return codes.bytes + 4; }

  void score(int64_t first, int rows, int64_t later, int, float* scores) const override {
    const int64_t passes = ceil_div(digits.count, 2);
    Ahead ahead = Ahead::of_lines(codes.block(later), passes * ceil_div(packed, kStep) * kBlock);
    int64_t s = 0;
    for (; s + 2 <= digits.count; s += 2) {
      states<2, 2>(first, rows, s, ahead, scores);
    }
    if (s < digits.count) {
      states<1, 2>(first, rows, s, ahead, scores);
    }
  }

  template <int S, int R>
  void states(int64_t first, int rows, int64_t s, Ahead& ahead, float* scores) const {
    BlockSums<S> sums(rows);
    int r = 0;
    for (; r + R <= rows; r += R) {
      dots<S, R>(codes.row(first + r), s, ahead, r, sums);
    }
    for (; r < rows; ++r) {
      dots<S, 1>(codes.row(first + r), s, ahead, r, sums);
    }
    sums.scores(nullptr, rows, digits.step + s, scale + first, scores + s * kBlock);
  }

  template <int S, int R>
  void dots(const char* row, int64_t s, Ahead& ahead, int at, BlockSums<S>& sums) const {
    // four multipliers of 64 packed bytes: low nibbles are groups 0 and 2, high ones 1 and 3
    const __m512i pick_low = lanes_of(0, 2), pick_high = lanes_of(1, 3), nibble = _mm512_set1_epi8(15);
    const int8_t* digit = nibbles + s * 3 * digits.stride;
    __m512i acc[R][3 * S];
    for (int r = 0; r < R; ++r) {
      start<S>(row + r * codes.stride + packed, s, acc[r]);
    }
    const auto step = [&](int64_t j, __mmask64 mask) __attribute__((always_inline)) {
      ahead.template step<R>();
      __m512i low[R], high[R], low_multiplier[R], high_multiplier[R];
      for (int r = 0; r < R; ++r) {
        const char* here = row + r * codes.stride;
        const __m512i both = held(_mm512_maskz_loadu_epi8(mask, here + j));
        low[r] = _mm512_and_si512(both, nibble);
        high[r] = _mm512_and_si512(_mm512_srli_epi32(both, 4), nibble);
        // a row ends in zeros up to 16 bytes: four bytes are there even when half of them are used
        const __m512i four = _mm512_set1_epi32(load_int32(here + packed + j / 16));
        low_multiplier[r] = _mm512_shuffle_epi8(four, pick_low);
        high_multiplier[r] = _mm512_shuffle_epi8(four, pick_high);
      }
      for (int i = 0; i < 3 * S; ++i) {
        const __m512i d0 = held(_mm512_load_si512(digit + i * digits.stride + 2 * j));
        const __m512i d1 = held(_mm512_load_si512(digit + i * digits.stride + 2 * j + kStep));
        for (int r = 0; r < R; ++r) {
          const __m512i zero = _mm512_setzero_si512();
          acc[r][i] = _mm512_dpwssd_epi32(acc[r][i], _mm512_dpbusd_epi32(zero, low[r], d0), low_multiplier[r]);
          acc[r][i] = _mm512_dpwssd_epi32(acc[r][i], _mm512_dpbusd_epi32(zero, high[r], d1), high_multiplier[r]);
        }
      }
    };
    int64_t j = 0;
    for (; j + kStep <= packed; j += kStep) {
      step(j, ~uint64_t{0});
    }
    if (j < packed) {
      step(j, ~uint64_t{0} >> 32);
    }
    for (int i = 0; i < 3 * S; ++i) {
      for (int r = 0; r < R; ++r) {
        sums.lanes[i][at + r] = acc[r][i];
      }
    }
  }

  // -8 sum_g m_g D_g
  template <int S>
  void start(const char* multipliers, int64_t s, __m512i* acc) const {
    for (int i = 0; i < 3 * S; ++i) {
      acc[i] = _mm512_setzero_si512();
    }
    for (int64_t g = 0; g < groups; g += 32) {
      const __mmask32 mask = groups - g < 32 ? ~uint32_t{0} >> (32 - (groups - g)) : ~uint32_t{0};
      const __m512i m = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, multipliers + g)), 3);
      for (int i = 0; i < 3 * S; ++i) {
        acc[i] = _mm512_dpwssd_epi32(acc[i], m, _mm512_load_si512(group_sum + (3 * s + i) * group_stride + g));
      }
    }
  }

  static __m512i lanes_of(int first, int second) {
    const int zeros = static_cast<int>(0x80808000);
    return _mm512_inserti64x4(_mm512_set1_epi32(zeros | first), _mm256_set1_epi32(zeros | second), 1);
  }
};

}  // namespace

const int8_t* nibble_order(const Digits& digits, Scratch& scratch) {
  auto* out = scratch.take<int8_t>(digits.count * 3 * digits.stride);
  for (int64_t at = 0; at < digits.count * 3 * digits.stride; at += 128) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int from = quarter == 1 ? 64 : quarter == 2 ? 32 : 32 * quarter;
      std::memcpy(out + at + 32 * quarter, digits.rows + at + from, 32);
    }
  }
  return out;
}

std::unique_ptr<Scorer> make_row_scale_scorer(const ByteRows& codes, const float* scale, const Digits& digits,
                                              int workers, Scratch& scratch) {
#ifdef __AMX_INT8__
  return make_row_scale_tiles(codes, scale, digits, workers, scratch);
#else
  (void)workers;
  return std::make_unique<RowScaleScorer>(codes, scale, digits, scratch);
#endif
}

std::unique_ptr<Scorer> make_multiplier_scorer(const ByteRows& codes, const float* scale, const Digits& digits,
                                               int workers, Scratch& scratch) {
#ifdef __AMX_INT8__
  if (digits.count > kFewStates) {
    return make_multiplier_tiles(codes, scale, digits, workers, scratch);
  }
#endif
  (void)workers;
  return std::make_unique<MultiplierScorer>(codes, scale, digits, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
