#pragma once

// What every CUDA kernel of this folder starts from. Tests run the same sources on the CPU (csrc/testing).
#ifdef DMTP_CUDA_HOST
#include "testing/cuda_host.h"
#else
#include <cuda_runtime.h>

// shared memory of the block; the type has no constructor
#define DMTP_SHARED(Type, name) __shared__ Type name
#endif

#include "dmtp/types.h"

namespace dmtp::cuda {

constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int kLanes = 32;

// a count beyond 32 bits would be cut to a small one, and most of the work left out
constexpr int64_t kMostBlocks = 0x7fffffff;
constexpr const char* kTooManyBlocks = "more blocks than a grid has";

#ifdef DMTP_CUDA_HOST
template <class... Wanted, class... Given>
const char* launch(void (*kernel)(Wanted...), int64_t blocks, int threads, void*, Given... arguments) {
  if (blocks > kMostBlocks) {
    return kTooManyBlocks;
  }
  const host::Index grid{static_cast<unsigned>(blocks), 1, 1}, block{static_cast<unsigned>(threads), 1, 1};
  return host::run(grid, block, false, [=] { kernel(static_cast<Wanted>(arguments)...); });
}
#else
// Null, or what the runtime says of the launch.
template <class... Wanted, class... Given>
const char* launch(void (*kernel)(Wanted...), int64_t blocks, int threads, void* stream, Given... arguments) {
  if (blocks > kMostBlocks) {
    return kTooManyBlocks;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline int device_has(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}
#endif

// Plain accesses to global memory, that tests count.
template <class T>
__device__ inline T load_global(const T* at) {
#ifdef DMTP_CUDA_HOST
  host::aligned(at, alignof(T));
  host::record(at, sizeof(T), false);
#endif
  return *at;
}

template <class T>
__device__ inline void store_global(T* at, T value) {
#ifdef DMTP_CUDA_HOST
  host::aligned(at, alignof(T));
  host::record(at, sizeof(T), true);
#endif
  *at = value;
}

__device__ inline bool given(const Tensor& t) {
  return t.dtype != DType::none;
}

template <class T>
__device__ inline T* row_of(const Tensor& t, int64_t row, int64_t entry = 0) {
  return static_cast<T*>(t.data) + row * t.stride[0] + entry * t.stride[1];
}

__device__ inline int64_t index_at(const Tensor& t, int64_t offset) {
  return t.dtype == DType::i64 ? load_global(static_cast<const int64_t*>(t.data) + offset)
                               : load_global(static_cast<const int32_t*>(t.data) + offset);
}

__device__ inline int64_t index_of(const Tensor& t, int64_t row) {
  return index_at(t, row * t.stride[0]);
}

__device__ inline void set_index(const Tensor& t, int64_t offset, int64_t value) {
  if (t.dtype == DType::i64) {
    store_global(static_cast<int64_t*>(t.data) + offset, value);
  } else {
    store_global(static_cast<int32_t*>(t.data) + offset, static_cast<int32_t>(value));
  }
}

__device__ inline int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

__device__ inline int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

__device__ inline int64_t within(int64_t x, int64_t low, int64_t high) {
  return least(most(x, low), high);
}

}  // namespace dmtp::cuda
