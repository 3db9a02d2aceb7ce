#ifdef __AMX_INT8__

#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

}  // namespace

void TileScorer::enter() const {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.column_bytes[i] = kTileBytes;
    config.rows[i] = kTileRows;
  }
  written();
  _tile_loadconfig(&config);
}

void TileScorer::leave() const {
  _tile_release();
}

TileColumns make_tile_columns(int64_t row_bytes, int64_t vectors, Scratch& scratch) {
  const int64_t steps = ceil_div(row_bytes, kTileBytes), tiles = ceil_div(vectors, 16);
  return {steps, tiles, scratch.fill<char>(tiles * steps * kTileSize, 0)};
}

void set_column(const TileColumns& columns, int64_t vector, const char* bytes, int64_t size) {
  char* to = columns.data + vector / 16 * columns.steps * kTileSize + vector % 16 * 4;
  int64_t at = 0;
  for (; at + 4 <= size; at += 4, to += kTileBytes) {
    std::memcpy(to, bytes + at, 4);
  }
  std::memcpy(to, bytes + at, size - at);
}

TileDigits make_tile_digits(const Digits& from, Scratch& scratch) {
  TileDigits out{};
  out.count = from.count;
  const int64_t last = out.blocks() - 1;
  static_cast<TileColumns&>(out) = make_tile_columns(from.width, 48 * last + 16 * out.tiles_of(last), scratch);
  auto* step = scratch.fill<double>(round_up(from.count, 16), 0.0);
  for (int64_t s = 0; s < from.count; ++s) {
    const int64_t block = s / 16;
    step[s] = from.step[s];
    for (int digit = 0; digit < 3; ++digit) {
      set_column(out, 48 * block + digit * out.states(block) + s % 16,
                 reinterpret_cast<const char*>(from.row(s, digit)), from.width);
    }
  }
  out.step = step;
  return out;
}

void close_tiles(const TileDigits& digits, int64_t block, const int32_t* sums, const int32_t* high, int64_t sum_stride,
                 const float* scale, int rows, float* scores) {
  const auto whole = [&](int64_t at) {
    const __m512i low = _mm512_loadu_si512(sums + at);
    return high == nullptr ? low : _mm512_add_epi32(low, _mm512_slli_epi32(_mm512_loadu_si512(high + at), 6));
  };
  const int states = digits.states(block);
  constexpr int kFew = 8;
  if (states <= kFew) {
    // vectors of rows: the sums are transposed
    alignas(64) int32_t columns[2 * 16][16];
    for (int t = 0; t < digits.tiles_of(block); ++t) {
      __m512 x[16];
      for (int r = 0; r < 16; ++r) {
        x[r] = _mm512_castsi512_ps(whole(r * sum_stride + t * 16));
      }
      transpose(x, 3 * states - 16 * t, reinterpret_cast<float*>(columns[16 * t]), 16);
    }
    const __m512 scale_of = _mm512_maskz_loadu_ps(static_cast<__mmask16>(0xffff >> (16 - rows)), scale);
    for (int s = 0; s < states; ++s) {
      const __m512d step = _mm512_set1_pd(digits.step[16 * block + s]), steps[2] = {step, step};
      const __m512 out = whole_scores(_mm512_load_si512(columns[s]), _mm512_load_si512(columns[states + s]),
                                      _mm512_load_si512(columns[2 * states + s]), steps, scale_of);
      _mm512_storeu_ps(scores + s * kBlock, out);
    }
    return;
  }
  // vectors of states: the scores are transposed
  const __m512d step[2] = {_mm512_load_pd(digits.step + 16 * block), _mm512_load_pd(digits.step + 16 * block + 8)};
  __m512 out[16];
  for (int r = 0; r < 16; ++r) {
    const int64_t at = r * sum_stride;
    out[r] = whole_scores(whole(at), whole(at + states), whole(at + 2 * states), step,
                          _mm512_set1_ps(scale[r < rows ? r : 0]));
  }
  transpose(out, states, scores, kBlock);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
