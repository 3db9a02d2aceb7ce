#include "library.h"

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>
#include <string>

namespace dmtp {
namespace {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kFloat8_e4m3fn:
      return DType::f8e4m3;
    case at::kFloat8_e5m2:
      return DType::f8e5m2;
    case at::kLong:
      return DType::i64;
    case at::kInt:
      return DType::i32;
    case at::kChar:
      return DType::i8;
    case at::kByte:
      return DType::u8;
    case at::kBool:
      return DType::boolean;
    default:
      throw std::invalid_argument(std::string("no kernel takes dtype ") + c10::toString(type));
  }
}

}  // namespace

Tensor view(const at::Tensor& tensor) {
  if (tensor.dim() > 4 || !tensor.device().is_cpu()) {
    throw std::invalid_argument("kernels take CPU tensors of up to four dimensions");
  }
  Tensor out;
  out.data = tensor.data_ptr();
  out.dtype = dtype_of(tensor.scalar_type());
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    out.size[i] = tensor.size(i);
    out.stride[i] = tensor.stride(i);
  }
  return out;
}

Tensor view(const std::optional<at::Tensor>& tensor) {
  return tensor ? view(*tensor) : Tensor{};
}

ParallelFor parallel_for() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  // compiled inside libtorch: at::parallel_for itself is a header that would bring a second OpenMP runtime
  const auto run = [](int64_t n, int64_t grain, RangeBody body, void* context) {
    if (torch_parallel_for(0, n, grain, body, context) != 0) {
      throw std::runtime_error("at::parallel_for failed");
    }
  };
  return {run, static_cast<int>(threads)};
}

}  // namespace dmtp
