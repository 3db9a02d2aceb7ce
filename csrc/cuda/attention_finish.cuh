#pragma once

#include "cuda/attention_tile.cuh"

// From states of the online softmax to outputs: four columns of a query row at a time.
namespace dmtp::cuda {

// A state: the greatest score, the sum of 2^(score - top), and four columns of that sum weighted by the values.
struct State {
  float top = kNone, total = 0;
  float of[4] = {};

  __device__ void add(float other_top, float other_total, const float4& other) {
    const Merge by = merge(top, other_top);
    total = total * by.first + other_total * by.second;
    const float added[] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      of[j] = of[j] * by.first + added[j] * by.second;
    }
  }
};

// Where a query row of a request lies among the partial sums of a chunk.
__device__ inline int64_t partial_row(const AttentionLaunch& a, int64_t b, int head, int chunk, int row) {
  return ((b * a.heads + head) * a.chunks + chunk) * a.query_rows + row;
}

__device__ inline void store_columns(const Tensor& t, int64_t at, int columns, const float (&x)[4], bool whole) {
  if (whole && columns == 4 && t.dtype == DType::f32) {
    store_global(reinterpret_cast<float4*>(static_cast<float*>(t.data) + at), float4{x[0], x[1], x[2], x[3]});
    return;
  }
  if (whole && columns == 4) {
    const bool bf16 = t.dtype == DType::bf16;
    const auto two = [&](float low, float high) {
      return bf16 ? packed(Bf16Mma{}, low, high) : packed(Fp16Mma{}, low, high);
    };
    store_global(reinterpret_cast<uint2*>(static_cast<uint16_t*>(t.data) + at),
                 uint2{two(x[0], x[1]), two(x[2], x[3])});
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < columns) {
      store_as<float>(t.dtype, t.data, at + j * t.stride[3], x[j]);
    }
  }
}

// Columns from `column` on of a final state; without a key 0, and -inf.
__device__ inline void finish(const AttentionLaunch& a, int64_t b, int head, int row, int column, State s) {
  const BlockAttention& c = a.call;
  const int slot = row / a.group, q_head = head * a.group + row - slot * a.group;
  const bool empty = s.top == kNone;
  if (given(c.sink)) {
    const Merge by = merge(s.top, load_as<float>(c.sink.dtype, c.sink.data, q_head * c.sink.stride[0]) * kLog2e);
    s.total = s.total * by.first + by.second;
#pragma unroll
    for (float& x : s.of) {
      x *= by.first;
    }
  }
#pragma unroll
  for (float& x : s.of) {
    // + 0: merging with nothing turns -0 into 0, and whether that was done must not show
    x = empty ? 0.0f : (x + 0.0f) / s.total;
  }
  const auto at = [&](const Tensor& t) { return b * t.stride[0] + slot * t.stride[1] + q_head * t.stride[2]; };
  const int columns = a.dim - column < 4 ? a.dim - column : 4;
  store_columns(c.out, at(c.out) + column * c.out.stride[3], columns, s.of, a.out_aligned);
  if (column == 0) {
    store_as<float>(c.lse.dtype, c.lse.data, at(c.lse), empty ? kNone : (s.top + log2f(s.total)) * kLn2);
  }
}

// What a chunk of several leaves to `block_attention_combine_kernel`.
__device__ inline void leave(const AttentionLaunch& a, int64_t at, int column, const State& s) {
  float* to = a.sums + at * a.dim + column;
  if (a.dim % 4 == 0) {
    store_global(reinterpret_cast<float4*>(to), float4{s.of[0], s.of[1], s.of[2], s.of[3]});
  } else {
    for (int j = 0; j < 4 && column + j < a.dim; ++j) {
      store_global(to + j, s.of[j]);
    }
  }
  if (column == 0) {
    store_global(a.totals + at, s.total);
    store_global(a.tops + at, s.top);
  }
}

// Four columns that a chunk left.
__device__ inline float4 left_at(const AttentionLaunch& a, int64_t at, int column) {
  const float* from = a.sums + at * a.dim + column;
  if (a.dim % 4 == 0) {
    return load_global(reinterpret_cast<const float4*>(from));
  }
  float x[4] = {};
  for (int j = 0; j < 4 && column + j < a.dim; ++j) {
    x[j] = load_global(from + j);
  }
  return {x[0], x[1], x[2], x[3]};
}

}  // namespace dmtp::cuda
