#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

constexpr int kMaxTables = 3;

// One call of advance_round. Tensors are as the op takes them.
struct Advance {
  Tensor length;  // [B] each, i32 or i64; the first four are moved
  Tensor anchor;
  Tensor budget;
  Tensor finished;
  Tensor commit_len;
  Tensor bonus;
  Tensor ended;
  Tensor tables[kMaxTables];  // [B, MP] each, i32 or i64
  Tensor grants;              // [B, G, 3] i32 or absent

  int64_t num_tables;
  int64_t page_sizes[kMaxTables];
  int64_t mask_id;
  int64_t first_page;

  Tensor positions;        // [B, R] i64, out
  Tensor token_positions;  // [B, R] i64, out
  Tensor context_len;      // [B] i64, out
  Tensor history_len;      // [B] i64, out
  Tensor slots;            // [B, T, R] i64, out
  Tensor previous_slots;   // [B, T] i64, out
  Tensor block_ids;        // [B, S] i64, out
  Tensor error;            // [B] i32, out

  ParallelFor parallel;
};

}  // namespace dmtp
