#ifdef __AMX_INT8__

#include "lm_head_tiles.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// Rows that are read as tiles where they lie.
struct RowsInPlace {
  ByteRows rows;
  int64_t steps, whole, rest;  // tiles along a row; those inside it; bytes of the last one that are

  explicit RowsInPlace(const ByteRows& rows)
      : rows(rows),
        steps(ceil_div(rows.bytes, kTileBytes)),
        whole(rows.bytes / kTileBytes),
        rest(rows.bytes % kTileBytes) {}

  // Of a worker, zeros at first.
  int64_t scratch_bytes() const { return (2 + steps) * kTileSize; }

  // sums[kBlock, stride]: the products of rows first .. first + count - 1 with all columns.
  template <bool bf16>
  void multiply(int64_t first, int count, int64_t later, const TileColumns& columns, char* scratch, void* sums,
                int64_t stride) const {
    Ahead ahead(rows.block(later), ahead_calls(columns.tiles) * steps);
    if (count == kBlock) {
      const Tiles upper = tiles(first, scratch), lower = tiles(first + kTileRows, scratch + kTileSize);
      sum<bf16, true>(upper, lower, columns, ahead, sums, stride);
      return;
    }
    for (int r = 0; r < count; r += kTileRows) {
      const int here = count - r < kTileRows ? count - r : kTileRows;
      const Tiles part =
          here < kTileRows ? copied(first + r, here, scratch + 2 * kTileSize) : tiles(first + r, scratch);
      sum<bf16, false>(part, part, columns, ahead, static_cast<char*>(sums) + r * stride * 4, stride);
    }
  }

 private:
  // Sixteen rows, tile after tile. `tail` is the last tile where the rows end inside it, at 64 bytes a row.
  struct Tiles {
    const char* data;
    int64_t stride, step;
    const char* tail;
  };

  template <bool bf16, bool two_rows>
  void sum(const Tiles& upper, const Tiles& lower, const TileColumns& columns, Ahead& ahead, void* sums,
           int64_t stride) const {
    const int64_t direct = steps - (upper.tail != nullptr);
    each_two_tiles<bf16, two_rows>(columns.tiles, [&]<bool two>(Sums<bf16, two_rows, two> product, int64_t t) {
      product.zero();
      for (int64_t k = 0; k < direct; ++k) {
        product.add(upper.data + k * upper.step, lower.data + k * lower.step, upper.stride, columns.tile(t, k),
                    columns.tile(t + two, k), ahead);
      }
      if (upper.tail != nullptr) {
        product.add(upper.tail, lower.tail, kTileBytes, columns.tile(t, direct), columns.tile(t + two, direct), ahead);
      }
      product.store(static_cast<char*>(sums) + t * kTileBytes, stride);
    });
  }

  Tiles tiles(int64_t first, char* tail) const {
    for (int r = 0; r < (rest != 0 ? kTileRows : 0); ++r) {
      std::memcpy(tail + r * kTileBytes, rows.row(first + r) + whole * kTileBytes, rest);
    }
    written();
    return {rows.row(first), rows.stride, kTileBytes, rest != 0 ? tail : nullptr};
  }

  Tiles copied(int64_t first, int count, char* to) const {
    for (int r = 0; r < count; ++r) {
      for (int64_t k = 0; k < steps; ++k) {
        std::memcpy(to + k * kTileSize + r * kTileBytes, rows.row(first + r) + k * kTileBytes,
                    k < whole ? kTileBytes : rest);
      }
    }
    written();
    return {to, kTileBytes, kTileSize, nullptr};
  }
};

struct RowScaleTiles final : TileScorer {
  RowsInPlace codes;
  const float* scale;
  TileDigits digits;
  int64_t stride, sums_bytes, worker_bytes;
  char* memory;

  RowScaleTiles(const ByteRows& rows, const float* scale, const Digits& from, int workers, Scratch& scratch)
      : codes(rows), scale(scale), digits(make_tile_digits(from, scratch)), stride(digits.tiles * 16) {
    sums_bytes = (kBlock * stride + 32) * 4;
    worker_bytes = sums_bytes + codes.scratch_bytes();
    memory = scratch.fill<char>(workers * worker_bytes, 0);
  }

  int64_t row_bytes() const override { return codes.rows.bytes + 8; }

  void score(int64_t first, int rows, int64_t later, int worker, float* scores) const override {
    char* mine = memory + worker * worker_bytes;
    auto* sums = reinterpret_cast<int32_t*>(mine);
    codes.multiply<false>(first, rows, later, digits, mine + sums_bytes, sums, stride);
    for (int64_t block = 0; block < digits.blocks(); ++block) {
      for (int r = 0; r < rows; r += kTileRows) {
        close_tiles(digits, block, sums + r * stride + block * 48, nullptr, stride, scale + first + r,
                    rows - r < kTileRows ? rows - r : kTileRows, scores + block * 16 * kBlock + r);
      }
    }
  }
};

#ifdef __AMX_BF16__

// Rows and states in bf16. The instruction takes subnormals as zero and leaves zero in their place, which the intervals
// must cover: subnormal elements of a row make at most 2^-126 sqrt(H) ||h||, those of a state 2^-126 sqrt(H) ||w_v||
// with
// ||w_v|| <= 2^18 bound[v], and every product and sum 2^-126.
struct DenseTiles final : TileScorer {
  RowsInPlace weight;
  TileColumns states;
  int64_t count, worker_bytes;
  char* memory;

  DenseTiles(const ByteRows& rows, const Tensor& hidden, int64_t first, int64_t count, int workers, Scratch& scratch)
      : weight(rows), states(make_tile_columns(rows.bytes, count, scratch)), count(count) {
    for (int64_t s = 0; s < count; ++s) {
      set_column(states, s, reinterpret_cast<const char*>(hidden.row<const Bf16>(first + s)), rows.bytes);
    }
    worker_bytes = kBlock * states.tiles * kTileBytes + weight.scratch_bytes();
    memory = scratch.fill<char>(workers * worker_bytes, 0);
  }

  int64_t row_bytes() const override { return weight.rows.bytes + 4; }

  Reach reach(float length) const override {
    const float columns = static_cast<float>(weight.rows.bytes);  // twice as many as there are
    return {length + 0x1p-100f, columns * 0x1p-124f * (1.0f + length)};
  }

  void score(int64_t first, int rows, int64_t later, int worker, float* scores) const override {
    char* mine = memory + worker * worker_bytes;
    auto* sums = reinterpret_cast<float*>(mine);
    const int64_t stride = states.tiles * 16;
    weight.multiply<true>(first, rows, later, states, mine + kBlock * states.tiles * kTileBytes, sums, stride);
    for (int64_t t = 0; t < states.tiles; ++t) {
      for (int r = 0; r < rows; r += kTileRows) {
        __m512 x[kTileRows];
        for (int i = 0; i < kTileRows; ++i) {
          x[i] = _mm512_load_ps(sums + (r + i) * stride + t * 16);
        }
        transpose(x, static_cast<int>(count - 16 * t), scores + 16 * t * kBlock + r, kBlock);
      }
    }
  }
};

#endif

}  // namespace

std::unique_ptr<Scorer> make_dense_tiles(const ByteRows& weight, const Tensor& hidden, int64_t first, int64_t count,
                                         int workers, Scratch& scratch) {
#ifdef __AMX_BF16__
  return std::make_unique<DenseTiles>(weight, hidden, first, count, workers, scratch);
#else
  (void)weight, (void)hidden, (void)first, (void)count, (void)workers, (void)scratch;
  return nullptr;
#endif
}

std::unique_ptr<Scorer> make_row_scale_tiles(const ByteRows& codes, const float* scale, const Digits& digits,
                                             int workers, Scratch& scratch) {
  return std::make_unique<RowScaleTiles>(codes, scale, digits, workers, scratch);
}

}  // namespace dmtp::DMTP_CAPABILITY

#endif
