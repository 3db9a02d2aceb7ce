#pragma once

#include "cuda/device.cuh"
#include "dmtp/accept.h"

namespace dmtp::cuda {

enum Finished : int32_t { kRunning, kStopped, kLength };

__device__ inline bool is_stop(const Emission& e, int64_t b, int64_t token) {
  for (int64_t i = 0; i < e.stop_ids.size[1]; ++i) {
    if (index_at(e.stop_ids, b * e.stop_ids.stride[0] + i * e.stop_ids.stride[1]) == token) {
      return true;
    }
  }
  return false;
}

// Candidates really proposed, at most `limit`; negative for an inert request.
__device__ inline int64_t limit_of(const Tensor& num_candidates, int64_t b, int64_t limit) {
  return given(num_candidates) ? least(index_of(num_candidates, b), limit) : limit;
}

// Cuts `token(0..accepted)` at the first stop token, at the budget and at a negative token; all lanes of a warp call
// it. Inert requests emit nothing.
template <class Token>
__device__ inline void emit(const Emission& e, int64_t b, int lane, bool live, int64_t accepted, Token token) {
  const int64_t budget = index_of(e.budget, b), width = e.out_tokens.size[1];
  live = live && budget > 0;
  accepted = live ? accepted : 0;
  const int64_t may = live ? least(accepted + 1, budget) : 0;
  int64_t count = 0, last = -1;
  bool stopped = false, open = true;
  for (int64_t from = 0; from < width; from += kLanes) {
    const int64_t j = from + lane, next = open && j < may ? token(j) : -1;
    const uint32_t ends = __ballot_sync(kAllLanes, next < 0);
    const uint32_t stops = __ballot_sync(kAllLanes, next >= 0 && is_stop(e, b, next));
    if (open) {
      const int end = ends != 0 ? __ffs(static_cast<int>(ends)) - 1 : kLanes;
      const int stop = stops != 0 ? __ffs(static_cast<int>(stops)) - 1 : kLanes;
      stopped = stop < end;
      const int taken = stopped ? stop + 1 : end;
      count += taken;
      open = taken == kLanes && !stopped;
      const int64_t final = __shfl_sync(kAllLanes, static_cast<long long>(next), taken > 0 ? taken - 1 : 0);
      last = taken > 0 ? final : last;
    }
    if (j < width) {
      *row_of<int64_t>(e.out_tokens, b, j) = j < count ? next : -1;
    }
  }
  if (lane == 0) {
    *row_of<int32_t>(e.accept_len, b) = static_cast<int32_t>(accepted);
    *row_of<int32_t>(e.commit_len, b) = static_cast<int32_t>(count);
    *row_of<int64_t>(e.bonus, b) = last;
    *row_of<int32_t>(e.finished, b) = stopped ? kStopped : live && count >= budget ? kLength : kRunning;
  }
}

}  // namespace dmtp::cuda
