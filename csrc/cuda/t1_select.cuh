#pragma once

#include "cuda/t1_keys.cuh"
#include "cuda/t1_norms.cuh"
#include "cuda/t1_stream.cuh"

// The selection of T1: states made ready, all rows of the head screened, and those that may win decided by their
// canonical dots (dmtp_kernels/ops/lm_head/README.md). Rows of requests without an anchor take no part.
namespace dmtp::cuda {

__device__ inline bool live(const T1Launch& a, int64_t b) {
  return index_of(a.prep.anchor_ids, b) >= 0;
}

// The state of request b as digits in fixed point: the step that they count.
__device__ inline float put_digits(int& turn, const T1Launch& a, int64_t b, const float* wide, int64_t size) {
  int32_t top = 0;
  for (int64_t i = threadIdx.x; i < size; i += kPrepThreads) {
    // as integers NaN is above infinity
    const auto bits = bits_as<int32_t>(wide[i]) & 0x7fffffff;
    top = bits > top ? bits : top;
  }
  top = over_block(turn, top, [](int32_t x, int32_t y) { return x > y ? x : y; });
  const auto greatest = bits_as<float>(top);
  const bool usable = greatest >= 0x1p-100f && greatest <= 0x1p100f;
  const int exponent = usable ? (top >> 23) - 127 - 21 : -21;
  const auto up = bits_as<float>((127 - exponent) << 23);
  for (int64_t i = threadIdx.x; i < a.states.padded; i += kPrepThreads) {
    const float x = usable && i < size ? wide[i] * up : 0.0f;
    // |x| <= 2^22: the sum has no bits below one, so the nearest even is taken
    auto rest = static_cast<int32_t>((x + 0x1.8p23f) - 0x1.8p23f);
#pragma unroll 1
    for (int plane = 0; plane < 3; ++plane) {
      const int32_t digit = ((rest + 128) & 255) - 128;
      rest = (rest - digit) >> 8;
      *reinterpret_cast<int8_t*>(fragment_at(a.states, b, i, plane)) = static_cast<int8_t>(digit);
    }
  }
  return usable || top == 0 ? bits_as<float>((127 + exponent) << 23) : bits_as<float>(0x7fc00000);
}

__device__ inline void prepare_state(int& turn, const T1Launch& a, int64_t b) {
  const bool first = threadIdx.x == 0;
  if (first) {
    a.key[b] = kNoKey;
    a.best[b] = kAbsent;
  }
  if (!live(a, b)) {
    return;
  }
  const int64_t size = a.h_mtp.size[1];
  float* wide = a.wide + b * a.wide_stride;
  double square = 0;
  for (int64_t i = threadIdx.x; i < a.wide_stride; i += kPrepThreads) {
    const float x = i < size ? load_float(a.h_mtp.dtype, a.h_mtp.data, b * a.h_mtp.stride[0] + i) : 0.0f;
    wide[i] = x;
    square += static_cast<double>(x) * x;
  }
  if (a.scan) {
    return;
  }
  square = over_block(turn, square, [](double x, double y) { return x + y; });
  if (first) {
    a.length[b] = static_cast<float>(sqrt(square)) * 0x1.00001p0f + 0x1p-149f;
  }
  if (a.states.how == Multiply::digits) {
    const float step = put_digits(turn, a, b, wide, size);
    if (first) {
      a.step[b] = step;
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < a.states.padded; i += kPrepThreads) {
    put(a.states, b, i, i < size ? wide[i] : 0.0f);
  }
}

template <class Product>
__device__ float score_of(const Product& product, int n, int j, float, float) {
  return product.value(n, j);
}

// Exact sums of digits: rounded by the scale in double, and to fp32.
template <int kTiles>
__device__ float score_of(const DigitProduct<kTiles>& product, int n, int j, float step, float scale) {
  const int64_t total = static_cast<int64_t>(product.sums[2][n][j]) * 65536 +
                        (static_cast<int64_t>(product.sums[1][n][j]) * 256 + product.sums[0][n][j]);
  return static_cast<float>(static_cast<double>(total) * step * scale);
}

// The upper ends of 16 rows' scores for every state; the lanes keep their states' greatest lower ends.
template <class Product, int kTiles>
__device__ void close_tile(const T1Launch& a, const Product& product, int64_t tile, int lane,
                           int32_t (&best)[kTiles][2]) {
  float bound[2], scale[2];
  bool named[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = tile * kTileRows + lane / 4 + 8 * i;
    named[i] = token_of(a.head, row) >= 0;
    bound[i] = named[i] ? static_cast<const float*>(a.head.bound.data)[row * a.head.bound.stride[0]] : 0.0f;
    scale[i] = named[i] && given(a.head.scale)
                   ? static_cast<const float*>(a.head.scale.data)[row * a.head.scale.stride[0]]
                   : 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t state = n * kTileStates + lane % 4 * 2 + j;
      const bool mine = state < a.batch;
      const float length = mine ? a.length[state] : 0.0f;
      const float step = mine && a.states.how == Multiply::digits ? a.step[state] : 0.0f;
      int32_t top = kAbsent;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float score = score_of(product, n, 2 * i + j, step, scale[i]), reach = bound[i] * length;
        const float radius = reach < kRadiusLimit ? reach : bits_as<float>(0x7f800000);
        const float low = score - radius, high = score + radius;
        // a NaN is no lower end, and an upper end above all
        const int32_t below = ordered(low < bits_as<float>(0x7f800000) ? low : bits_as<float>(0xff800000));
        const int32_t above = high == high ? ordered(high) : INT32_MAX;
        best[n][j] = named[i] && below > best[n][j] ? below : best[n][j];
        top = named[i] && above > top ? above : top;
      }
#pragma unroll
      for (int lanes = 4; lanes < kLanes; lanes *= 2) {
        const int32_t other = __shfl_xor_sync(kAllLanes, top, lanes);
        top = other > top ? other : top;
      }
      if (mine && lane < 4) {
        a.upper[state * a.groups + tile] = top;
      }
    }
  }
}

template <class Product, int kTiles>
__device__ void screen_by(const T1Launch& a, Staged& staged, Product product) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  int32_t best[kTiles][2];
#pragma unroll
  for (auto& pair : best) {
    pair[0] = pair[1] = kAbsent;
  }
  product.clear();
  stream(
      a.screen_rows, staged.of[warp], lane, static_cast<int64_t>(blockIdx.x) * kPrepWarps + warp,
      static_cast<int64_t>(gridDim.x) * kPrepWarps, a.groups, 0, 1,
      [&](const Stage& stage, int64_t chunk) { product.add(stage, chunk, a.states, lane); },
      [&](int64_t tile) {
        product.finish(lane);
        close_tile<Product, kTiles>(a, product, tile, lane, best);
        product.clear();
      });
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      int32_t top = best[n][j];
#pragma unroll
      for (int lanes = 4; lanes < kLanes; lanes *= 2) {
        const int32_t other = __shfl_xor_sync(kAllLanes, top, lanes);
        top = other > top ? other : top;
      }
      const int64_t state = n * kTileStates + lane % 4 * 2 + j;
      if (lane < 4 && state < a.batch && top != kAbsent) {
        atomicMax(a.best + state, top);
      }
    }
  }
}

template <int kTiles>
__device__ void screen(const T1Launch& a, Staged& staged) {
  switch (a.states.how) {
    case Multiply::digits:
      return screen_by<DigitProduct<kTiles>, kTiles>(a, staged, {});
    case Multiply::bf16:
      return screen_by<HalfProduct<Bf16Mma, kTiles>, kTiles>(a, staged, {});
    case Multiply::fp16:
      return screen_by<HalfProduct<Fp16Mma, kTiles>, kTiles>(a, staged, {});
    default:
      PlainProduct<kTiles> product;
      product.dtype = a.head.weight.dtype;
      screen_by<PlainProduct<kTiles>, kTiles>(a, staged, product);
  }
}

// Whether a group with this upper end may hold the best row; rounding is monotone, so ends are compared after it.
__device__ inline bool reaches(const T1Launch& a, int32_t upper, int32_t best) {
  const float limit = unordered(best > kOrderedLeast ? best : kOrderedLeast) - kUnderflow, high = unordered(upper);
  return upper != kAbsent && !(rounded(high, a.bf16_logits) < rounded(limit, a.bf16_logits));
}

__device__ inline void words_of(const uint4& four, uint32_t* words) {
  words[0] = four.x;
  words[1] = four.y;
  words[2] = four.z;
  words[3] = four.w;
}

__device__ inline float wide_of(float x, DType) {
  return x;
}
__device__ inline float wide_of(uint16_t half, DType dtype) {
  return dtype == DType::bf16 ? from_bf16(half) : from_fp16(half);
}

// Eight elements of a row from column `at` on, zeros behind its end.
template <class T>
__device__ void load_eight(const T* row, int64_t at, int64_t size, bool aligned, DType dtype, float (&to)[8]) {
  if (aligned && at + 8 <= size) {
    const auto* wide = reinterpret_cast<const uint4*>(row + at);
    uint32_t words[2 * sizeof(T)];
    words_of(wide[0], words);
    if constexpr (sizeof(T) == 4) {
      words_of(wide[1], words + 4);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (sizeof(T) == 4) {
        to[i] = bits_as<float>(words[i]);
      } else {
        to[i] = wide_of(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))), dtype);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to[i] = at + i < size ? wide_of(row[at + i], dtype) : 0.0f;
  }
}

constexpr int kRowsAtOnce = kTileRows / kPrepWarps;

// The best key of four rows of the head, by canonical dots: lane l of the warp has lanes 8 l .. 8 l + 7 of the 256.
template <class T>
__device__ long long best_of_rows(const T1Launch& a, int64_t b, int64_t first, int lane) {
  const Tensor& weight = a.head.weight;
  const int64_t size = weight.size[1];
  const bool aligned = reinterpret_cast<uintptr_t>(weight.data) % 16 == 0 && weight.stride[0] * sizeof(T) % 16 == 0;
  float total[kRowsAtOnce][8] = {};
#pragma unroll 1
  for (int64_t at = 8 * lane; at < size; at += 256) {
    float h[8];
    load_eight<float>(a.wide + b * a.wide_stride, at, a.wide_stride, true, DType::f32, h);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (first + r < a.head.num_valid) {
        float w[8];
        load_eight(row_of<const T>(weight, first + r), at, size, aligned, weight.dtype, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          total[r][i] = total[r][i] + h[i] * w[i];
        }
      }
    }
  }
  long long best = kNoKey;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const float (&t)[8] = total[r];
    float sum = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    }
    const long long key = encode(rounded(sum, a.bf16_logits), token_of(a.head, first + r));
    best = key > best ? key : best;
  }
  return best;
}

// A block takes 32 groups of a state, each of its warps four rows of those that may hold the best one.
__device__ inline void rescore(const T1Launch& a) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t shares = (a.groups + kLanes - 1) / kLanes;
  for (int64_t item = blockIdx.x; item < a.batch * shares; item += gridDim.x) {
    const int64_t b = item / shares, first = item % shares * kLanes, group = first + lane;
    const bool taken =
        group < a.groups && live(a, b) && (a.scan || reaches(a, a.upper[b * a.groups + group], a.best[b]));
    long long best = kNoKey;
    for (uint32_t left = __ballot_sync(kAllLanes, taken); left != 0; left &= left - 1) {
      const int64_t row = (first + __ffs(static_cast<int>(left)) - 1) * kTileRows + warp * kRowsAtOnce;
      const long long key = a.head.weight.dtype == DType::f32 ? best_of_rows<float>(a, b, row, lane)
                                                              : best_of_rows<uint16_t>(a, b, row, lane);
      best = key > best ? key : best;
    }
    if (lane == 0 && best != kNoKey) {
      atomicMax(a.key + b, best);
    }
  }
}

}  // namespace dmtp::cuda
