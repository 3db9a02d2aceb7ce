#pragma once

#ifdef __AMX_INT8__

#include <immintrin.h>

#include "lm_head_vnni.h"
#include "transpose.h"

namespace dmtp::DMTP_CAPABILITY {

constexpr int kTileRows = 16, kTileBytes = 64, kTileSize = kTileRows * kTileBytes;

// Before tiles are loaded from memory that was just written: the compiler does not know that they read it.
inline void written() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// What rows are multiplied with, 16 vectors to a tile: four bytes of each, then the next four.
struct TileColumns {
  int64_t steps, tiles;  // along the columns of a row, across
  char* data;            // [tiles, steps, 16, 64]

  const char* tile(int64_t t, int64_t k) const { return data + (t * steps + k) * kTileSize; }
};

TileColumns make_tile_columns(int64_t row_bytes, int64_t vectors, Scratch&);
void set_column(const TileColumns&, int64_t vector, const char* bytes, int64_t size);

// The digits as tiles. Up to 16 states make a block whose columns are the low digits of its states, then the middle,
// then the high ones, in up to three tiles; every block but the last has three.
struct TileDigits : TileColumns {
  int64_t count;
  const double* step;  // [count rounded up to 16]

  int64_t blocks() const { return ceil_div(count, 16); }
  int states(int64_t block) const { return static_cast<int>(count - 16 * block < 16 ? count - 16 * block : 16); }
  int tiles_of(int64_t block) const { return static_cast<int>(ceil_div(3 * states(block), 16)); }
};

TileDigits make_tile_digits(const Digits&, Scratch&);

// Sixteen rows of scores, one per state, from the digit sums of one block of states: `sums` is [16, sum_stride].
// With `high` the sums are sums + 64 high.
void close_tiles(const TileDigits&, int64_t block, const int32_t* sums, const int32_t* high, int64_t sum_stride,
                 const float* scale, int rows, float* scores);

// The tiles of an instruction are part of its code.
#ifdef __AMX_BF16__
#define DMTP_TILE_PRODUCT(sum, rows, columns) \
  do {                                        \
    if constexpr (bf16) {                     \
      _tile_dpbf16ps(sum, rows, columns);     \
    } else {                                  \
      _tile_dpbssd(sum, rows, columns);       \
    }                                         \
  } while (false)
#else
#define DMTP_TILE_PRODUCT(sum, rows, columns) _tile_dpbssd(sum, rows, columns)
#endif

// Products of 16 rows, or twice 16, with one tile of columns, or two, summed in tiles 0 .. 3: int8 or bf16 pairs.
template <bool bf16, bool two_rows, bool two_columns>
struct Sums {
  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // [16 or 32, stride] of 32 bits.
  static void load(const void* sums, int64_t stride) {
    const auto* from = static_cast<const char*>(sums);
    _tile_loadd(0, from, 4 * stride);
    if constexpr (two_rows) {
      _tile_loadd(1, from + 64 * stride, 4 * stride);
    }
    if constexpr (two_columns) {
      _tile_loadd(2, from + kTileBytes, 4 * stride);
    }
    if constexpr (two_rows && two_columns) {
      _tile_loadd(3, from + kTileBytes + 64 * stride, 4 * stride);
    }
  }

  static void store(void* sums, int64_t stride) {
    auto* to = static_cast<char*>(sums);
    _tile_stored(0, to, 4 * stride);
    if constexpr (two_rows) {
      _tile_stored(1, to + 64 * stride, 4 * stride);
    }
    if constexpr (two_columns) {
      _tile_stored(2, to + kTileBytes, 4 * stride);
    }
    if constexpr (two_rows && two_columns) {
      _tile_stored(3, to + kTileBytes + 64 * stride, 4 * stride);
    }
  }

  // One step along the columns, with `kCalls` steps of `ahead`.
  static constexpr int kCalls = (1 + two_rows) + (1 + two_columns) + (1 + two_rows) * (1 + two_columns);

  static void add(const char* a0, const char* a1, int64_t a_stride, const char* b0, const char* b1, Ahead& ahead) {
    ahead.step();
    _tile_loadd(6, b0, kTileBytes);
    ahead.step();
    _tile_loadd(4, a0, a_stride);
    ahead.step();
    DMTP_TILE_PRODUCT(0, 4, 6);
    if constexpr (two_rows) {
      ahead.step();
      _tile_loadd(5, a1, a_stride);
      ahead.step();
      DMTP_TILE_PRODUCT(1, 5, 6);
    }
    if constexpr (two_columns) {
      ahead.step();
      _tile_loadd(7, b1, kTileBytes);
      ahead.step();
      DMTP_TILE_PRODUCT(2, 4, 7);
    }
    if constexpr (two_rows && two_columns) {
      ahead.step();
      DMTP_TILE_PRODUCT(3, 5, 7);
    }
  }
};

// Calls of `step` while twice sixteen rows are multiplied with so many tiles of columns, per step along them.
inline int64_t ahead_calls(int64_t tiles) {
  return tiles / 2 * Sums<false, true, true>::kCalls + tiles % 2 * Sums<false, true, false>::kCalls;
}

// body(Sums, tile) for tiles of columns in twos.
template <bool bf16, bool two_rows, class Body>
void each_two_tiles(int64_t tiles, Body body) {
  int64_t t = 0;
  for (; t + 2 <= tiles; t += 2) {
    body(Sums<bf16, two_rows, true>(), t);
  }
  if (t < tiles) {
    body(Sums<bf16, two_rows, false>(), t);
  }
}

struct TileScorer : Scorer {
  void enter() const final;
  void leave() const final;
};

std::unique_ptr<Scorer> make_dense_tiles(const ByteRows&, const Tensor& hidden, int64_t first, int64_t count,
                                         int workers, Scratch&);
std::unique_ptr<Scorer> make_row_scale_tiles(const ByteRows&, const float* scale, const Digits&, int workers, Scratch&);
std::unique_ptr<Scorer> make_multiplier_tiles(const ByteRows&, const float* scale, const Digits&, int workers,
                                              Scratch&);
std::unique_ptr<Scorer> make_grouped_tiles(ScreenFormat, const ByteRows&, const Tensor& scale, const Digits&,
                                           int workers, Scratch&);

}  // namespace dmtp::DMTP_CAPABILITY

#endif
