#pragma once

#include "cuda/cluster.cuh"
#include "cuda/convert.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/mma.cuh"
#include "dmtp/block_attention.h"

// Shapes of a block of threads, and what a launch of block attention is given (dmtp_kernels/ops/block_attention/
// kernels.md).
namespace dmtp::cuda {

constexpr int kParts = 8;  // of a chunk: each is summed from nothing, by a block of the cluster or one after another
constexpr float kNone = -INFINITY;         // greatest score of no key
constexpr float kLeast = -3.40282347e38f;  // of keys that are visible and score -inf
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// Rows of keys or values, one kv head: strides in bytes, of 2^31 and more too.
struct RowsOfKeys {
  const char* data;
  int64_t page, row;
};

struct Fp32Fma {
  using Sum = float;
};

template <class Kind>
constexpr bool kIsFp32 = false;
template <>
inline constexpr bool kIsFp32<Fp32Fma> = true;

// A block: each of its warps sums 16 query rows over 16 keys of every tile. `kFp8`: keys and values are bytes in
// global memory.
template <class KindOfSum, int kPaddedDim, int kWarpsOfRows, int kWarpsOfKeys, bool kBytes>
struct AttentionShape {
  using Kind = KindOfSum;
  static constexpr bool kFp8 = kBytes;
  static constexpr int kDim = kPaddedDim;
  static constexpr int kRowWarps = kWarpsOfRows, kKeyWarps = kWarpsOfKeys;
  static constexpr int kWarps = kRowWarps * kKeyWarps, kThreads = kWarps * kLanes;
  static constexpr int kRows = 16 * kRowWarps, kKeys = 16 * kKeyWarps;
  static constexpr int kItem = kIsFp32<Kind> ? 4 : 2;
  static constexpr int kPieces = kDim * kItem / 16;  // 16 bytes each, of a row in shared memory
  static constexpr int kColumns = kDim / 8;          // groups of eight columns that a matrix instruction makes

  // shared memory: q, a tile that fp8 rows are converted to, tiles on their way, the sum of parts, states, places
  static constexpr int kTileBytes = kKeys * kDim * kItem;
  static constexpr int kStageBytes = 2 * kKeys * kDim * (kFp8 ? 1 : kItem);
  static constexpr int kQueryBytes = kRows * kDim * kItem;
  static constexpr int kSumBytes = kRows * kDim * 4;
  static constexpr int kStateBytes = kKeyWarps * kRows * 8;
  static constexpr int kMostStages = 4;
  static constexpr int kPlaceBytes = (kMostStages + 1) * kKeys * 8;
  static constexpr int kSourceBytes = 128;
  static constexpr int kFixedBytes =
      kQueryBytes + (kFp8 ? 2 * kTileBytes : 0) + kSumBytes + kStateBytes + kPlaceBytes + kSourceBytes;
  static_assert(kSourceBytes >= 4 * sizeof(RowsOfKeys));
  static_assert((kKeyWarps - 1) * kSumBytes <= 2 * kStageBytes + (kFp8 ? 2 * kTileBytes : 0));
};

struct AttentionLaunch {
  BlockAttention call;
  float* sums;    // [B, Hkv, chunks, S * group, D] of requests with more than one chunk, in log2 units
  float* totals;  // [B, Hkv, chunks, S * group]
  float* tops;
  int64_t batch;
  int heads, group, slots, query_rows, dim;
  int block_rows, page_size, pages, capacity, window;  // window < 0: no limit
  int tiles, chunks, part, cluster, stages;
  float factor, cap;  // of scores in log2 units; 0: no cap
  bool query_aligned, cache_aligned, block_aligned, out_aligned;
};

// Of one request: context rows, valid block rows, the first visible context row and the row that chunks start at.
struct Request {
  int ctx, length, low, base;
};

__device__ inline Request request_of(const AttentionLaunch& a, int64_t b) {
  const BlockAttention& c = a.call;
  const int64_t length = given(c.block_len) ? within(index_of(c.block_len, b), 0, a.block_rows) : a.block_rows;
  const int64_t ctx = index_of(c.ctx_len, b);
  if (ctx < 0 || ctx > a.capacity - (given(c.block_k) ? 0 : length)) {
    return {0, 0, 0, 0};
  }
  int64_t base = 0;
  if (a.window >= 0) {
    base = within(ctx - a.window + (c.by_query ? a.block_rows - a.slots + 1 : 0), 0, ctx);
  }
  const int64_t low = given(c.valid_from) ? within(index_of(c.valid_from, b), base, ctx) : base;
  return {static_cast<int>(ctx), static_cast<int>(length), static_cast<int>(low), static_cast<int>(base)};
}

// Factors that bring the states of two sets of keys to the greater of their tops, which replaces the first. A state of
// no key changes no bit of the other.
struct Merge {
  float first, second;
};

__device__ inline Merge merge(float& top, float other) {
  const float joint = fmaxf(top, other), shift = joint == kNone ? 0.0f : joint;
  const Merge factors{exp2f(top - shift), exp2f(other - shift)};
  top = joint;
  return factors;
}

// An inert launch's block that has nothing to do is seen from this: the chunk's first row and the end of its rows.
struct Span {
  int begin, end;
};

template <int kKeys>
__device__ inline Span span_of(const Request& r, int first, int rows) {
  const int seen = r.base + (r.low - r.base) / kKeys * kKeys;
  const int64_t end = static_cast<int64_t>(first) + rows;
  return {first > seen ? first : seen, static_cast<int>(least(end, r.ctx))};
}

}  // namespace dmtp::cuda
