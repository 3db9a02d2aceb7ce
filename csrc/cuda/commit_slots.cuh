#pragma once

#include "cuda/device.cuh"
#include "dmtp/commit_kv.h"

// Where the rows of a commit go, and which of several that share a slot is the last.
namespace dmtp::cuda {

constexpr int kCommitThreads = 128;
constexpr int kTile = 32;  // rows of a request up to which all its reads come before its writes
constexpr int kMostCaches = 8;

enum CommitError : int32_t { kBadCount = 1, kBadSlot = 2, kBadOwner = 4, kBadPosition = 8 };

struct Counts {
  Tensor valid, live;  // [B]
  int64_t batch, rows;
};

__device__ inline bool is_live(const Counts& c, int64_t b) {
  return !given(c.live) || *row_of<bool>(c.live, b);
}

// Rows of request b that are true, 0 where it is dead.
__device__ inline int64_t count_of(const Counts& c, int64_t b) {
  return is_live(c, b) ? within(index_of(c.valid, b), 0, c.rows) : 0;
}

__device__ inline bool inside(const CommitCache& cache, int64_t slot) {
  return slot >= cache.first_slot && slot < cache.num_slots;
}

// The slot of row j as the caller gave it, -1 for a row that goes nowhere.
__device__ inline int64_t slot_of(const CommitCache& cache, int64_t b, int64_t j, int64_t count) {
  if (j >= count) {
    return count > 0 && given(cache.scratch_dst) ? index_at(cache.scratch_dst, b * cache.scratch_dst.stride[0] + j)
                                                 : -1;
  }
  return given(cache.pending_slot) && j == count - 1 ? index_of(cache.pending_slot, b)
                                                     : index_at(cache.dst, b * cache.dst.stride[0] + j);
}

struct Promotion {
  int64_t source = -1, target = -1;  // both -1 where nothing is promoted
};

__device__ inline Promotion promotion_of(const CommitCache& cache, int64_t b, int64_t count) {
  Promotion p;
  if (count > 0 && given(cache.pending_slot)) {
    const int64_t source = index_of(cache.pending_slot, b), target = index_of(cache.promote_dst, b);
    if (inside(cache, source) && inside(cache, target)) {
      p = {source, target};
    }
  }
  return p;
}

// What a look at every write of the call says to one block, in shared memory.
struct Writers {
  long long own[kTile];  // slots of the tile's rows, -1 for those that are not written
  unsigned lost;         // rows whose slot a later row writes
  unsigned overruled;    // a later write goes to the promotion's target
  unsigned taken;        // another request writes the promotion's source
  int winner;            // the last of the request's rows that goes to the source
};

// Rows first..first + 31 of request b; all threads of the block call it.
__device__ inline void look(const Counts& counts, const CommitCache& cache, int64_t b, int64_t first, int64_t count,
                            Promotion promotion, Writers& s) {
  for (int r = static_cast<int>(threadIdx.x); r < kTile; r += static_cast<int>(blockDim.x)) {
    const int64_t slot = first + r < counts.rows ? slot_of(cache, b, first + r, count) : -1;
    s.own[r] = inside(cache, slot) ? slot : -1;
  }
  if (threadIdx.x == 0) {
    s.lost = s.overruled = s.taken = 0;
    s.winner = -1;
  }
  __syncthreads();
  for (int64_t f = threadIdx.x; f < counts.batch * counts.rows; f += blockDim.x) {
    const int64_t request = f / counts.rows, j = f % counts.rows;
    const int64_t slot = slot_of(cache, request, j, count_of(counts, request));
    if (!inside(cache, slot)) {
      continue;
    }
    for (int r = 0; r < kTile; ++r) {
      if (s.own[r] == slot && f > b * counts.rows + first + r) {
        atomicOr(&s.lost, 1u << r);
      }
    }
    if (slot == promotion.target) {
      atomicOr(&s.overruled, 1u);
    }
    if (slot == promotion.source && request != b) {
      atomicOr(&s.taken, 1u);
    }
    if (slot == promotion.source && request == b) {
      atomicMax(&s.winner, static_cast<int>(j));
    }
  }
  for (int64_t request = threadIdx.x; promotion.target >= 0 && request < counts.batch; request += blockDim.x) {
    const int64_t other = promotion_of(cache, request, count_of(counts, request)).target;
    if (other == promotion.target && request > b) {
      atomicOr(&s.overruled, 1u);
    }
    if (other == promotion.source && request != b) {
      atomicOr(&s.taken, 1u);
    }
  }
  __syncthreads();
}

}  // namespace dmtp::cuda
