#pragma once

#include <memory>

#include "attention_rows.h"
#include "dmtp/block_attention.h"
#include "scratch.h"

// The arithmetic of one tile of keys; block_attention.cpp decides which keys those are.
namespace dmtp::DMTP_CAPABILITY {

constexpr int kMostKeys = 128;  // of a tile
constexpr int kMostRows = 128;  // queries times the heads of a group that are worked on together

inline int64_t ceil_multiple(int64_t a, int64_t b) {
  return (a + b - 1) / b * b;
}

// Keys that some query sees, and where they are.
struct KeyTile {
  int count = 0;
  const char* key[kMostKeys];
  const char* value[kMostKeys];
  DType key_type, value_type;
  float key_scale, value_scale;
  // row r sees keys first[r] .. last[r] - 1; null: all rows see all
  const int32_t* first = nullptr;
  const int32_t* last = nullptr;
};

// Softmax of some keys, not yet divided: `sums` are of exp(score - top) * value.
struct Partial {
  float* top;  // [rows], -inf where nothing was seen
  float* total;
  float* sums;  // [rows, sums_stride]
};

class TileMath {
 public:
  virtual ~TileMath() = default;

  // Columns of `sums`, and where column d of the output is among them.
  virtual int64_t sums_stride() const = 0;
  virtual int64_t column(int64_t d) const { return d; }
  virtual int keys() const = 0;  // of a whole tile

  // Queries in the order `add` reads them: `row(r)` gives a pointer to the elements of one.
  virtual int64_t query_bytes() const = 0;
  virtual void pack(const char* const* rows, int count, char* packed) const = 0;

  virtual int64_t scratch_bytes() const = 0;
  virtual void enter() const {}
  virtual void leave() const {}
  // `next` is fetched meanwhile; null: none.
  virtual void add(const KeyTile&, const KeyTile* next, const char* packed, int rows, char* scratch,
                   const Partial&) const = 0;
};

std::unique_ptr<TileMath> make_vector_math(const BlockAttention&);
#ifdef __AMX_BF16__
std::unique_ptr<TileMath> make_tile_math(const BlockAttention&);
#endif

}  // namespace dmtp::DMTP_CAPABILITY
