#pragma once

#include "cuda/logits.cuh"

namespace dmtp::cuda {

// Rows whose filters are searched: `rows` of each request, one after the other.
struct CutRows {
  Tensor logits;       // [B, R, V]
  Tensor temperature;  // [B]
  Tensor top_k;        // [B] or absent
  Tensor top_p;        // [B] or absent
  int64_t rows, num_valid;
  double unit;  // of a mass: dmtp_kernels/ops/sample/filters.py
  Cut* cuts;    // [B, R] out
};

// One block a row; `unit` is set here. Null, or why it failed.
const char* row_cuts(CutRows, int64_t batch, void* stream);

}  // namespace dmtp::cuda
