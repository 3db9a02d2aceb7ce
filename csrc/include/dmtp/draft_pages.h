#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

// One call of draft_page_table, or of draft_page_table_from_slots.
struct DraftPages {
  Tensor source;      // [R, M] page ids, or token slots
  Tensor pool;        // [B] rows of the source, or absent: row b for request b
  Tensor ctx_len;     // [B]
  Tensor valid_from;  // [B] or absent

  int64_t window;
  int64_t page_size;
  int64_t block_slots;
  bool slots;  // the source holds token slots

  Tensor draft_table;  // [B, width] int32, out
  Tensor draft_len;    // [B] int32, out
  Tensor kv_skip;      // [B] int32, out

  ParallelFor parallel;
};

}  // namespace dmtp
