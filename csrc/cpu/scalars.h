#pragma once

#include "vector.h"

// Elements of small tensors whose dtype is known at run time only.
namespace dmtp::DMTP_CAPABILITY {

inline int64_t index_at(const Tensor& t, int64_t i, int64_t j = 0) {
  const int64_t at = i * t.stride[0] + j;
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[at] : static_cast<const int32_t*>(t.data)[at];
}

inline double float_at(const Tensor& t, int64_t i) {
  switch (t.dtype) {
    case DType::f64:
      return t.row<const double>(i)[0];
    case DType::f32:
      return t.row<const float>(i)[0];
    case DType::bf16:
      return to_float(t.row<const Bf16>(i)[0]);
    default:
      return to_float(t.row<const Fp16>(i)[0]);
  }
}

}  // namespace dmtp::DMTP_CAPABILITY
