#pragma once

#include "cuda/t1_keys.cuh"
#include "cuda/t1_params.cuh"

// Sums over a block, and RMSNorms whose mean squares are canonical dots: the bits of the reference.
namespace dmtp::cuda {

struct WarpParts {
  double of[2][kPrepWarps];
};

// `join` over the values of all threads, of neighbours first, as a tree. int32, float or double. A block's calls have
// turns 0 and 1 alternately, so that nobody writes where another still reads.
template <class T, class Join>
__device__ T over_block(int& turn, T value, Join join) {
  DMTP_SHARED(WarpParts, parts);
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    value = join(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  if (threadIdx.x % kLanes == 0) {
    parts.of[turn][threadIdx.x / kLanes] = static_cast<double>(value);
  }
  __syncthreads();
  T all[kPrepWarps];
  for (int warp = 0; warp < kPrepWarps; ++warp) {
    all[warp] = static_cast<T>(parts.of[turn][warp]);
  }
  turn ^= 1;
  return join(join(all[0], all[1]), join(all[2], all[3]));
}

// Element i of a row times the factor, rounded to the row's type.
__device__ inline float scaled(DType dtype, const void* row, int64_t i, float factor) {
  const float x = load_float(dtype, row, i);
  return factor == 1.0f ? x : rounded_to(dtype, x * factor);
}

// A row times `factor`, normed, as elements `to` .. of request b's stream; whether its mean square is finite.
__device__ inline bool put_norm(int& turn, const Operand& o, int64_t b, int64_t to, DType dtype, const void* row,
                                int64_t size, float factor, const Tensor& weight, float eps, float offset) {
  // a thread has two neighbouring lanes of the 256
  float lanes[2] = {};
  for (int64_t start = 0; start < size; start += 2 * kPrepThreads) {
    const int64_t i = start + 2 * threadIdx.x;
    const float x = i < size ? scaled(dtype, row, i, factor) : 0.0f;
    const float y = i + 1 < size ? scaled(dtype, row, i + 1, factor) : 0.0f;
    lanes[0] = lanes[0] + x * x;
    lanes[1] = lanes[1] + y * y;
  }
  const float square = over_block(turn, lanes[0] + lanes[1], [](float x, float y) { return x + y; });
  const float mean = square / static_cast<float>(size), inverse = 1.0f / sqrtf(mean + eps);
  for (int64_t i = threadIdx.x; i < size; i += kPrepThreads) {
    const float shift = load_float(weight.dtype, weight.data, i * weight.stride[0]) + offset;
    put(o, b, to + i, scaled(dtype, row, i, factor) * inverse * shift);
  }
  return is_finite(mean);
}

}  // namespace dmtp::cuda
