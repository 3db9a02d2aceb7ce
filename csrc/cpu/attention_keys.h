#pragma once

#include "attention_plan.h"

namespace dmtp::DMTP_CAPABILITY {

// Tiles of keys of one request and kv head.
class Keys {
 public:
  Keys(const BlockAttention& args, const Request& request, int64_t b, int64_t head)
      : args_(args), request_(request), b_(b), head_(head) {
    cache_.key_type = args.k_cache.dtype;
    cache_.value_type = args.v_cache.dtype;
    cache_.key_scale = scale_of(args.k_scale);
    cache_.value_scale = scale_of(args.v_scale);
  }

  // Context rows [begin, end), or block rows that are in the cache; `positions[i]` is where key i of the tile is.
  KeyTile in_cache(int64_t begin, int64_t end, int64_t* positions) const {
    KeyTile tile = cache_;
    const int64_t page_rows = args_.k_cache.size[1], pages = args_.k_cache.size[0];
    for (int64_t p = begin; p < end;) {
      const int64_t column = p / page_rows, stop = std::min(end, (column + 1) * page_rows);
      const int64_t page = index_in_table(column);
      if (page >= 0 && page < pages) {
        const char* key = address(args_.k_cache, page, p - column * page_rows);
        const char* value = address(args_.v_cache, page, p - column * page_rows);
        const int64_t key_step = args_.k_cache.stride[1] * bytes_of(tile.key_type);
        const int64_t value_step = args_.v_cache.stride[1] * bytes_of(tile.value_type);
        for (int64_t i = p; i < stop; ++i, key += key_step, value += value_step) {
          tile.key[tile.count] = key;
          tile.value[tile.count] = value;
          positions[tile.count++] = i;
        }
      }
      p = stop;
    }
    return tile;
  }

  // Block rows [begin, end) by their number.
  KeyTile in_block(int64_t begin, int64_t end, int64_t* positions) const {
    if (!args_.block_k) {
      KeyTile tile = in_cache(request_.context + begin, request_.context + end, positions);
      for (int i = 0; i < tile.count; ++i) {
        positions[i] -= request_.context;
      }
      return tile;
    }
    KeyTile tile;
    tile.key_type = args_.block_k.dtype;
    tile.value_type = args_.block_v.dtype;
    tile.key_scale = tile.value_scale = 1.0f;
    for (int64_t r = begin; r < end; ++r) {
      tile.key[tile.count] = address(args_.block_k, b_, r);
      tile.value[tile.count] = address(args_.block_v, b_, r);
      positions[tile.count++] = r;
    }
    return tile;
  }

 private:
  const char* address(const Tensor& t, int64_t i, int64_t j) const {
    return static_cast<const char*>(t.data) +
           (i * t.stride[0] + j * t.stride[1] + head_ * t.stride[2]) * bytes_of(t.dtype);
  }

  int64_t index_in_table(int64_t column) const {
    const Tensor& t = args_.page_table;
    const int64_t at = b_ * t.stride[0] + column * t.stride[1];
    return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
  }

  // one NaN for all, which survives being rounded to bf16
  float scale_of(const Tensor& t) const {
    const float x = t ? static_cast<const float*>(t.data)[b_ * t.stride[0] + head_ * t.stride[1]] : 1.0f;
    return x == x ? x : std::numeric_limits<float>::quiet_NaN();
  }

  const BlockAttention& args_;
  const Request& request_;
  int64_t b_, head_;
  KeyTile cache_;
};

}  // namespace dmtp::DMTP_CAPABILITY
