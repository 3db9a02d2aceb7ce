#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

// What a round emits, and the request's limits. Index tensors are int32 or int64.
struct Emission {
  Tensor stop_ids;  // [B, E], or [1, E] with stride 0 for one list
  Tensor budget;    // [B]

  Tensor accept_len;  // [B] int32, out
  Tensor commit_len;  // [B] int32, out
  Tensor bonus;       // [B] int64, out
  Tensor out_tokens;  // [B, R] int64, out
  Tensor finished;    // [B] int32, out
};

// One call of accept_prefix.
struct AcceptPrefix {
  Tensor candidates;      // [B, R]
  Tensor target;          // [B, R]
  Tensor num_candidates;  // [B] or absent
  Emission emission;

  ParallelFor parallel;
};

// One call of accept_rejection or of accept_block. Floats may be fp64.
struct AcceptSampled {
  Tensor candidates;      // [B, R]
  Tensor target_logits;   // [B, R, V]
  Tensor temperature;     // [B]
  Tensor seed;            // [B]
  Tensor position;        // [B]
  Tensor draft_probs;     // [B, K, V], or [B, K, N] with draft_ids, or absent: one-hot
  Tensor num_candidates;  // [B] or absent
  Tensor top_k;           // [B] or absent
  Tensor top_p;           // [B] or absent
  Tensor draft_ids;       // [B, K, N] or absent
  bool block;             // verify the block as a whole
  Emission emission;
  Tensor status;  // [B] int32, out

  ParallelFor parallel;
};

}  // namespace dmtp
