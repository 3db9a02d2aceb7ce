#pragma once

#include "cuda/t1_params.cuh"

// Ordered floats, keys and token ids of a head (dmtp_kernels/ops/lm_head/keys.py).
namespace dmtp::cuda {

constexpr long long kNoKey = INT64_MIN;
constexpr int32_t kAbsent = INT32_MIN;          // below every float
constexpr float kUnderflow = 0x1p-125f;         // what products lose
constexpr float kRadiusLimit = 0x1p100f;        // below it no order of summation overflows
constexpr int32_t kOrderedLeast = -0x7f800001;  // of -inf

// int32 that orders like the float; -0.0 like 0.0.
__device__ inline int32_t ordered(float x) {
  const auto bits = bits_as<int32_t>(x == 0.0f ? 0.0f : x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// The greatest int32 gives NaN.
__device__ inline float unordered(int32_t bits) {
  return bits_as<float>(bits < 0 ? bits ^ 0x7fffffff : bits);
}

__device__ inline float rounded(float logit, bool bf16) {
  return bf16 ? from_bf16(to_bf16(logit)) : logit;
}

__device__ inline long long encode(float logit, int64_t token) {
  if (logit != logit || token < 0) {
    return kNoKey;
  }
  const auto high = static_cast<uint64_t>(static_cast<uint32_t>(ordered(logit)));
  return static_cast<long long>(high << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(token)));
}

// Token of a row of the head, negative where it has none.
__device__ inline int64_t token_of(const LMHead& head, int64_t row) {
  if (row >= head.num_valid) {
    return -1;
  }
  const int64_t token = row + head.id_offset;
  if (head.id_map_mode == IdMap::none) {
    return token;
  }
  const int64_t mapped = index_of(head.id_map, row);
  return head.id_map_mode == IdMap::offset ? token + mapped : mapped;
}

__device__ inline bool is_finite(float x) {
  return (bits_as<uint32_t>(x) & 0x7fffffff) < 0x7f800000;
}

}  // namespace dmtp::cuda
