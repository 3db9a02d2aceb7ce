#pragma once

#include <type_traits>

#include "cuda/attention_params.cuh"

// Products of 16 query rows with 16 keys and their values, by one warp. Of a sum [16 x 8], lane 4 g + t has columns 2 t
// and 2 t + 1 of rows g and g + 8, in this order (cuda/mma.cuh).
namespace dmtp::cuda {

// Piece c of row r lies at c ^ (r % 8): a column of pieces is in all banks.
template <class S>
__device__ inline char* piece_of(char* tile, int row, int piece) {
  return tile + row * (S::kPieces * 16) + (piece & ~7) * 16 + ((piece & 7) ^ (row & 7)) * 16;
}

// From here on the compiler knows nothing of a value: what is computed from it does not stay in registers from tile to
// tile (180 bytes spilled at D = 256).
__device__ inline int forgotten(int x) {
#ifndef DMTP_CUDA_HOST
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Two floats of a row of sums, of which eight rows of a warp read at once.
template <class S>
__device__ inline float2* sum_at(float* sums, int row, int column) {
  const int piece = column / 4 & 15, rest = column & ~63;
  return reinterpret_cast<float2*>(sums + row * S::kDim + rest + (piece ^ (row & 7) << 1) * 4 + column % 4);
}

#ifdef DMTP_CUDA_HOST
inline uint32_t packed(Bf16Mma, float low, float high) {
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}
inline uint32_t packed(Fp16Mma, float low, float high) {
  return to_fp16(low) | static_cast<uint32_t>(to_fp16(high)) << 16;
}
#else
__device__ inline uint32_t packed(Bf16Mma, float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline uint32_t packed(Fp16Mma, float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#endif

// Of two 16-bit elements: 1.0 where one is not finite, and the others.
struct Parted {
  uint32_t bad, good;
};

__device__ inline Parted part(Bf16Mma, uint32_t both) {
  uint32_t bad = 0;
  bad |= (both & 0x7f80u) == 0x7f80u ? 0x3f80u : 0;
  bad |= (both & 0x7f800000u) == 0x7f800000u ? 0x3f800000u : 0;
  return {bad, both & ~((bad & 0xffffu ? 0xffffu : 0) | (bad >> 16 ? 0xffff0000u : 0))};
}

__device__ inline Parted part(Fp16Mma, uint32_t both) {
  uint32_t bad = 0;
  bad |= (both & 0x7c00u) == 0x7c00u ? 0x3c00u : 0;
  bad |= (both & 0x7c000000u) == 0x7c000000u ? 0x3c000000u : 0;
  return {bad, both & ~((bad & 0xffffu ? 0xffffu : 0) | (bad >> 16 ? 0xffff0000u : 0))};
}

// Scores of a warp's keys, later their weights. Columns of two groups of eight keys each.
struct Scores {
  float of[2][4];
};

// A lane's keys among the 16 of its warp.
__device__ inline int key_of(int n, int j, int lane) {
  return 8 * n + 2 * (lane % 4) + j % 2;
}

__device__ inline void taint(float& sum, float count) {
  sum = count > 0 ? NAN : sum;
}

// On tensor cores: products of 16-bit elements, fp32 sums.
template <class S>
struct Tile16 {
  using Kind = typename S::Kind;

  __device__ static Scores scores(char* q, char* keys, int row, int key, int lane, int dim) {
    Scores s{};
#pragma unroll 4
    for (int k = 0; k < S::kDim / 16; ++k) {
      if (16 * k < dim) {
        FragmentA a;
        uint32_t b[4];
        load_matrices(a.of, piece_of<S>(q, row + lane % 16, 2 * k | lane / 16));
        load_matrices(b, piece_of<S>(keys, key + lane % 8 + lane / 16 * 8, 2 * k | lane / 8 % 2));
        mma(Kind{}, s.of[0], a, FragmentB{{b[0], b[1]}});
        mma(Kind{}, s.of[1], a, FragmentB{{b[2], b[3]}});
      }
    }
    return s;
  }

  __device__ static FragmentA fragment(const Scores& w) {
    return {{packed(Kind{}, w.of[0][0], w.of[0][1]), packed(Kind{}, w.of[0][2], w.of[0][3]),
             packed(Kind{}, w.of[1][0], w.of[1][1]), packed(Kind{}, w.of[1][2], w.of[1][3])}};
  }

  // Adds values times weights. `seen`, where the rows see different keys: 1 where a row sees a key, else 0; a value
  // that is not finite then reaches the rows that see it, as NaN, and no others.
  template <bool kRagged>
  __device__ static void add(float (&acc)[S::kColumns][4], const Scores& weights, const Scores& seen, char* values,
                             int key, int lane, int dim) {
    const FragmentA w = fragment(weights), sees = kRagged ? fragment(seen) : FragmentA{};
#pragma unroll
    for (int n = 0; n < S::kColumns; n += 2) {
      if (8 * n < dim) {
        uint32_t v[4];
        load_transposed(v, piece_of<S>(values, key + lane % 16, n | lane / 16));
        if (kRagged) {
          float counts[2][4] = {};
          uint32_t bad[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Parted parted = part(Kind{}, v[i]);
            bad[i] = parted.bad;
            v[i] = parted.good;
          }
          mma(Kind{}, counts[0], sees, FragmentB{{bad[0], bad[1]}});
          mma(Kind{}, counts[1], sees, FragmentB{{bad[2], bad[3]}});
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            taint(acc[n][j], counts[0][j]);
            taint(acc[n + 1][j], counts[1][j]);
          }
        }
        mma(Kind{}, acc[n], w, FragmentB{{v[0], v[1]}});
        mma(Kind{}, acc[n + 1], w, FragmentB{{v[2], v[3]}});
      }
    }
  }
};

// By FMAs.
template <class S>
struct Tile32 {
  __device__ static Scores scores(char* q, char* keys, int row, int key, int lane, int dim) {
    // four chains a dot, of every fourth column: half the error of one
    float sums[8][4] = {};
    const int g = lane / 4;
#pragma unroll 1
    for (int piece = 0; 4 * piece < dim; ++piece) {
      const auto four = [&](char* tile, int r) {
        return *reinterpret_cast<const float4*>(piece_of<S>(tile, r, piece));
      };
      const float4 q0 = four(q, row + g), q1 = four(q, row + g + 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = i % 4 < 2 ? q0 : q1, y = four(keys, key + key_of(i / 4, i % 4, lane));
        sums[i][0] = __fmaf_rn(x.x, y.x, sums[i][0]);
        sums[i][1] = __fmaf_rn(x.y, y.y, sums[i][1]);
        sums[i][2] = __fmaf_rn(x.z, y.z, sums[i][2]);
        sums[i][3] = __fmaf_rn(x.w, y.w, sums[i][3]);
      }
    }
    Scores s;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s.of[i / 4][i % 4] = (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
    }
    return s;
  }

  template <bool kRagged>
  __device__ static void add(float (&acc)[S::kColumns][4], const Scores& weights, const Scores& seen, char* values,
                             int key, int lane, int dim) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll 1
      for (int pair = 0; pair < 4; ++pair) {
        add_key<kRagged>(acc, weights, seen, values, key, i / 2, i % 2, pair, lane, dim);
      }
    }
  }

 private:
  // Key 8 * n + 2 * pair + odd, whose weights lane `pair` of a row's four has.
  template <bool kRagged>
  __device__ static void add_key(float (&acc)[S::kColumns][4], const Scores& weights, const Scores& seen, char* values,
                                 int key, int n, int odd, int pair, int known_lane, int dim) {
    const int lane = forgotten(known_lane);
    float w[2], sees[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      w[r] = __shfl_sync(kAllLanes, weights.of[n][2 * r + odd], lane / 4 * 4 + pair);
      sees[r] = kRagged ? __shfl_sync(kAllLanes, seen.of[n][2 * r + odd], lane / 4 * 4 + pair) : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < S::kColumns; ++m) {
      if (8 * m < dim) {
        const int column = 8 * m + 2 * (lane % 4);
        const char* at = piece_of<S>(values, key + 8 * n + 2 * pair + odd, column / 4) + column % 4 * 4;
        const float2 v = *reinterpret_cast<const float2*>(at);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float x = j % 2 == 0 ? v.x : v.y;
          if (kRagged && !(fabsf(x) < INFINITY)) {
            taint(acc[m][j], sees[j / 2]);
            x = 0;
          }
          acc[m][j] = __fmaf_rn(w[j / 2], x, acc[m][j]);
        }
      }
    }
  }
};

template <class S>
using TileOf = std::conditional_t<kIsFp32<typename S::Kind>, Tile32<S>, Tile16<S>>;

}  // namespace dmtp::cuda
