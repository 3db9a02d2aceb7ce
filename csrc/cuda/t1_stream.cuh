#pragma once

#include "cuda/copy_async.cuh"
#include "cuda/mma.cuh"
#include "cuda/t1_params.cuh"

// The weight stream: a warp copies 16 rows x 128 bytes at a time to its own part of shared memory, three such ahead of
// the one that it multiplies with the states of all requests.
namespace dmtp::cuda {

constexpr int kStages = 4;
constexpr int kPieces = kChunk / 16;

struct Stage {
  uint4 of[kTileRows][kPieces];
};
struct Staged {
  Stage of[kPrepWarps][kStages];
};

// Piece c of row r lies at c ^ (r % 8): a column of pieces is in all banks.
__device__ inline int piece_at(int row, int piece) {
  return piece ^ (row & 7);
}

// 16 rows of a chunk, 16 bytes at a time, with zeros behind the rows and below them.
__device__ inline void copy_chunk(const Rows& rows, int64_t tile, int64_t chunk, Stage& to, int lane) {
  const int piece = lane % kPieces;
  const int64_t at = chunk * kChunk + piece * 16;
#pragma unroll
  for (int i = 0; i < kTileRows; i += kLanes / kPieces) {
    const int row = i + lane / kPieces;
    const int64_t number = tile * kTileRows + row;
    const int count = number < rows.count ? static_cast<int>(within(rows.bytes - at, 0, 16)) : 0;
    const char* from = count > 0 ? rows.first + number * rows.stride + at : rows.first;
    uint4* place = &to.of[row][piece_at(row, piece)];
    if (rows.aligned) {
      copy_async(place, from, count);
      continue;
    }
#pragma unroll 1
    for (int byte = 0; byte < 16; ++byte) {
      reinterpret_cast<char*>(place)[byte] = byte < count ? from[byte] : 0;
    }
  }
}

// Chunks `from`, from + skip, ... of tiles `first`, first + step, ... below `tiles`: each(stage, chunk) for every one
// of them, close(tile) after the last of a tile.
template <class Each, class Close>
__device__ void stream(const Rows& rows, Stage* own, int lane, int64_t first, int64_t step, int64_t tiles, int64_t from,
                       int64_t skip, Each each, Close close) {
  constexpr int kAhead = kStages - 1;
  const int64_t chunks = (rows.bytes + kChunk - 1) / kChunk;
  if (first >= tiles || from >= chunks) {
    return;
  }
  int64_t tile_ahead = first, chunk_ahead = from, tile = first, chunk = from;
#pragma unroll 1
  for (int64_t turn = 0; tile < tiles; ++turn) {
    if (turn >= kAhead) {
      DMTP_WAIT_COPIES(kAhead - 1);
      // all lanes' copies are there, and all have left the stage that is filled next
      __syncwarp();
    }
    if (tile_ahead < tiles) {
      copy_chunk(rows, tile_ahead, chunk_ahead, own[turn % kStages], lane);
      chunk_ahead += skip;
      if (chunk_ahead >= chunks) {
        chunk_ahead = from;
        tile_ahead += step;
      }
    }
    commit_copies();
    if (turn < kAhead) {
      continue;
    }
    each(own[(turn - kAhead) % kStages], chunk);
    chunk += skip;
    if (chunk >= chunks) {
      close(tile);
      chunk = from;
      tile += step;
    }
  }
}

__device__ inline FragmentA load_a(const Stage& stage, int k_step, int lane) {
  const int g = lane / 4, t = lane % 4;
  const auto word = [&](int row, int piece) {
    return reinterpret_cast<const uint32_t*>(&stage.of[row][piece_at(row, piece)])[t];
  };
  const int left = 2 * k_step;
  return {{word(g, left), word(g + 8, left), word(g, left + 1), word(g + 8, left + 1)}};
}

// Sums by matrix instructions: of each plane of the states, or of all planes together.
template <class Mma, int kPlanes, int kSums, int kTiles>
struct TensorProduct {
  typename Mma::Sum sums[kSums][kTiles][4];

  __device__ void clear() {
#pragma unroll
    for (auto& plane : sums) {
      for (auto& tile : plane) {
        for (auto& sum : tile) {
          sum = 0;
        }
      }
    }
  }

  __device__ void add(const Stage& stage, int64_t chunk, const Operand& states, int lane) {
    const int64_t steps = states.padded * states.item / 32;
#pragma unroll
    for (int k = 0; k < kChunk / 32; ++k) {
      const FragmentA a = load_a(stage, k, lane);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int64_t block = (n * steps + chunk * (kChunk / 32) + k) * kPlanes;
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
          const uint2 b = reinterpret_cast<const uint2*>(states.data)[(block + plane) * kLanes + lane];
          mma(Mma{}, sums[plane % kSums][n], a, FragmentB{{b.x, b.y}});
        }
      }
    }
  }

  // Entry j of the fragment c of a tile of states.
  __device__ float value(int n, int j) const { return sums[0][n][j]; }
  __device__ void finish(int) {}
};

// Sums by FMAs. A lane adds its own columns of rows g and g + 8 for all states.
template <int kTiles>
struct PlainProduct {
  float sums[kTiles][2][kTileStates];
  float ends[kTiles][4];
  DType dtype;

  __device__ void clear() {
#pragma unroll
    for (auto& tile : sums) {
      for (auto& row : tile) {
        for (auto& sum : row) {
          sum = 0;
        }
      }
    }
  }

  // Element i of a word.
  __device__ float element(uint32_t word, int i) const {
    if (dtype == DType::f32) {
      return bits_as<float>(word);
    }
    const auto half = static_cast<uint16_t>(word >> (16 * i));
    return dtype == DType::bf16 ? from_bf16(half) : from_fp16(half);
  }

  __device__ void add(const Stage& stage, int64_t chunk, const Operand& states, int lane) {
    const int item = states.item, each = 4 / item;
    const auto* all = reinterpret_cast<const uint4*>(states.data);
#pragma unroll 1
    for (int k = 0; k < kChunk / 32; ++k) {
      const FragmentA a = load_a(stage, k, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t column = (chunk * kChunk + k * 32 + half * 16) / item + lane % 4 * each;
#pragma unroll 1
        for (int i = 0; i < each; ++i) {
          const float low = element(a.of[2 * half], i), high = element(a.of[2 * half + 1], i);
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const uint4* x = all + (n * states.padded + column + i) * 2;
            const uint4 pair[2] = {x[0], x[1]};
#pragma unroll
            for (int s = 0; s < kTileStates; ++s) {
              const uint4& four = pair[s / 4];
              const uint32_t bits = s % 4 == 0 ? four.x : s % 4 == 1 ? four.y : s % 4 == 2 ? four.z : four.w;
              sums[n][0][s] = __fmaf_rn(low, bits_as<float>(bits), sums[n][0][s]);
              sums[n][1][s] = __fmaf_rn(high, bits_as<float>(bits), sums[n][1][s]);
            }
          }
        }
      }
    }
  }

  // The four lanes of a row add up; each keeps the entries that it would have of a fragment.
  __device__ void finish(int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int s = 0; s < kTileStates; ++s) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float sum = sums[n][row][s];
          sum += __shfl_xor_sync(kAllLanes, sum, 1);
          sum += __shfl_xor_sync(kAllLanes, sum, 2);
          if (lane % 4 == s / 2) {
            ends[n][2 * row + s % 2] = sum;
          }
        }
      }
    }
  }
  __device__ float value(int n, int j) const { return ends[n][j]; }
};

template <int kTiles>
using DigitProduct = TensorProduct<Int8Mma, 3, 3, kTiles>;
template <int kTiles>
using PartProduct = TensorProduct<Bf16Mma, 3, 1, kTiles>;
template <class Mma, int kTiles>
using HalfProduct = TensorProduct<Mma, 1, 1, kTiles>;

}  // namespace dmtp::cuda
