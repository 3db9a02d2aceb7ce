#ifdef __AMX_INT8__

#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

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

  void score(int64_t first, int rows, int64_t later, int worker, float* scores) const override {
    char* mine = memory + worker * worker_bytes;
    auto* sums = reinterpret_cast<int32_t*>(mine);
    char* low = mine + sums_bytes();
    char* high = low + kSteps * kTileSize;
    Ahead ahead(codes.block(later), 2 * ahead_calls(digits.tiles) * digits.steps);
    for (int r = 0; r < rows; r += kTileRows) {
      const int here = rows - r < kTileRows ? rows - r : kTileRows;
      if (digits.tiles == 1) {
        sum_few<false>(first + r, here, low, high, ahead, sums);
      } else if (digits.tiles == 2) {
        sum_few<true>(first + r, here, low, high, ahead, sums);
      } else {
        sum_many(first + r, here, low, high, ahead, sums);
      }
      for (int64_t block = 0; block < digits.blocks(); ++block) {
        close_tiles(digits, block, sums + block * 48, sums + 16 * sum_stride + block * 48, sum_stride,
                    scale + first + r, here, scores + block * 16 * kBlock + r);
      }
    }
  }

  // Step by step, so that the next one is unpacked while tiles multiply the last.
  template <bool two_columns>
  void sum_few(int64_t first, int rows, char* low, char* high, Ahead& ahead, int32_t* sums) const {
    Sums<false, true, two_columns>::zero();
    for (int64_t k = 0; k < digits.steps; ++k) {
      const int64_t at = k % kSteps * kTileSize;
      unpack_step(first, rows, k, low + at, high + at);
      Sums<false, true, two_columns>::add(low + at, high + at, kTileBytes, digits.tile(0, k),
                                          digits.tile(two_columns, k), ahead);
    }
    Sums<false, true, two_columns>::store(sums, sum_stride);
  }

  void sum_many(int64_t first, int rows, char* low, char* high, Ahead& ahead, int32_t* sums) const {
    for (int64_t begin = 0; begin < digits.steps; begin += kSteps) {
      const int64_t end = begin + kSteps < digits.steps ? begin + kSteps : digits.steps;
      for (int64_t k = begin; k < end; ++k) {
        unpack_step(first, rows, k, low + (k - begin) * kTileSize, high + (k - begin) * kTileSize);
      }
      each_two_tiles<false, true>(digits.tiles, [&]<bool two_columns>(Sums<false, true, two_columns> tiles, int64_t t) {
        if (begin == 0) {
          tiles.zero();
        } else {
          tiles.load(sums + t * 16, sum_stride);
        }
        for (int64_t k = begin; k < end; ++k) {
          const int64_t at = (k - begin) * kTileSize;
          tiles.add(low + at, high + at, kTileBytes, digits.tile(t, k), digits.tile(t + two_columns, k), ahead);
        }
        tiles.store(sums + t * 16, sum_stride);
      });
    }
  }

  void unpack_step(int64_t first, int rows, int64_t k, char* low, char* high) const {
    for (int i = 0; i < rows; ++i) {
      unpack(codes.row(first + i), k, low + i * kTileBytes, high + i * kTileBytes);
    }
    written();
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

std::unique_ptr<Scorer> make_multiplier_tiles(const ByteRows& codes, const float* scale, const Digits& digits,
                                              int workers, Scratch& scratch) {
  return std::make_unique<MultiplierTiles>(codes, scale, digits, workers, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
