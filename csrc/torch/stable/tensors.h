#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "dmtp/types.h"

namespace dmtp {

using Stable = torch::stable::Tensor;
using MaybeStable = std::optional<Stable>;

inline DType dtype_of(const Stable& tensor) {
  using Scalar = torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case Scalar::Float:
      return DType::f32;
    case Scalar::Double:
      return DType::f64;
    case Scalar::Half:
      return DType::f16;
    case Scalar::BFloat16:
      return DType::bf16;
    case Scalar::Float8_e4m3fn:
      return DType::f8e4m3;
    case Scalar::Float8_e5m2:
      return DType::f8e5m2;
    case Scalar::Long:
      return DType::i64;
    case Scalar::Int:
      return DType::i32;
    case Scalar::Char:
      return DType::i8;
    case Scalar::Byte:
      return DType::u8;
    case Scalar::Bool:
      return DType::boolean;
    default:
      throw std::invalid_argument("no kernel takes a tensor of this dtype");
  }
}

// A kernel's view of a tensor of up to four dimensions. Shapes are the op's to check, before this is called.
inline Tensor view(const Stable& tensor) {
  if (tensor.dim() > 4) {
    throw std::invalid_argument("kernels take tensors of up to four dimensions");
  }
  Tensor out;
  out.data = tensor.data_ptr();
  out.dtype = dtype_of(tensor);
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    out.size[i] = tensor.size(i);
    out.stride[i] = tensor.stride(i);
  }
  return out;
}

inline Tensor view(const MaybeStable& tensor) {
  return tensor ? view(*tensor) : Tensor{};
}

}  // namespace dmtp
