#pragma once

#include "cuda/commit_slots.cuh"
#include "cuda/convert.cuh"

// What one launch of a commit gets.
namespace dmtp::cuda {

constexpr int kMostKinds = 64;     // of one launch: its parameters are memory of the launch
constexpr int64_t kBytes = 4096;   // of a row that a block copies; not measured
constexpr int kStaged = 24 << 10;  // bytes of rows that a block computes on
constexpr int kMostDim = 512;      // elements of a head that a warp computes on

// K or V of one layer.
struct Kind {
  const char* rows;
  char* cache;
  const float* scale;                   // or null
  const char* norm;                     // or null
  int64_t rows_step[3], cache_step[3];  // bytes: request, row, head; page, row, head
  int64_t scale_step[2];                // request, head
  int64_t heads, dim, page_size;
  DType rows_type, cache_type, norm_type;
  bool rotated, copied;
  int owner;
  int64_t first_unit, groups;  // blocks of a tile of one request
};

struct Commit {
  Kind kinds[kMostKinds];
  CommitCache caches[kMostCaches];
  Counts counts;
  Tensor hidden, next_hidden, lengths, cos_sin, positions, error;
  double norm_eps, norm_offset;
  int64_t tiles, units;  // blocks of a request, the last of them for its hidden
  int count, cache_count;
  bool last;  // launch of the call
};

__device__ inline char* address(const Kind& kind, int64_t slot) {
  return kind.cache + slot / kind.page_size * kind.cache_step[0] + slot % kind.page_size * kind.cache_step[1];
}

__device__ inline const Kind& kind_of(const Commit& c, int64_t unit) {
  int i = 0;
  while (i + 1 < c.count && c.kinds[i + 1].first_unit <= unit) {
    ++i;
  }
  return c.kinds[i];
}

}  // namespace dmtp::cuda
