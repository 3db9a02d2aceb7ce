#pragma once

#include "cuda/commit_params.cuh"

// How one block moves rows: as they are, or computed on.
namespace dmtp::cuda {

// Rows that are copied as they are. A thread has the same bytes of every row, and reads them all before it writes.
template <class Unit, int kRows>
__device__ void copy_rows(const Kind& kind, int64_t b, int64_t first, int64_t group, const Writers& s,
                          Promotion promotion) {
  const int64_t head_bytes = kind.dim * size_of(kind.cache_type);
  const int64_t end = least((group + 1) * kBytes, kind.heads * head_bytes);
  for (int64_t at = group * kBytes + threadIdx.x * sizeof(Unit); at < end; at += blockDim.x * sizeof(Unit)) {
    const int64_t h = at / head_bytes, rest = at % head_bytes;
    const char* from = kind.rows + b * kind.rows_step[0] + first * kind.rows_step[1] + h * kind.rows_step[2] + rest;
    const int64_t in_cache = h * kind.cache_step[2] + rest;
    Unit old{}, row[kRows]{};
    if (promotion.target >= 0) {
      old = *reinterpret_cast<const Unit*>(address(kind, promotion.source) + in_cache);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (s.own[r] >= 0) {
        row[r] = *reinterpret_cast<const Unit*>(from + r * kind.rows_step[1]);
      }
    }
    if (promotion.target >= 0) {
      *reinterpret_cast<Unit*>(address(kind, promotion.target) + in_cache) = old;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (s.own[r] >= 0 && (s.lost >> r & 1) == 0) {
        *reinterpret_cast<Unit*>(address(kind, s.own[r]) + in_cache) = row[r];
      }
    }
  }
}

template <class Wide>
struct Room {
  Wide work[kCommitThreads / kLanes][kMostDim];
  uint4 staged[kStaged / 16];
  uint4 old[kMostDim * 8 / 16];
};

// One head of row first + r as it goes into the cache, by one warp.
template <class Wide>
__device__ void make_head(const Commit& c, const Kind& kind, int64_t b, int64_t j, int64_t h, const char* from,
                          Wide* work, char* to, int lane) {
  const int64_t dim = kind.dim;
  Wide squares = 0;
  for (int64_t d = lane; d < dim; d += kLanes) {
    work[d] = load_as<Wide>(kind.rows_type, from, d);
    squares += work[d] * work[d];
  }
  if (kind.norm != nullptr) {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      squares += __shfl_xor_sync(kAllLanes, squares, step);
    }
    const Wide factor = 1 / sqrt(squares / static_cast<Wide>(dim) + static_cast<Wide>(c.norm_eps));
    for (int64_t d = lane; d < dim; d += kLanes) {
      const Wide weight = static_cast<Wide>(c.norm_offset) + load_as<Wide>(kind.norm_type, kind.norm, d);
      work[d] = work[d] * factor * weight;
    }
  }
  if (kind.rotated) {
    const int64_t given_at = index_at(c.positions, b * c.positions.stride[0] + j);
    const int64_t position = within(given_at, 0, c.cos_sin.size[0] - 1), half = c.cos_sin.size[1] / 2;
    const int64_t row = position * c.cos_sin.stride[0];
    // pairs are of other lanes
    __syncwarp();
    for (int64_t i = lane; i < half; i += kLanes) {
      const Wide cos = load_as<Wide>(c.cos_sin.dtype, c.cos_sin.data, row + i);
      const Wide sin = load_as<Wide>(c.cos_sin.dtype, c.cos_sin.data, row + half + i);
      const Wide x = work[i], y = work[i + half];
      work[i] = x * cos - y * sin;
      work[i + half] = y * cos + x * sin;
    }
    __syncwarp();
  }
  const Wide scale = kind.scale == nullptr ? 1 : kind.scale[b * kind.scale_step[0] + h * kind.scale_step[1]];
  for (int64_t d = lane; d < dim; d += kLanes) {
    store_as<Wide>(kind.cache_type, to, d, kind.scale == nullptr ? work[d] : work[d] / scale);
  }
}

// Rows that are computed on: one head of a tile, staged so that all is read before any is written.
template <class Wide>
__device__ void make_rows(const Commit& c, const Kind& kind, int64_t b, int64_t first, int64_t h, const Writers& s,
                          Promotion promotion) {
  using WideRoom = Room<Wide>;
  DMTP_SHARED(WideRoom, room);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t head_bytes = kind.dim * size_of(kind.cache_type), in_cache = h * kind.cache_step[2];
  char* const staged = reinterpret_cast<char*>(room.staged);
  char* const old = reinterpret_cast<char*>(room.old);
  constexpr int kWarps = kCommitThreads / kLanes;
  for (int r = warp; r < kTile; r += kWarps) {
    if (s.own[r] < 0) {
      continue;
    }
    const char* from = kind.rows + b * kind.rows_step[0] + (first + r) * kind.rows_step[1] + h * kind.rows_step[2];
    char* const to = staged + r * head_bytes;
    if (kind.copied) {
      for (int64_t i = lane; i < head_bytes; i += kLanes) {
        to[i] = from[i];
      }
    } else {
      make_head<Wide>(c, kind, b, first + r, h, from, room.work[warp], to, lane);
    }
  }
  for (int64_t i = threadIdx.x; promotion.target >= 0 && i < head_bytes; i += blockDim.x) {
    old[i] = address(kind, promotion.source)[in_cache + i];
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; promotion.target >= 0 && i < head_bytes; i += blockDim.x) {
    address(kind, promotion.target)[in_cache + i] = old[i];
  }
  for (int r = warp; r < kTile; r += kWarps) {
    if (s.own[r] >= 0 && (s.lost >> r & 1) == 0) {
      for (int64_t i = lane; i < head_bytes; i += kLanes) {
        address(kind, s.own[r])[in_cache + i] = staged[r * head_bytes + i];
      }
    }
  }
}

}  // namespace dmtp::cuda
