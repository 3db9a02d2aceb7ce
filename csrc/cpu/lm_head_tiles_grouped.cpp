#ifdef __AMX_INT8__

#include "lm_head_grouped.h"
#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// One scale per 64 columns, which is one tile: the sums of each are scaled and added in fp32.
struct GroupedTiles final : TileScorer {
  static constexpr int kSumStride = 48, kSums = kTileRows * kSumStride + 16;
  static constexpr int64_t kSteps = 8;  // copied or unpacked at once, to stay in the first-level cache

  // Sixteen rows, tile after tile.
  struct Tiles {
    const char* data;
    int64_t stride, step;
  };

  ByteRows codes;
  Tensor scale;
  TileDigits digits;
  bool packed;
  int64_t worker_bytes;
  char* memory;

  GroupedTiles(ScreenFormat format, const ByteRows& codes, const Tensor& scale, const Digits& from, int workers,
               Scratch& scratch)
      : codes(codes), scale(scale), digits(make_tile_digits(from, scratch)), packed(format == ScreenFormat::int6_g64) {
    worker_bytes = 2 * kSums * 4 + kSteps * kTileSize + digits.blocks() * kTileRows * kTileBytes;
    memory = scratch.fill<char>(workers * worker_bytes, 0);
  }

  int64_t row_bytes() const override { return codes.bytes + scale.size[1] * 4 + 4; }

  void score(int64_t first, int rows, int64_t later, int worker, float* scores) const override {
    char* mine = memory + worker * worker_bytes;
    auto* sums = reinterpret_cast<int32_t*>(mine);
    char* copy = mine + 2 * kSums * 4;
    auto* totals = reinterpret_cast<__m512*>(copy + kSteps * kTileSize);  // [blocks, 16]
    Ahead ahead(codes.block(later), 2 * digits.tiles * digits.steps);
    for (int r = 0; r < rows; r += kTileRows) {
      const int here = rows - r < kTileRows ? rows - r : kTileRows;
      for (int64_t begin = 0; begin < digits.steps; begin += kSteps) {
        const int64_t end = begin + kSteps < digits.steps ? begin + kSteps : digits.steps;
        const bool direct = !packed && here == kTileRows && end * kTileBytes <= codes.bytes;
        const Tiles part = direct ? Tiles{codes.row(first + r) + begin * kTileBytes, codes.stride, kTileBytes}
                                  : copied(first + r, here, begin, end, copy);
        for (int64_t block = 0; block < digits.blocks(); ++block) {
          __m512* of_block = totals + block * kTileRows;
          switch (digits.tiles_of(block)) {
            case 1:
              add_groups<1>(part, begin, end, block, first + r, here, sums, ahead, of_block);
              break;
            case 2:
              add_groups<2>(part, begin, end, block, first + r, here, sums, ahead, of_block);
              break;
            default:
              add_groups<3>(part, begin, end, block, first + r, here, sums, ahead, of_block);
          }
        }
      }
      for (int64_t block = 0; block < digits.blocks(); ++block) {
        transpose(totals + block * kTileRows, digits.states(block), scores + block * 16 * kBlock + r, kBlock);
      }
    }
  }

  Tiles copied(int64_t first, int rows, int64_t begin, int64_t end, char* to) const {
    for (int64_t k = begin; k < end; k += packed ? 2 : 1) {
      for (int r = 0; r < rows; ++r) {
        const char* row = codes.row(first + r);
        char* out = to + (k - begin) * kTileSize + r * kTileBytes;
        if (packed) {
          unpack(row, k / 2, out);
        } else {
          const int64_t left = codes.bytes - k * kTileBytes;
          std::memcpy(out, row + k * kTileBytes, left < kTileBytes ? left : kTileBytes);
        }
      }
    }
    written();
    return {to, kTileBytes, kTileSize};
  }

  // 128 columns of a row, to two tiles.
  void unpack(const char* row, int64_t k, char* out) const {
    const int64_t pairs = ceil_div(digits.steps, 2);
    __m512i code[2];
    unpack_int6(row + 64 * k, row + 64 * pairs + 32 * k, code);
    const __m512i low = _mm512_sub_epi8(code[0], _mm512_set1_epi8(32));
    const __m512i high = _mm512_sub_epi8(code[1], _mm512_set1_epi8(32));
    _mm512_store_si512(out, _mm512_shuffle_i64x2(low, high, 0x44));
    _mm512_store_si512(out + kTileSize, _mm512_shuffle_i64x2(low, high, 0xee));
  }

  template <int T>
  void add_groups(const Tiles& part, int64_t begin, int64_t end, int64_t block, int64_t first, int rows, int32_t* sums,
                  Ahead& ahead, __m512* totals) const {
    const int states = digits.states(block);
    const float* scales = scale.row<const float>(first);
    const __m512 step =
        _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(_mm512_load_pd(digits.step + 16 * block))),
                           _mm512_cvtpd_ps(_mm512_load_pd(digits.step + 16 * block + 8)), 1);
    __m512 acc[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      acc[r] = begin == 0 ? _mm512_setzero_ps() : totals[r];
    }
    for (int64_t k = begin; k <= end; ++k) {
      // the sums of one group are scaled while tiles make those of the next
      if (k < end) {
        sum_group<T>(part.data + (k - begin) * part.step, part.stride, 3 * block, k, ahead, sums + (k % 2) * kSums);
      }
      if (k > begin) {
        add_group(sums + ((k - 1) % 2) * kSums, states, step, scales + k - 1, rows, acc);
      }
    }
    for (int r = 0; r < kTileRows; ++r) {
      totals[r] = acc[r];
    }
  }

  template <int T>
  void sum_group(const char* rows, int64_t stride, int64_t tile, int64_t k, Ahead& ahead, int32_t* sums) const {
    constexpr int64_t kBytes = kSumStride * 4;
    _tile_zero(0);
    _tile_loadd(4, rows, stride);
    ahead.step();
    _tile_loadd(5, digits.tile(tile, k), kTileBytes);
    _tile_dpbssd(0, 4, 5);
    if constexpr (T > 1) {
      _tile_zero(1);
      ahead.step();
      _tile_loadd(6, digits.tile(tile + 1, k), kTileBytes);
      _tile_dpbssd(1, 4, 6);
    }
    if constexpr (T > 2) {
      _tile_zero(2);
      ahead.step();
      _tile_loadd(7, digits.tile(tile + 2, k), kTileBytes);
      _tile_dpbssd(2, 4, 7);
    }
    _tile_stored(0, sums, kBytes);
    if constexpr (T > 1) {
      _tile_stored(1, sums + 16, kBytes);
    }
    if constexpr (T > 2) {
      _tile_stored(2, sums + 32, kBytes);
    }
  }

  // The step before the scale: large rows of tiny states would overflow without it.
  void add_group(const int32_t* sums, int states, __m512 step, const float* scales, int rows,
                 __m512 (&acc)[kTileRows]) const {
    const __m512 high_step = _mm512_mul_ps(step, _mm512_set1_ps(65536.0f));
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const int32_t* sum = sums + r * kSumStride;
      const __m512i low =
          _mm512_add_epi32(_mm512_slli_epi32(_mm512_loadu_si512(sum + states), 8), _mm512_loadu_si512(sum));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_loadu_si512(sum + 2 * states));
      const __m512 total = _mm512_fmadd_ps(high, high_step, _mm512_mul_ps(_mm512_cvtepi32_ps(low), step));
      acc[r] = _mm512_fmadd_ps(total, _mm512_set1_ps(scales[(r < rows ? r : 0) * scale.stride[0]]), acc[r]);
    }
  }
};

}  // namespace

std::unique_ptr<Scorer> make_grouped_tiles(ScreenFormat format, const ByteRows& codes, const Tensor& scale,
                                           const Digits& digits, int workers, Scratch& scratch) {
  return std::make_unique<GroupedTiles>(format, codes, scale, digits, workers, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
