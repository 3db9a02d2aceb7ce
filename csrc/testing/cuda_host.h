#pragma once

// The part of CUDA's language and runtime that csrc/cuda uses, on fibers: what csrc/cuda/device.cuh includes in a test
// build. Nothing here runs on a GPU or says anything about one's speed.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define DMTP_SHARED(Type, name) Type& name = *static_cast<Type*>(dmtp::host::shared(__COUNTER__, sizeof(Type)))
#define DMTP_DYNAMIC_SHARED(Type, name) Type& name = *static_cast<Type*>(dmtp::host::dynamic_shared(sizeof(Type)))

#define threadIdx (dmtp::host::current->index)
#define blockIdx (dmtp::host::current->block)
#define blockDim (dmtp::host::block_size)
#define gridDim (dmtp::host::grid_size)
#define __syncthreads() dmtp::host::block_barrier({__FILE__, __LINE__})
#define __syncwarp(...) dmtp::host::warp_barrier({__FILE__, __LINE__}, dmtp::host::mask_of(__VA_ARGS__))

namespace dmtp::host {

inline uint32_t mask_of(uint32_t mask = 0xffffffff) {
  return mask;
}

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace dmtp::host

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};

inline int lane_of() {
  return static_cast<int>(threadIdx.x & 31);
}

template <class T>
T __shfl_sync(uint32_t mask, T value, int from, int = 32) {
  const auto kind = dmtp::host::Together::shuffle;
  return dmtp::host::value_of<T>(dmtp::host::together(kind, mask, dmtp::host::bits_of(value), from & 31));
}

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes, int = 32) {
  return __shfl_sync(mask, value, lane_of() ^ lanes);
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned lanes, int = 32) {
  const int from = lane_of() + static_cast<int>(lanes);
  return __shfl_sync(mask, value, from < 32 ? from : lane_of());
}

template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned lanes, int = 32) {
  const int from = lane_of() - static_cast<int>(lanes);
  return __shfl_sync(mask, value, from >= 0 ? from : lane_of());
}

inline unsigned __ballot_sync(uint32_t mask, int predicate) {
  return static_cast<unsigned>(dmtp::host::together(dmtp::host::Together::ballot, mask, predicate != 0, 0));
}

inline int __any_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}

inline int __all_sync(uint32_t mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

template <class T>
unsigned __match_any_sync(uint32_t mask, T value) {
  const auto kind = dmtp::host::Together::match;
  return static_cast<unsigned>(dmtp::host::together(kind, mask, dmtp::host::bits_of(value), 0));
}

template <class T>
T atomicAdd(T* at, T value) {
  dmtp::host::before_atomic();
  const T before = *at;
  *at = before + value;
  return before;
}

template <class T>
T atomicMax(T* at, T value) {
  dmtp::host::before_atomic();
  const T before = *at;
  *at = std::max(before, value);
  return before;
}

template <class T>
T atomicMin(T* at, T value) {
  dmtp::host::before_atomic();
  const T before = *at;
  *at = std::min(before, value);
  return before;
}

template <class T>
T atomicOr(T* at, T value) {
  dmtp::host::before_atomic();
  const T before = *at;
  *at = before | value;
  return before;
}

template <class T>
T atomicExch(T* at, T value) {
  dmtp::host::before_atomic();
  const T before = *at;
  *at = value;
  return before;
}

template <class T>
T atomicCAS(T* at, T expected, T value) {
  dmtp::host::before_atomic();
  const T before = *at;
  *at = before == expected ? value : before;
  return before;
}

inline void __threadfence() {}

inline void __nanosleep(unsigned) {
  dmtp::host::pause();
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}

inline int __ffs(int x) {
  return __builtin_ffs(x);
}

inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}

inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}

inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}

inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}

inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}

inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
