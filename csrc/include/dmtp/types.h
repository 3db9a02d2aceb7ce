#pragma once

#include <cstdint>

namespace dmtp {

enum class DType : int8_t { none, f32, f64, f16, bf16, f8e4m3, f8e5m2, i64, i32, i8, u8, boolean };

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct Fp8e4m3 {  // torch's float8_e4m3fn: no infinities
  uint8_t bits;
};
struct Fp8e5m2 {
  uint8_t bits;
};

// A strided view of up to four dimensions; strides count elements. `data` is null where an optional tensor is absent.
struct Tensor {
  void* data = nullptr;
  int64_t size[4] = {1, 1, 1, 1};
  int64_t stride[4] = {0, 0, 0, 0};
  DType dtype = DType::none;

  explicit operator bool() const { return dtype != DType::none; }

  template <class T>
  T* row(int64_t i) const {
    return static_cast<T*>(data) + i * stride[0];
  }
};

}  // namespace dmtp
