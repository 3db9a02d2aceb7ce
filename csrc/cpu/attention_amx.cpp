#ifdef __AMX_BF16__

#include <algorithm>
#include <atomic>

#include "attention_tiles.h"
#include "transpose.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int kSide = 16, kLine = 64, kTile = kSide * kLine;  // a tile: 16 rows of 64 bytes
constexpr int kDepth = 32;                                    // bf16 elements of a row of a tile

// gcc does not know that a tile load reads memory
void written() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Two fp32 as bf16, the second in the high half; rounded to nearest even. A NaN stays one if its low half is zero.
__m512i bf16_pair(__m512 low, __m512 high) {
  const auto rounded = [](__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  };
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_or_si512(_mm512_srli_epi32(rounded(low), 16), _mm512_and_si512(rounded(high), high_half));
}

// The lines of the next tile of keys, fetched a few at a time while this one is worked on: all have been asked for
// after steps of weight `total`. Not in bursts, which hold up loads behind them (`Ahead` has a figure).
class Lines {
 public:
  Lines(const KeyTile* tile, int64_t dim, int64_t total) : tile_(tile) {
    if (tile == nullptr || tile->count == 0) {
      return;
    }
    key_bytes_ = dim * bytes_of(tile->key_type);
    value_bytes_ = dim * bytes_of(tile->value_type);
    rows_ = 2 * tile->count;
    const int64_t lines = tile->count * ((key_bytes_ + kLine - 1) / kLine + (value_bytes_ + kLine - 1) / kLine);
    rate_ = lines * kOne / total + 1;
    at_ = tile->key[0];
    end_ = at_ + key_bytes_;
  }

  void step(int64_t weight) {
    for (credit_ += weight * rate_; credit_ >= kOne && row_ < rows_; credit_ -= kOne) {
      __builtin_prefetch(at_, 0, 2);
      at_ += kLine;
      if (at_ >= end_ && ++row_ < rows_) {
        const bool key = row_ < tile_->count;
        at_ = key ? tile_->key[row_] : tile_->value[row_ - tile_->count];
        end_ = at_ + (key ? key_bytes_ : value_bytes_);
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64, kOne = 1 << 16;
  const KeyTile* tile_;
  int64_t key_bytes_ = 0, value_bytes_ = 0, rate_ = 0, credit_ = 0;
  int row_ = 0, rows_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

// Weights of one step, about the cycles it takes.
constexpr int kInterleaveStep = 2, kScoreStep = 64, kWeighStep = 24, kMixStep = 64;

// Scores with keys as rows and queries as lanes, so that rows of the cache are tiles as they lie there. The weights are
// transposed, the values interleaved in pairs of rows.
struct AmxMath final : TileMath {
  int64_t dim, stride, steps;
  float scale, cap;

  explicit AmxMath(const BlockAttention& args)
      : dim(args.q.size[3]),
        stride(ceil_multiple(dim, kDepth)),
        steps(stride / kDepth),
        scale(args.scale),
        cap(args.soft_cap) {}

  int64_t sums_stride() const override { return stride; }
  int keys() const override { return kMostKeys; }

  // interleaving goes by 128 bits: columns 0 .. 3 of each eight come first
  int64_t column(int64_t d) const override {
    const int64_t in = d % kDepth;
    return d - in + in % 8 / 4 * kSide + in / 8 * 4 + in % 4;
  }

  int64_t query_bytes() const override { return kMostRows / kSide * steps * kTile; }

  void pack(const char* const* rows, int count, char* packed) const override {
    std::fill_n(packed, ceil_multiple(count, kSide) * stride * 2, 0);
    for (int r = 0; r < count; ++r) {
      char* to = packed + r / kSide * steps * kTile + r % kSide * 4;
      for (int64_t d = 0; d < dim; d += 2, to += kLine) {
        std::memcpy(to, rows[r] + 2 * d, d + 1 < dim ? 4 : 2);
      }
    }
  }

  int64_t scratch_bytes() const override {
    return 2 * kMostKeys * stride * 2 + 2 * kSide * kMostKeys * 4 + kMostRows * kMostKeys * 2 + 2 * stride * 4;
  }

  void enter() const override {
    struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t column_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.column_bytes[i] = kLine;
      config.rows[i] = kSide;
    }
    written();
    _tile_loadconfig(&config);
  }
  void leave() const override { _tile_release(); }

  struct Rows {
    const char* data;
    int64_t stride;
  };

  void add(const KeyTile& tile, const KeyTile* next, const char* packed, int rows, char* scratch,
           const Partial& out) const override {
    char* keys = scratch;                                // [keys, stride] bf16, where they cannot stay in the cache
    char* values = keys + kMostKeys * stride * 2;        // tiles [keys / 32, stride / 16]
    char* weights = values + kMostKeys * stride * 2;     // tiles [rows / 16, keys / 32]
    char* scores = weights + kMostRows * kMostKeys * 2;  // [2, keys, 16] fp32
    auto* spare = reinterpret_cast<float*>(scores + 2 * kSide * kMostKeys * 4);
    const int depth = static_cast<int>(ceil_multiple(tile.count, kDepth)) / kDepth;  // tiles of 32 keys
    const int blocks = (rows + kSide - 1) / kSide, twice = (blocks + 1) / 2;
    Lines next_lines(next, dim,
                     depth * (kSide * steps * kInterleaveStep + twice * steps * (kScoreStep + kMixStep) +
                              blocks * kSide * kWeighStep));
    Rows at[kMostKeys / kSide];
    for (int i = 0; i < 2 * depth; ++i) {
      at[i] = key_rows(tile, i * kSide, keys + i * kSide * stride * 2, spare);
    }
    interleave(tile, depth, values, spare, next_lines);
    written();
    for (int block = 0; block < blocks; block += 2) {
      const char* queries = packed + block * steps * kTile;
      const bool two = block + 1 < blocks;
      for (int i = 0; i < depth; ++i) {
        two ? score<true>(at + 2 * i, queries, scores + 2 * i * kTile, next_lines)
            : score<false>(at + 2 * i, queries, scores + 2 * i * kTile, next_lines);
      }
      written();
      for (int b = block; b < block + 1 + two; ++b) {
        weigh(tile, b * kSide, rows, depth, reinterpret_cast<float*>(scores) + (b - block) * kSide * kMostKeys,
              weights + (b - block) * kMostKeys / kDepth * kTile, out, next_lines);
      }
      written();
      for (int64_t d = 0; d < stride; d += 2 * kSide) {
        float* sums = out.sums + block * kSide * stride + d;
        two ? mix<true>(weights, values + d / kSide * kTile, depth, sums, next_lines)
            : mix<false>(weights, values + d / kSide * kTile, depth, sums, next_lines);
      }
      written();
    }
  }

  // Sixteen keys: where they lie, if evenly and in whole lines, else in `copy`.
  Rows key_rows(const KeyTile& tile, int first, char* copy, float* spare) const {
    const char* const* key = tile.key + first;
    if (tile.key_type == DType::bf16 && dim == stride && first + kSide <= tile.count) {
      const int64_t apart = key[1] - key[0];
      bool even = true;
      for (int i = 2; i < kSide; ++i) {
        even &= key[i] - key[i - 1] == apart;
      }
      if (even) {
        return {key[0], apart};
      }
    }
    for (int i = 0; i < kSide; ++i) {
      char* to = copy + i * stride * 2;
      if (first + i < tile.count) {
        narrow(key[i], tile.key_type, to, spare);
      } else {
        std::fill_n(to, stride * 2, 0);
      }
    }
    return {copy, stride * 2};
  }

  // One row as bf16, which holds every fp8, and zeros.
  void narrow(const char* row, DType type, char* to, float* spare) const {
    if (type == DType::bf16) {
      std::memcpy(to, row, dim * 2);
      std::fill_n(to + dim * 2, (stride - dim) * 2, 0);
      return;
    }
    std::fill_n(spare, stride, 0.0f);
    widen(row, type, dim, spare);
    for (int64_t d = 0; d < stride; d += kSide) {
      const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_loadu_ps(spare + d)), 16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * d), _mm512_cvtepi32_epi16(bits));
    }
  }

  void interleave(const KeyTile& tile, int depth, char* values, float* spare, Lines& lines) const {
    const bool as_is = tile.value_type == DType::bf16 && dim == stride;
    char* copies[2] = {reinterpret_cast<char*>(spare + stride), reinterpret_cast<char*>(spare + stride) + stride * 2};
    for (int i = 0; i < depth * kDepth; i += 2) {
      const char* row[2];
      for (int j = 0; j < 2; ++j) {
        row[j] = copies[j];
        if (i + j >= tile.count) {
          std::fill_n(copies[j], stride * 2, 0);
        } else if (as_is) {
          row[j] = tile.value[i + j];
        } else {
          narrow(tile.value[i + j], tile.value_type, copies[j], spare);
        }
      }
      char* to = values + i / kDepth * (stride / kSide) * kTile + i % kDepth / 2 * kLine;
      for (int64_t d = 0; d < stride; d += kDepth, to += 2 * kTile) {
        const __m512i a = _mm512_loadu_si512(row[0] + 2 * d), b = _mm512_loadu_si512(row[1] + 2 * d);
        lines.step(kInterleaveStep);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + kTile, _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  // 32 keys times 16 queries, or 32.
  template <bool two>
  void score(const Rows* rows, const char* queries, char* scores, Lines& lines) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; ++k) {
      _tile_loadd(4, rows[0].data + k * kLine, rows[0].stride);
      _tile_loadd(5, rows[1].data + k * kLine, rows[1].stride);
      _tile_loadd(6, queries + k * kTile, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      lines.step(kScoreStep);
      if constexpr (two) {
        _tile_loadd(7, queries + (steps + k) * kTile, kLine);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, scores, kLine);
    _tile_stored(1, scores + kTile, kLine);
    if constexpr (two) {
      _tile_stored(2, scores + kMostKeys * kLine, kLine);
      _tile_stored(3, scores + kMostKeys * kLine + kTile, kLine);
    }
  }

  // Scores of 16 queries [keys, 16] to weights exp(score - top), as tiles [keys / 32] with queries as rows.
  void weigh(const KeyTile& tile, int r, int rows, int depth, float* x, char* weights, const Partial& out,
             Lines& lines) const {
    const __m512 lowest = _mm512_set1_ps(-kInfinity), factor = _mm512_set1_ps(scale * tile.key_scale);
    __m512i first = _mm512_setzero_si512(), last = _mm512_set1_epi32(tile.count);
    if (tile.first != nullptr) {
      const auto mask = static_cast<__mmask16>(rows - r < kSide ? (1 << (rows - r)) - 1 : 0xffff);
      first = _mm512_maskz_loadu_epi32(mask, tile.first + r);
      last = _mm512_maskz_loadu_epi32(mask, tile.last + r);
    }
    const __m512 before = _mm512_loadu_ps(out.top + r);
    __m512 top = before;
    for (int i = 0; i < tile.count; ++i) {
      __m512 s = _mm512_mul_ps(_mm512_load_ps(x + i * kSide), factor);
      if (cap != 0) {
        _mm512_store_ps(x + i * kSide, s);
        cap_lanes(x + i * kSide, cap);
        s = _mm512_load_ps(x + i * kSide);
      }
      if (tile.first != nullptr) {
        const __m512i at = _mm512_set1_epi32(i);
        s = _mm512_mask_mov_ps(lowest, _mm512_cmple_epi32_mask(first, at) & _mm512_cmplt_epi32_mask(at, last), s);
      }
      _mm512_store_ps(x + i * kSide, s);
      top = _mm512_max_ps(s, top);  // the second where one is NaN
    }
    for (int i = tile.count; i < depth * kDepth; ++i) {
      _mm512_store_ps(x + i * kSide, lowest);
    }
    const __mmask16 none = _mm512_cmp_ps_mask(top, lowest, _CMP_EQ_OQ);
    const __m512 shift = _mm512_mask_mov_ps(top, none, _mm512_setzero_ps());
    const __m512 value_scale = _mm512_set1_ps(tile.value_scale);
    // a scale that is not finite says nothing of keys that are not seen
    const auto scaled = [&](__m512 score, __m512 weight) {
      return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(score, lowest, _CMP_NEQ_UQ), weight, value_scale);
    };
    __m512 total = _mm512_setzero_ps();
    for (int step = 0; step < depth; ++step) {
      __m512 pairs[kSide];
      for (int j = 0; j < kSide; ++j) {
        const float* at = x + (step * kDepth + 2 * j) * kSide;
        const __m512 first_score = _mm512_load_ps(at), second_score = _mm512_load_ps(at + kSide);
        const __m512 a = exp_lanes(_mm512_sub_ps(first_score, shift));
        const __m512 b = exp_lanes(_mm512_sub_ps(second_score, shift));
        total = _mm512_add_ps(total, _mm512_add_ps(a, b));
        lines.step(kWeighStep);
        pairs[j] = _mm512_castsi512_ps(bf16_pair(scaled(first_score, a), scaled(second_score, b)));
      }
      transpose(pairs, kSide, reinterpret_cast<float*>(weights + step * kTile), kSide);
    }
    alignas(64) float decay[kSide];
    const __m512 of_rows = exp_lanes(_mm512_sub_ps(before, shift));
    _mm512_store_ps(decay, of_rows);
    _mm512_storeu_ps(out.total + r, _mm512_fmadd_ps(_mm512_loadu_ps(out.total + r), of_rows, total));
    _mm512_storeu_ps(out.top + r, top);
    for (unsigned changed = _mm512_cmp_ps_mask(of_rows, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ); changed != 0;
         changed &= changed - 1) {
      const int i = __builtin_ctz(changed);
      float* row = out.sums + (r + i) * stride;
      for (int64_t d = 0; d < stride; d += kSide) {
        _mm512_storeu_ps(row + d, _mm512_mul_ps(_mm512_loadu_ps(row + d), _mm512_set1_ps(decay[i])));
      }
    }
  }

  // Adds weights times values: 16 queries, or 32, and 32 columns.
  template <bool two>
  void mix(const char* weights, const char* values, int depth, float* sums, Lines& lines) const {
    const int64_t row = stride * 4, across = stride / kSide * kTile;
    constexpr int64_t kBlock = kMostKeys / kDepth * kTile;
    _tile_loadd(0, sums, row);
    _tile_loadd(1, sums + kSide, row);
    if constexpr (two) {
      _tile_loadd(2, sums + kSide * stride, row);
      _tile_loadd(3, sums + kSide * stride + kSide, row);
    }
    for (int k = 0; k < depth; ++k) {
      _tile_loadd(4, weights + k * kTile, kLine);
      _tile_loadd(6, values + k * across, kLine);
      _tile_loadd(7, values + k * across + kTile, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      lines.step(kMixStep);
      if constexpr (two) {
        _tile_loadd(5, weights + kBlock + k * kTile, kLine);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, row);
    _tile_stored(1, sums + kSide, row);
    if constexpr (two) {
      _tile_stored(2, sums + kSide * stride, row);
      _tile_stored(3, sums + kSide * stride + kSide, row);
    }
  }
};

}  // namespace

std::unique_ptr<TileMath> make_tile_math(const BlockAttention& args) {
  return std::make_unique<AmxMath>(args);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
