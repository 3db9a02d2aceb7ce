#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

// One kind of rows of one layer.
struct CommitLayer {
  Tensor rows;   // [B, R, Hkv, D]
  Tensor cache;  // [num_slots, Hkv, D], or [num_pages, page_size, Hkv, D]
  Tensor scale;  // fp32 [B, Hkv] or absent
  Tensor norm;   // [D] or absent
  bool rotated;
  int64_t owner;  // number of its cache
};

// Slots of one cache, which all its layers share.
struct CommitCache {
  Tensor dst;           // [B, R]
  Tensor pending_slot;  // [B] or absent, like the next two
  Tensor promote_dst;   // [B]
  Tensor scratch_dst;   // [B, R]

  int64_t num_slots;
  int64_t page_size;  // 0: caches are flat
  int64_t first_slot;
};

// One call of commit_kv or commit_round.
struct CommitKV {
  const CommitLayer* layers;  // of K and of V, of all caches
  int64_t count;
  const CommitCache* caches;
  int64_t cache_count;

  Tensor valid;        // [B]
  Tensor hidden;       // [B, R, H] or absent, like all that follow
  Tensor next_hidden;  // [B, H]
  Tensor lengths;      // [B]
  Tensor live;         // [B]
  Tensor cos_sin;      // [M, rotary_dim]
  Tensor positions;    // [B, R]

  double norm_eps, norm_offset;

  Tensor error;  // [B] int32, out

  ParallelFor parallel;
};

}  // namespace dmtp
