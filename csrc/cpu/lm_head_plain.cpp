#ifndef __AVX512VNNI__

#include <vector>

#include "lm_head_scorer.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// Integer formats without byte instructions: a row's codes (times their multipliers) and the digits as int16, which
// compilers turn into multiply-adds.
struct PlainScorer final : Scorer {
  ScreenFormat format;
  ByteRows codes;
  Tensor scale;
  Digits digits;
  const int16_t* wide;  // [count, 3, stride]
  int16_t* memory;      // [workers, stride]

  PlainScorer(ScreenFormat format, const ByteRows& codes, const Tensor& scale, const Digits& digits, int workers,
              Scratch& scratch)
      : format(format), codes(codes), scale(scale), digits(digits) {
    const int64_t size = digits.count * 3 * digits.stride;
    auto* copy = scratch.take<int16_t>(size);
    for (int64_t i = 0; i < size; ++i) {
      copy[i] = digits.rows[i];
    }
    wide = copy;
    memory = scratch.take<int16_t>(workers * digits.stride);
  }

  int64_t row_bytes() const override { return codes.bytes + 8; }

  void score(int64_t first, int rows, int64_t, int worker, float* scores) const override {
    int16_t* code = memory + worker * digits.stride;
    const bool grouped = format == ScreenFormat::int8_g64 || format == ScreenFormat::int6_g64;
    for (int r = 0; r < rows; ++r) {
      unpack(codes.row(first + r), code);
      for (int64_t s = 0; s < digits.count; ++s) {
        const double score = grouped ? grouped_score(code, scale.row<const float>(first + r), s)
                                     : total(code, s, 0, digits.width) * digits.step[s] *
                                           static_cast<double>(scale.row<const float>(first)[r]);
        scores[s * kBlock + r] = static_cast<float>(score);
      }
    }
  }

  double grouped_score(const int16_t* code, const float* scales, int64_t s) const {
    double sum = 0.0;
    for (int64_t at = 0; at < digits.width; at += 64) {
      const int64_t left = digits.width - at;
      sum += total(code, s, at, left < 64 ? left : 64) * digits.step[s] * scales[at / 64];
    }
    return sum;
  }

  double total(const int16_t* code, int64_t s, int64_t at, int64_t size) const {
    int32_t sum[3] = {};
    for (int digit = 0; digit < 3; ++digit) {
      const int16_t* d = wide + (3 * s + digit) * digits.stride;
      int32_t dot = 0;
      for (int64_t i = at; i < at + size; ++i) {
        dot += static_cast<int32_t>(code[i]) * d[i];
      }
      sum[digit] = dot;
    }
    return static_cast<double>(sum[0] + int64_t{256} * sum[1] + int64_t{65536} * sum[2]);
  }

  void unpack(const char* row, int16_t* code) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(row);
    if (format != ScreenFormat::int4_g32 && format != ScreenFormat::int6_g64) {
      for (int64_t i = 0; i < digits.width; ++i) {
        code[i] = static_cast<int8_t>(bytes[i]);
      }
      return;
    }
    const bool six = format == ScreenFormat::int6_g64;
    const int64_t columns = round_up(digits.width, six ? 128 : 64);
    const uint8_t* behind = bytes + columns / 2;  // planes of high bits, or multipliers
    for (int64_t at = 0; at < columns; at += 64) {
      for (int j = 0; j < 32; ++j) {
        code[at + j] = bytes[at / 2 + j] & 15;
        code[at + 32 + j] = bytes[at / 2 + j] >> 4;
      }
    }
    for (int64_t at = 0; at < columns; at += 32) {
      for (int j = 0; j < 32; ++j) {
        const int high = six ? (behind[at / 128 * 32 + j] >> (2 * (at / 32 % 4)) & 3) * 16 - 32 : -8;
        code[at + j] = static_cast<int16_t>((code[at + j] + high) * (six ? 1 : behind[at / 32]));
      }
    }
  }
};

Tensor row_scales(const float* scale) {
  Tensor out;
  out.data = const_cast<float*>(scale);
  out.stride[0] = 1;
  return out;
}

}  // namespace

std::unique_ptr<Scorer> make_row_scale_scorer(const ByteRows& codes, const float* scale, const Digits& digits,
                                              int workers, Scratch& scratch) {
  return std::make_unique<PlainScorer>(ScreenFormat::int8, codes, row_scales(scale), digits, workers, scratch);
}

std::unique_ptr<Scorer> make_multiplier_scorer(const ByteRows& codes, const float* scale, const Digits& digits,
                                               int workers, Scratch& scratch) {
  return std::make_unique<PlainScorer>(ScreenFormat::int4_g32, codes, row_scales(scale), digits, workers, scratch);
}

std::unique_ptr<Scorer> make_grouped_scorer(ScreenFormat format, const ByteRows& codes, const Tensor& scale,
                                            const Digits& digits, int workers, Scratch& scratch) {
  return std::make_unique<PlainScorer>(format, codes, scale, digits, workers, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
