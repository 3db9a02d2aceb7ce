#ifdef __AVX512VNNI__

#include "lm_head_grouped.h"

#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// Scores of rows with one scale per 64 columns. Per lane the codes' products with the three digits make one int32 (4 x
// 127 x 2^22 and 8 x 31 x 2^22 fit, and what overflows on the way comes back), which a multiply-add scales.
template <class Codes>
struct GroupedScorer final : Scorer {
  Codes codes;
  Tensor scale;
  Digits digits;
  int64_t lanes;
  const int8_t* ordered;  // digits in the order of the codes
  const int32_t* offset;  // [count, lanes], what the codes' offset adds

  GroupedScorer(const ByteRows& rows, const Tensor& scale, const Digits& from, Scratch& scratch)
      : codes{rows, from.width}, scale(scale), digits(from) {
    ordered = Codes::kNibbles ? nibble_order(digits, scratch) : digits.rows;
    lanes = digits.stride / Codes::kLaneColumns;
    auto* sums = scratch.take<int32_t>(digits.count * lanes);
    for (int64_t s = 0; s < digits.count; ++s) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        int32_t sum = 0;
        for (int part = 0; part < Codes::kLaneColumns / 4; ++part) {
          const int64_t at = lane / 16 * 16 * Codes::kLaneColumns + part * 64 + lane % 16 * 4;
          for (int j = 0; j < 4; ++j) {
            for (int digit = 0; digit < 3; ++digit) {
              sum += ordered[(3 * s + digit) * digits.stride + at + j] * (1 << (8 * digit));
            }
          }
        }
        sums[s * lanes + lane] = sum * Codes::kOffset;
      }
    }
    offset = sums;
  }

  int64_t row_bytes() const override { return codes.rows.bytes + scale.size[1] * 4 + 4; }

  void score(int64_t first, int rows, int64_t later, int, float* scores) const override {
    const int64_t passes = ceil_div(digits.count, 2);
    Ahead ahead = Ahead::of_lines(codes.rows.block(later), passes * codes.steps() * Codes::kParts * kBlock);
    int64_t s = 0;
    for (; s + 2 <= digits.count; s += 2) {
      states<2>(first, rows, s, ahead, scores);
    }
    if (s < digits.count) {
      states<1>(first, rows, s, ahead, scores);
    }
  }

  template <int S>
  void states(int64_t first, int rows, int64_t s, Ahead& ahead, float* scores) const {
    int r = 0;
    for (; r + 2 <= rows; r += 2) {
      dots<S, 2>(first + r, s, ahead, scores + s * kBlock + r);
    }
    if (r < rows) {
      dots<S, 1>(first + r, s, ahead, scores + s * kBlock + r);
    }
  }

  template <int S, int R>
  void dots(int64_t first, int64_t s, Ahead& ahead, float* scores) const {
    __m512 acc[R][S];
    for (auto& of_row : acc) {
      for (auto& a : of_row) {
        a = _mm512_setzero_ps();
      }
    }
    __m512 step[S];
    for (int i = 0; i < S; ++i) {
      step[i] = _mm512_set1_ps(static_cast<float>(digits.step[s + i]));
    }
    for (int64_t k = 0; k < codes.steps(); ++k) {
      ahead.template step<R * Codes::kParts>();
      __m512i code[R][Codes::kParts];
      __m512 scale_of[R];
      for (int r = 0; r < R; ++r) {
        codes.load(first + r, k, code[r]);
        scale_of[r] = codes.scales(scale.row<const float>(first + r), k);
      }
      for (int i = 0; i < S; ++i) {
        const int8_t* digit = ordered + (s + i) * 3 * digits.stride + k * Codes::kParts * 64;
        const __m512i taken = _mm512_load_si512(offset + (s + i) * lanes + 16 * k);
        for (int r = 0; r < R; ++r) {
          __m512i sum[3];
          for (int d = 0; d < 3; ++d) {
            sum[d] = _mm512_setzero_si512();
            for (int part = 0; part < Codes::kParts; ++part) {
              sum[d] =
                  _mm512_dpbusd_epi32(sum[d], code[r][part], _mm512_load_si512(digit + d * digits.stride + part * 64));
            }
          }
          const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sum[2], 8), sum[1]);
          const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high, 8), _mm512_sub_epi32(sum[0], taken));
          // the step before the scale: large rows of tiny states would overflow without it
          const __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(total), step[i]);
          acc[r][i] = _mm512_fmadd_ps(part, scale_of[r], acc[r][i]);
        }
      }
    }
    for (int i = 0; i < S; ++i) {
      for (int r = 0; r < R; ++r) {
        scores[i * kBlock + r] = _mm512_reduce_add_ps(acc[r][i]);
      }
    }
  }
};

struct Int8Codes {
  static constexpr bool kNibbles = false;
  static constexpr int kParts = 1, kLaneColumns = 4, kOffset = 128;

  ByteRows rows;
  int64_t width;

  int64_t steps() const { return ceil_div(width, 64); }

  void load(int64_t row, int64_t k, __m512i (&code)[1]) const {
    const int64_t left = width - 64 * k;
    const __mmask64 mask = left < 64 ? ~uint64_t{0} >> (64 - left) : ~uint64_t{0};
    code[0] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, rows.row(row) + 64 * k), _mm512_set1_epi8(-128));
  }

  __m512 scales(const float* scale, int64_t k) const { return _mm512_set1_ps(scale[k]); }
};

struct Int6Codes {
  static constexpr bool kNibbles = true;
  static constexpr int kParts = 2, kLaneColumns = 8, kOffset = 32;

  ByteRows rows;
  int64_t width;

  int64_t steps() const { return ceil_div(width, 128); }

  void load(int64_t row, int64_t k, __m512i (&code)[2]) const {
    unpack_int6(rows.row(row) + 64 * k, rows.row(row) + 64 * steps() + 32 * k, code);
  }

  __m512 scales(const float* scale, int64_t k) const {
    // the second half of the last 128 columns may have no scale, and then no codes
    const float second = 128 * k + 64 < width ? scale[2 * k + 1] : 0.0f;
    return _mm512_insertf32x8(_mm512_set1_ps(scale[2 * k]), _mm256_set1_ps(second), 1);
  }
};

}  // namespace

std::unique_ptr<Scorer> make_grouped_scorer(ScreenFormat format, const ByteRows& codes, const Tensor& scale,
                                            const Digits& digits, int workers, Scratch& scratch) {
#ifdef __AMX_INT8__
  if (digits.count > kFewStates) {
    return make_grouped_tiles(format, codes, scale, digits, workers, scratch);
  }
#endif
  (void)workers;
  if (format == ScreenFormat::int8_g64) {
    return std::make_unique<GroupedScorer<Int8Codes>>(codes, scale, digits, scratch);
  }
  return std::make_unique<GroupedScorer<Int6Codes>>(codes, scale, digits, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
