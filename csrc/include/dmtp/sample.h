#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

// One call of sample_rows. Floats may be fp64.
struct SampleRows {
  Tensor logits;       // [n, V]
  Tensor temperature;  // [n]
  Tensor seed;         // [n]
  Tensor position;     // [n]
  Tensor top_k;        // [n] or absent
  Tensor top_p;        // [n] or absent

  int64_t num_valid;
  uint32_t stream;

  Tensor token;   // [n] int64, out
  Tensor status;  // [n] int32, out

  ParallelFor parallel;
};

}  // namespace dmtp
