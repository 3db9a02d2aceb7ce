#pragma once

#include <algorithm>

#include "dmtp/accept.h"
#include "scalars.h"

namespace dmtp::DMTP_CAPABILITY {

enum Finished : int32_t { kRunning, kStopped, kLength };

inline bool is_stop(const Emission& e, int64_t b, int64_t token) {
  for (int64_t i = 0; i < e.stop_ids.size[1]; ++i) {
    if (index_at(e.stop_ids, b, i) == token) {
      return true;
    }
  }
  return false;
}

// Candidates really proposed, at most K; negative for an inert request.
inline int64_t limit_of(const Tensor& num_candidates, int64_t b, int64_t most) {
  return num_candidates ? std::min(index_at(num_candidates, b), most) : most;
}

// Cuts `token(0..accepted)` at the first stop token, at the budget and at a negative token. Inert requests emit
// nothing.
template <class Token>
void emit(const Emission& e, int64_t b, bool live, int64_t accepted, Token token) {
  const int64_t budget = index_at(e.budget, b), width = e.out_tokens.size[1], step = e.out_tokens.stride[1];
  auto* out = e.out_tokens.row<int64_t>(b);
  live = live && budget > 0;
  accepted = live ? accepted : 0;
  int64_t count = 0, last = -1;
  bool stopped = false;
  while (live && !stopped && count <= accepted && count < budget) {
    const int64_t next = token(count);
    if (next < 0) {
      break;
    }
    out[count++ * step] = last = next;
    stopped = is_stop(e, b, next);
  }
  for (int64_t j = count; j < width; ++j) {
    out[j * step] = -1;
  }
  e.accept_len.row<int32_t>(b)[0] = static_cast<int32_t>(accepted);
  e.commit_len.row<int32_t>(b)[0] = static_cast<int32_t>(count);
  e.bonus.row<int64_t>(b)[0] = last;
  e.finished.row<int32_t>(b)[0] = stopped ? kStopped : live && count >= budget ? kLength : kRunning;
}

}  // namespace dmtp::DMTP_CAPABILITY
