#ifdef __AMX_INT8__

#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// One step along the columns for two times sixteen rows (tiles 4, 5) and one or two tiles of digits (6, 7).
template <bool two_rows, bool two_columns>
void multiply(const char* a0, const char* a1, int64_t a_stride, const int8_t* b0, const int8_t* b1) {
  _tile_loadd(6, b0, kTileBytes);
  _tile_loadd(4, a0, a_stride);
  _tile_dpbssd(0, 4, 6);
  if constexpr (two_rows) {
    _tile_loadd(5, a1, a_stride);
    _tile_dpbssd(1, 5, 6);
  }
  if constexpr (two_columns) {
    _tile_loadd(7, b1, kTileBytes);
    _tile_dpbssd(2, 4, 7);
    if constexpr (two_rows) {
      _tile_dpbssd(3, 5, 7);
    }
  }
}

// The rows' products with the digits of steps begin .. end - 1 (the rows start at `begin`) at tile t, and t + 1, of
// sums[16 or 32, stride]; all but the first steps add to what is there.
template <bool two_rows, bool two_columns>
void sum_tiles(const TileDigits& digits, int64_t t, int64_t begin, int64_t end, const TileRows& first,
               const TileRows& second, Ahead& ahead, int32_t* sums, int64_t sum_stride) {
  const int64_t bytes = sum_stride * 4;
  int32_t* out = sums + t * 16;
  if (begin == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, bytes);
    if constexpr (two_rows) {
      _tile_loadd(1, out + 16 * sum_stride, bytes);
    }
    if constexpr (two_columns) {
      _tile_loadd(2, out + 16, bytes);
      if constexpr (two_rows) {
        _tile_loadd(3, out + 16 + 16 * sum_stride, bytes);
      }
    }
  }
  const int64_t whole = end - begin - (first.tail != nullptr);
  for (int64_t k = 0; k < whole; ++k) {
    ahead.step();
    multiply<two_rows, two_columns>(first.data + k * first.step, second.data + k * second.step, first.stride,
                                    digits.tile(t, begin + k), digits.tile(t + two_columns, begin + k));
  }
  if (first.tail != nullptr) {
    multiply<two_rows, two_columns>(first.tail, second.tail, kTileBytes, digits.tile(t, end - 1),
                                    digits.tile(t + two_columns, end - 1));
  }
  _tile_stored(0, out, bytes);
  if constexpr (two_rows) {
    _tile_stored(1, out + 16 * sum_stride, bytes);
  }
  if constexpr (two_columns) {
    _tile_stored(2, out + 16, bytes);
    if constexpr (two_rows) {
      _tile_stored(3, out + 16 + 16 * sum_stride, bytes);
    }
  }
}

template <bool two_rows>
void sum_all_tiles(const TileDigits& digits, int64_t begin, int64_t end, const TileRows& first, const TileRows& second,
                   Ahead& ahead, int32_t* sums, int64_t sum_stride) {
  int64_t t = 0;
  for (; t + 2 <= digits.tiles; t += 2) {
    sum_tiles<two_rows, true>(digits, t, begin, end, first, second, ahead, sums, sum_stride);
  }
  if (t < digits.tiles) {
    sum_tiles<two_rows, false>(digits, t, begin, end, first, second, ahead, sums, sum_stride);
  }
}

struct RowScaleTiles final : TileScorer {
  ByteRows codes;
  const float* scale;
  TileDigits digits;
  int64_t sum_stride, whole, rest, worker_bytes;
  char* memory;

  RowScaleTiles(const ByteRows& codes, const float* scale, const Digits& from, int workers, Scratch& scratch)
      : codes(codes), scale(scale), digits(make_tile_digits(from, scratch)) {
    sum_stride = digits.tiles * 16;
    whole = codes.bytes / kTileBytes;
    rest = codes.bytes % kTileBytes;
    worker_bytes = sums_bytes() + 2 * kTileSize + digits.steps * kTileSize;
    memory = scratch.fill<char>(workers * worker_bytes, 0);
  }

  int64_t sums_bytes() const { return (kBlock * sum_stride + 32) * 4; }
  int64_t row_bytes() const override { return codes.bytes + 8; }

  void score(int64_t first, int rows, int64_t next, int worker, float* scores) const override {
    char* mine = memory + worker * worker_bytes;
    auto* sums = reinterpret_cast<int32_t*>(mine);
    char* tails = mine + sums_bytes();
    Ahead ahead(codes.block(next), ceil_div(digits.tiles, 2) * whole);
    if (rows == kBlock) {
      sum_all_tiles<true>(digits, 0, digits.steps, tile_rows(first, tails), tile_rows(first + 16, tails + kTileSize),
                          ahead, sums, sum_stride);
    } else {
      for (int r = 0; r < rows; r += 16) {
        const TileRows here =
            rows - r < 16 ? copied_rows(first + r, rows - r, tails + 2 * kTileSize) : tile_rows(first + r, tails);
        sum_all_tiles<false>(digits, 0, digits.steps, here, here, ahead, sums + r * sum_stride, sum_stride);
      }
    }
    for (int64_t block = 0; block < digits.blocks(); ++block) {
      for (int r = 0; r < rows; r += 16) {
        close_tiles(digits, block, sums + r * sum_stride + block * 48, nullptr, sum_stride, scale + first + r,
                    rows - r < 16 ? rows - r : 16, scores + block * 16 * kBlock + r);
      }
    }
  }

  TileRows tile_rows(int64_t first, char* tail) const {
    // what lies behind a row in its last tile meets digits that are zero
    for (int r = 0; r < (rest != 0 ? kTileRows : 0); ++r) {
      std::memcpy(tail + r * kTileBytes, codes.row(first + r) + whole * kTileBytes, rest);
    }
    written();
    return {codes.row(first), codes.stride, kTileBytes, rest != 0 ? tail : nullptr};
  }

  TileRows copied_rows(int64_t first, int rows, char* to) const {
    for (int r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < digits.steps; ++k) {
        std::memcpy(to + k * kTileSize + r * kTileBytes, codes.row(first + r) + k * kTileBytes,
                    k < whole ? kTileBytes : rest);
      }
    }
    written();
    return {to, kTileBytes, kTileSize, nullptr};
  }
};

// code * multiplier = high * 64 + low with both in int8.
struct Planes {
  alignas(64) int8_t low[128][16], high[128][16];

  constexpr Planes() : low(), high() {
    for (int m = 0; m < 128; ++m) {
      for (int code = 0; code < 16; ++code) {
        const int whole = m * (code - 8), rest = ((whole + 32) & 63) - 32;
        low[m][code] = static_cast<int8_t>(rest);
        high[m][code] = static_cast<int8_t>((whole - rest) >> 6);
      }
    }
  }
};

constexpr Planes kPlanes;

struct MultiplierTiles final : TileScorer {
  static constexpr int64_t kSteps = 8;  // unpacked at once: both planes stay in the first-level cache

  ByteRows codes;
  const float* scale;
  TileDigits digits;
  int64_t sum_stride, packed, worker_bytes;
  char* memory;

  MultiplierTiles(const ByteRows& codes, const float* scale, const Digits& from, int workers, Scratch& scratch)
      : codes(codes), scale(scale), digits(make_tile_digits(from, scratch)) {
    sum_stride = digits.tiles * 16;
    packed = digits.steps * 32;
    worker_bytes = sums_bytes() + 2 * kSteps * kTileSize;
    memory = scratch.fill<char>(workers * worker_bytes, 0);
  }

  int64_t sums_bytes() const { return (kBlock * sum_stride + 32) * 4; }
  int64_t row_bytes() const override { return codes.bytes + 4; }

  void score(int64_t first, int rows, int64_t next, int worker, float* scores) const override {
    char* mine = memory + worker * worker_bytes;
    auto* sums = reinterpret_cast<int32_t*>(mine);
    char* low = mine + sums_bytes();
    char* high = low + kSteps * kTileSize;
    Ahead ahead(codes.block(next), 2 * ceil_div(digits.tiles, 2) * digits.steps);
    for (int r = 0; r < rows; r += kTileRows) {
      const int here = rows - r < kTileRows ? rows - r : kTileRows;
      for (int64_t begin = 0; begin < digits.steps; begin += kSteps) {
        const int64_t end = begin + kSteps < digits.steps ? begin + kSteps : digits.steps;
        for (int64_t k = begin; k < end; ++k) {
          const int64_t at = (k - begin) * kTileSize;
          for (int i = 0; i < here; ++i) {
            unpack(codes.row(first + r + i), k, low + at + i * kTileBytes, high + at + i * kTileBytes);
          }
        }
        written();
        sum_all_tiles<true>(digits, begin, end, {low, kTileBytes, kTileSize, nullptr},
                            {high, kTileBytes, kTileSize, nullptr}, ahead, sums, sum_stride);
      }
      for (int64_t block = 0; block < digits.blocks(); ++block) {
        close_tiles(digits, block, sums + block * 48, sums + 16 * sum_stride + block * 48, sum_stride,
                    scale + first + r, here, scores + block * 16 * kBlock + r);
      }
    }
  }

  // 64 columns of a row.
  void unpack(const char* row, int64_t k, char* low, char* high) const {
    const auto* multiplier = reinterpret_cast<const uint8_t*>(row + packed + 2 * k);
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 32 * k));
    const __m256i first = _mm256_and_si256(both, nibble);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi32(both, 4), nibble);
    const int m0 = multiplier[0] & 127, m1 = multiplier[1] & 127;
    store(low, _mm256_shuffle_epi8(spread(kPlanes.low[m0]), first));
    store(low + 32, _mm256_shuffle_epi8(spread(kPlanes.low[m1]), second));
    store(high, _mm256_shuffle_epi8(spread(kPlanes.high[m0]), first));
    store(high + 32, _mm256_shuffle_epi8(spread(kPlanes.high[m1]), second));
  }

  static __m256i spread(const int8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(char* p, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), x); }
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

TileDigits make_tile_digits(const Digits& from, Scratch& scratch) {
  TileDigits out;
  out.count = from.count;
  out.steps = ceil_div(from.width, kTileBytes);
  out.tiles = 3 * (out.blocks() - 1) + out.tiles_of(out.blocks() - 1);
  const int64_t words = out.tiles * out.steps * kTileSize / 4;
  auto* data = scratch.fill<int32_t>(words, 0);
  auto* step = scratch.fill<double>(round_up(from.count, 16), 0.0);
  for (int64_t s = 0; s < from.count; ++s) {
    const int64_t block = s / 16;
    step[s] = from.step[s];
    for (int digit = 0; digit < 3; ++digit) {
      const int64_t column = digit * out.states(block) + s % 16, tile = 3 * block + column / 16;
      int32_t* to = data + tile * out.steps * kTileSize / 4 + column % 16;
      const int8_t* digits = from.row(s, digit);
      for (int64_t i = 0; i < out.steps * 16; ++i) {
        std::memcpy(to + 16 * i, digits + 4 * i, 4);
      }
    }
  }
  out.data = reinterpret_cast<const int8_t*>(data);
  out.step = step;
  return out;
}

void close_tiles(const TileDigits& digits, int64_t block, const int32_t* sums, const int32_t* high, int64_t sum_stride,
                 const float* scale, int rows, float* scores) {
  const int states = digits.states(block);
  const __m512d step[2] = {_mm512_load_pd(digits.step + 16 * block), _mm512_load_pd(digits.step + 16 * block + 8)};
  __m512 out[16];
  for (int r = 0; r < 16; ++r) {
    __m512i c[3];
    for (int digit = 0; digit < 3; ++digit) {
      const int64_t at = r * sum_stride + digit * states;
      c[digit] = _mm512_loadu_si512(sums + at);
      if (high != nullptr) {
        c[digit] = _mm512_add_epi32(c[digit], _mm512_slli_epi32(_mm512_loadu_si512(high + at), 6));
      }
    }
    out[r] = whole_scores(c[0], c[1], c[2], step, _mm512_set1_ps(scale[r < rows ? r : 0]));
  }
  store_by_state(out, states, scores);
}

void store_by_state(const __m512* x, int states, float* scores) {
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
      if (4 * q + c < states) {
        _mm512_storeu_ps(scores + (4 * q + c) * kBlock, lanes[q]);
      }
    }
  }
}

std::unique_ptr<Scorer> make_row_scale_tiles(const ByteRows& codes, const float* scale, const Digits& digits,
                                             int workers, Scratch& scratch) {
  return std::make_unique<RowScaleTiles>(codes, scale, digits, workers, scratch);
}

std::unique_ptr<Scorer> make_multiplier_tiles(const ByteRows& codes, const float* scale, const Digits& digits,
                                              int workers, Scratch& scratch) {
  return std::make_unique<MultiplierTiles>(codes, scale, digits, workers, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
