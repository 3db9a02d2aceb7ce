#pragma once

#include <algorithm>

#include "attention_tiles.h"

// Which keys each query sees, in positions of the page table (the op's README).
namespace dmtp::DMTP_CAPABILITY {

constexpr int64_t kChunk = 1024;  // context rows of one item

inline int64_t index_at(const Tensor& t, int64_t i) {
  return t.dtype == DType::i64 ? t.row<const int64_t>(i)[0] : t.row<const int32_t>(i)[0];
}

// One request. Its items are the chunks of the context that all queries see, then the rest: context rows that only
// earlier queries see, and the block. Item boundaries follow from the request alone.
struct Request {
  int64_t context = 0;       // position of block row 0
  int64_t low = 0;           // all queries see low .. context - 1
  int64_t edge = 0;          // some see edge .. low - 1
  int64_t block_length = 0;  // block rows that exist
  int64_t slots = 0, rows = 0;
  int64_t window = -1;
  bool by_query = false, causal = false;

  Request(const BlockAttention& args, int64_t b) {
    slots = args.q.size[1];
    rows = args.block_k ? args.block_k.size[1] : slots;
    window = args.window;
    by_query = args.by_query;
    causal = args.block_causal;
    const int64_t capacity = args.k_cache.size[0] > 0 ? args.page_table.size[1] * args.k_cache.size[1] : 0;
    const int64_t length = args.block_len ? std::clamp<int64_t>(index_at(args.block_len, b), 0, rows) : rows;
    const int64_t given = index_at(args.ctx_len, b);
    if (given < 0 || given > capacity - (args.block_k ? 0 : length)) {
      return;
    }
    context = given;
    block_length = length;
    const int64_t begin = args.valid_from ? std::max<int64_t>(index_at(args.valid_from, b), 0) : 0;
    low = edge = begin;
    if (window >= 0 && by_query) {
      edge = std::max(begin, context + rows - slots + 1 - window);
      low = std::max(begin, context + rows - window);
    } else if (window >= 0) {
      low = edge = std::max(begin, context - window);
    }
    low = std::min(low, context);
    edge = std::min(edge, low);
  }

  int64_t chunks() const { return (context - low + kChunk - 1) / kChunk; }
  int64_t items() const { return chunks() + (edge < low || block_length > 0); }

  struct Span {
    int64_t begin, end;
  };

  // Positions that the query of one slot sees.
  Span context_of(int64_t slot) const {
    const int64_t row = rows - slots + slot;
    return {by_query && window >= 0 ? std::max(edge, context + row + 1 - window) : low, context};
  }
  // Block rows that it sees.
  Span block_of(int64_t slot) const {
    const int64_t row = rows - slots + slot;
    Span span{0, causal ? std::min(block_length, row + 1) : block_length};
    if (by_query && window >= 0) {
      const int64_t reach = std::min(window, rows);
      span = {std::max<int64_t>(0, row - reach + 1), std::min(span.end, row + reach)};
    }
    return {span.begin, std::max(span.begin, span.end)};
  }
  bool block_differs() const { return causal || (by_query && window >= 0); }
};

}  // namespace dmtp::DMTP_CAPABILITY
