#pragma once

#ifdef __AMX_INT8__

#include <immintrin.h>

#include "lm_head_vnni.h"

namespace dmtp::DMTP_CAPABILITY {

constexpr int kTileRows = 16, kTileBytes = 64, kTileSize = kTileRows * kTileBytes;

// Before tiles are loaded from memory that was just written: the compiler does not know that they read it.
inline void written() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// The digits as tiles. Up to 16 states make a block whose columns are the low digits of its states, then the middle,
// then the high ones, in up to three tiles; every block but the last has three.
struct TileDigits {
  int64_t count, steps, tiles;  // states, tiles along the columns of a row, tiles across
  const int8_t* data;           // [tiles, steps, 16, 64]
  const double* step;           // [count rounded up to 16]

  const int8_t* tile(int64_t t, int64_t k) const { return data + (t * steps + k) * kTileSize; }
  int64_t blocks() const { return ceil_div(count, 16); }
  int states(int64_t block) const { return static_cast<int>(count - 16 * block < 16 ? count - 16 * block : 16); }
  int tiles_of(int64_t block) const { return static_cast<int>(ceil_div(3 * states(block), 16)); }
};

TileDigits make_tile_digits(const Digits&, Scratch&);

// Sixteen rows of bytes, tile after tile. `tail` is the last tile where the rows end inside it, at 64 bytes a row.
struct TileRows {
  const char* data;
  int64_t stride, step;
  const char* tail;
};

// Sixteen rows of scores, one per state, from the digit sums of one block of states: `sums` is [16, sum_stride].
// With `high` the sums are sums + 64 high.
void close_tiles(const TileDigits&, int64_t block, const int32_t* sums, const int32_t* high, int64_t sum_stride,
                 const float* scale, int rows, float* scores);

// Of x[16], one vector of states per row: one vector of rows per state, at kBlock floats from each other.
void store_by_state(const __m512* x, int states, float* scores);

struct TileScorer : Scorer {
  void enter() const final;
  void leave() const final;
};

std::unique_ptr<Scorer> make_row_scale_tiles(const ByteRows&, const float* scale, const Digits&, int workers, Scratch&);
std::unique_ptr<Scorer> make_multiplier_tiles(const ByteRows&, const float* scale, const Digits&, int workers,
                                              Scratch&);
std::unique_ptr<Scorer> make_grouped_tiles(ScreenFormat, const ByteRows&, const Tensor& scale, const Digits&,
                                           int workers, Scratch&);

}  // namespace dmtp::DMTP_CAPABILITY

#endif
