#pragma once

#include "cuda/attention_finish.cuh"
#include "cuda/attention_rows.cuh"

// A block of threads sums 16 to 64 query rows over a chunk of a request's context, or one part of it.
namespace dmtp::cuda {

template <class S>
struct AttentionMemory {
  char* q;
  float* sum;           // of the parts so far, and where a warp of keys leaves what is merged by the cluster
  float* tops;          // [key warps, rows]
  float* totals;        // [key warps, rows]
  Place* places;        // [stages + 1, keys]
  RowsOfKeys* sources;  // keys and values of the cache, and of the block
  char* tile;           // keys and values that were fp8
  char* stages;

  __device__ explicit AttentionMemory(char* first) {
    q = first;
    sum = reinterpret_cast<float*>(q + S::kQueryBytes);
    tops = sum + S::kRows * S::kDim;
    totals = tops + S::kKeyWarps * S::kRows;
    places = reinterpret_cast<Place*>(totals + S::kKeyWarps * S::kRows);
    sources = reinterpret_cast<RowsOfKeys*>(reinterpret_cast<char*>(places) + S::kPlaceBytes);
    tile = reinterpret_cast<char*>(sources) + S::kSourceBytes;
    stages = tile + (S::kFp8 ? 2 * S::kTileBytes : 0);
  }

  // The sum of key warp g: those after the first lie where tiles were.
  __device__ float* sum_of(int g) const {
    return g == 0 ? sum : reinterpret_cast<float*>(tile) + (g - 1) * S::kRows * S::kDim;
  }
};

// A lane's state of its two query rows; `total` is of its own columns until `close`.
template <class S>
struct WarpState {
  float top[2], total[2];
  float acc[S::kColumns][4];

  __device__ void clear() {
    top[0] = top[1] = kNone;
    total[0] = total[1] = 0;
#pragma unroll
    for (auto& group : acc) {
#pragma unroll
      for (float& x : group) {
        x = 0;
      }
    }
  }

  __device__ void scale(const float (&by)[2]) {
#pragma unroll
    for (auto& group : acc) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        group[j] *= by[j / 2];
      }
    }
  }

  // From scores to weights.
  __device__ void weigh(Scores& s, const Scores& seen) {
    float decay[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float peak = kNone;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s.of[i / 2][2 * r + i % 2];
        const bool sees = seen.of[i / 2][2 * r + i % 2] != 0;
        score = sees ? score : kNone;
        peak = fmaxf(peak, sees ? fmaxf(score, kLeast) : kNone);
      }
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 2));
      const float joint = fmaxf(top[r], peak);
      shift[r] = joint == kNone ? 0.0f : joint;
      decay[r] = exp2f(top[r] - shift[r]);
      top[r] = joint;
      total[r] *= decay[r];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s.of[n][j] = exp2f(s.of[n][j] - shift[j / 2]);
        total[j / 2] += s.of[n][j];
      }
    }
    // tops seldom change after the first tiles
    if (__any_sync(kAllLanes, decay[0] != 1.0f || decay[1] != 1.0f)) {
      scale(decay);
    }
  }

  // `factor` brings cache values to their scale; where no key was seen one that is not finite changes nothing.
  __device__ void close(float factor) {
#pragma unroll
    for (float& t : total) {
      t += __shfl_xor_sync(kAllLanes, t, 1);
      t += __shfl_xor_sync(kAllLanes, t, 2);
    }
    if (factor != 1.0f) {
      scale({top[0] == kNone ? 1.0f : factor, top[1] == kNone ? 1.0f : factor});
    }
  }

  // Merges it into a sum in shared memory, whose first writer finds a top of kNone and garbage.
  __device__ void merge_into(float* sums, float* tops, float* totals, int first_row, int known_lane) const {
    const int lane = forgotten(known_lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      float joint = tops[row];
      const bool fresh = joint == kNone;
      const Merge by = merge(joint, top[r]);
      const float before = totals[row];
      // all four lanes of a row have read
      __syncwarp();
      if (lane % 4 == 0) {
        tops[row] = joint;
        totals[row] = before * by.first + total[r] * by.second;
      }
#pragma unroll
      for (int n = 0; n < S::kColumns; ++n) {
        float2* at = sum_at<S>(sums, row, 8 * n | 2 * (lane % 4));
        const float2 x = fresh ? float2{0, 0} : *at;
        *at = {x.x * by.first + acc[n][2 * r] * by.second, x.y * by.first + acc[n][2 * r + 1] * by.second};
      }
    }
  }
};

__device__ inline float soft_capped(float score, float cap) {
  return cap == 0 ? score : tanhf(score) * cap;
}

}  // namespace dmtp::cuda
