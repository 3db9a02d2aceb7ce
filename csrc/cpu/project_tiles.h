#pragma once

#include <algorithm>

#include "vector.h"

// bf16 matrices times fp32 vectors on tiles. A vector is split in three bf16 whose sum it is, bit for bit (8 of its 24
// digits each), so products stay exact and sums are fp32 as in project.h; only what is below 2^-126 is flushed. Eight
// vectors cost hardly more than one, whose time is the reading of the matrix.
namespace dmtp::DMTP_CAPABILITY {

constexpr int kTileHeight = 16, kTileDepth = 32, kSplit = 3;
constexpr int kGroup = 5;  // vectors per tile of 16 columns
constexpr int64_t kTileWords = 256;

inline int64_t pieces(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

#if defined(__AMX_BF16__)

constexpr bool kHasTiles = true;

// Vectors in the order tiles read them: [group][step of 32][pair of elements][column], column 3 * vector + part.
inline int64_t split_words(int64_t depth, int64_t batch) {
  return pieces(batch, kGroup) * pieces(depth, kTileDepth) * kTileWords;
}

// Fills steps [begin, end) of all groups, counted through; the vectors are padded with zeros to whole steps.
inline void split(const float* x, int64_t stride, int64_t depth, int64_t batch, int64_t begin, int64_t end,
                  uint32_t* words) {
  const int64_t steps = pieces(depth, kTileDepth);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (int64_t at = begin; at < end; ++at) {
    const int64_t first = at / steps * kGroup, k = at % steps * kTileDepth;
    uint32_t* tile = words + at * kTileWords;
    std::fill(tile, tile + kTileWords, 0u);
    for (int64_t v = first; v < std::min(first + kGroup, batch); ++v) {
      __m512 left = _mm512_loadu_ps(x + v * stride + k), right = _mm512_loadu_ps(x + v * stride + k + kLanes);
      for (int part = 0; part < kSplit; ++part) {
        const __m512i a = _mm512_and_si512(_mm512_castps_si512(left), high);
        const __m512i b = _mm512_and_si512(_mm512_castps_si512(right), high);
        left = _mm512_sub_ps(left, _mm512_castsi512_ps(a));
        right = _mm512_sub_ps(right, _mm512_castsi512_ps(b));
        alignas(64) uint32_t pairs[kLanes];
        auto* half = reinterpret_cast<__m256i*>(pairs);
        _mm256_store_si256(half, _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16)));
        _mm256_store_si256(half + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)));
        uint32_t* column = tile + (v - first) * kSplit + part;
        for (int j = 0; j < kLanes; ++j) {
          column[j * kLanes] = pairs[j];
        }
      }
    }
  }
}

// Tiles of this thread while it lives; torch's own kernels configure theirs anew.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t column_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.column_bytes[i] = 64;
      config.rows[i] = kTileHeight;
    }
    flush_stores();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // gcc does not know that a tile load reads memory
  static void flush_stores() { asm volatile("" ::: "memory"); }
};

// Adds step k of 16 or 32 matrix rows times one or two groups to the sums in tiles 0..3.
template <bool TwoRows, bool TwoGroups>
inline void tile_step(const Bf16* rows, int64_t row_bytes, const uint32_t* words, int64_t group_words) {
  _tile_loadd(4, rows, row_bytes);
  _tile_loadd(6, words, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (TwoRows) {
    _tile_loadd(5, reinterpret_cast<const char*>(rows) + kTileHeight * row_bytes, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
  }
  if constexpr (TwoGroups) {
    _tile_loadd(7, words + group_words, 64);
    _tile_dpbf16ps(2, 4, 7);
    if constexpr (TwoRows) {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

struct TileProjection {
  const Bf16* matrix;
  int64_t row_stride;
  int64_t depth;
  const uint32_t* words;  // from `split`
  int64_t batch;
  float* out;  // out[i * out_stride + row] = matrix[row] . x[i]
  int64_t out_stride;

  // Whole tiles of rows [begin, end), each read from memory once; returns the first row left.
  int64_t operator()(int64_t begin, int64_t end) const {
    const Tiles configured;
    int64_t row = begin;
    for (; row + 2 * kTileHeight <= end; row += 2 * kTileHeight) {
      groups<true>(row);
    }
    for (; row + kTileHeight <= end; row += kTileHeight) {
      groups<false>(row);
    }
    return row;
  }

 private:
  template <bool TwoRows>
  void groups(int64_t row) const {
    const int64_t count = pieces(batch, kGroup);
    for (int64_t group = 0; group < count; group += 2) {
      if (group + 1 < count) {
        tile<TwoRows, true>(row, group);
      } else {
        tile<TwoRows, false>(row, group);
      }
    }
  }

  template <bool TwoRows, bool TwoGroups>
  void tile(int64_t row, int64_t group) const {
    constexpr int kRows = TwoRows ? 2 * kTileHeight : kTileHeight;
    constexpr int64_t kAhead = 512;  // elements: as far as project.h looks ahead
    const int64_t steps = pieces(depth, kTileDepth), whole = depth / kTileDepth * kTileDepth;
    const int64_t row_bytes = row_stride * sizeof(Bf16), group_words = steps * kTileWords;
    const Bf16* from = matrix + row * row_stride;
    const uint32_t* right = words + group * group_words;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < whole; k += kTileDepth) {
      if (group == 0) {
        const Bf16* ahead = k + kAhead < depth ? from + k + kAhead : from + kRows * row_stride + (k + kAhead - depth);
        for (int r = 0; r < kRows; ++r) {
          __builtin_prefetch(ahead + r * row_stride);
        }
      }
      tile_step<TwoRows, TwoGroups>(from + k, row_bytes, right, group_words);
      right += kTileWords;
    }
    if (whole < depth) {
      Bf16 edge[kRows][kTileDepth] = {};
      for (int r = 0; r < kRows; ++r) {
        std::memcpy(edge[r], from + r * row_stride + whole, (depth - whole) * sizeof(Bf16));
      }
      Tiles::flush_stores();
      tile_step<TwoRows, TwoGroups>(edge[0], sizeof edge[0], right, group_words);
    }
    alignas(64) float sums[4][kTileHeight][kLanes];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int g = 0; g < (TwoGroups ? 2 : 1); ++g) {
      const int64_t first = (group + g) * kGroup;
      for (int64_t v = first; v < std::min(first + kGroup, batch); ++v) {
        for (int r = 0; r < kRows; ++r) {
          const float* part = sums[2 * g + r / kTileHeight][r % kTileHeight] + (v - first) * kSplit;
          out[v * out_stride + row + r] = part[0] + (part[1] + part[2]);
        }
      }
    }
  }
};

#else

constexpr bool kHasTiles = false;

inline int64_t split_words(int64_t, int64_t) {
  return 0;
}
inline void split(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t*) {}

#endif

}  // namespace dmtp::DMTP_CAPABILITY
