#pragma once

#include "cuda/attention_block.cuh"

// The loop over tiles of keys: tiles on their way, the one that is summed, and parts that end.
namespace dmtp::cuda {

// The block that a thread belongs to, and what it sums.
template <class S>
struct Summing {
  const AttentionLaunch& a;
  AttentionMemory<S> memory;
  int64_t b;
  int head, first_row;  // of the query rows
  Request request;
  Span span;
  int block_tiles, tiles;  // those of the block's rows come first
  int cluster;             // blocks that share the chunk
  int warp_row, warp_key, lane;

  __device__ Keys keys_of(int tile) const {
    return tile < block_tiles ? Keys{true, tile * S::kKeys} : Keys{false, span.begin + (tile - block_tiles) * S::kKeys};
  }
  __device__ bool dense(const Keys& keys) const { return keys.block && given(a.call.block_k); }
  // Dense rows have no place among bytes on their way.
  __device__ bool late(const Keys& keys) const { return S::kFp8 && dense(keys); }
  __device__ Place* places_of(int tile) const { return memory.places + tile % (a.stages + 1) * S::kKeys; }
  __device__ char* stage_of(int tile) const { return memory.stages + tile % a.stages * S::kStageBytes; }
  __device__ Place find(int tile) const {
    return place_of(a, request, span, b, keys_of(tile), static_cast<int>(threadIdx.x));
  }

  // Keys and values of a tile, one after the other.
  template <bool kRaw>
  __device__ void copy(char* to, int tile) const {
    const bool own = dense(keys_of(tile));
    const RowsOfKeys* from = memory.sources + (own ? 2 : 0);
    const int bytes = a.dim * (kRaw ? 1 : S::kItem);
    const bool aligned = own ? a.block_aligned : a.cache_aligned;
    copy_tile<S, kRaw>(to, from[0], places_of(tile), bytes, aligned);
    copy_tile<S, kRaw>(to + (kRaw ? S::kStageBytes / 2 : S::kTileBytes), from[1], places_of(tile), bytes, aligned);
  }

  __device__ void send(int tile) const {
    if (tile < tiles && !late(keys_of(tile))) {
      copy<S::kFp8>(stage_of(tile), tile);
    }
    commit_copies();
  }

  // Keys and values of a tile that has come, as products read them.
  __device__ char* ready(int tile) const {
    if constexpr (S::kFp8) {
      if (late(keys_of(tile))) {
        copy<false>(memory.tile, tile);
        commit_copies();
        DMTP_WAIT_COPIES(0);
      } else {
        widen_tile<S>(memory.tile, stage_of(tile), a.call.k_cache.dtype);
        widen_tile<S>(memory.tile + S::kTileBytes, stage_of(tile) + S::kStageBytes / 2, a.call.v_cache.dtype);
      }
      // the tile is whole
      __syncthreads();
      return memory.tile;
    }
    return stage_of(tile);
  }

  // Whether masks differ by query among rows that are there.
  __device__ bool ragged(const Keys& keys) const {
    const BlockAttention& c = a.call;
    const bool by_query = c.by_query && a.window >= 0;
    return keys.block ? c.block_causal || by_query : by_query && keys.first < request.ctx + a.block_rows - a.window;
  }

  // Whether the query whose block row is `own` sees row i of the tile, were it there.
  __device__ bool sees(const Keys& keys, int i, int own) const {
    const BlockAttention& c = a.call;
    const int row = keys.first + i;
    if (!keys.block) {
      return row >= request.ctx + own - a.window + 1;
    }
    const int apart = row < own ? own - row : row - own;
    return (!c.block_causal || row <= own) && (!c.by_query || a.window < 0 || apart < a.window);
  }

  __device__ void add(WarpState<S>& state, int tile, char* keys_and_values, float k_factor) const {
    const Keys keys = keys_of(tile);
    const Place* places = places_of(tile);
    const bool differs = ragged(keys);
    const float factor = dense(keys) ? 1.0f : k_factor;
    Scores s = TileOf<S>::scores(memory.q, keys_and_values, warp_row, warp_key, lane, a.dim), seen;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = warp_key + key_of(n, j, lane), row = first_row + warp_row + lane / 4 + j / 2 * 8;
        const bool visible =
            places[key].page >= 0 && (!differs || sees(keys, key, row / a.group + a.block_rows - a.slots));
        seen.of[n][j] = visible ? 1.0f : 0.0f;
        s.of[n][j] = soft_capped(s.of[n][j] * factor * a.factor, a.cap);
      }
    }
    state.weigh(s, seen);
    char* values = keys_and_values + S::kTileBytes;
    if (differs) {
      TileOf<S>::template add<true>(state.acc, s, seen, values, warp_key, lane, a.dim);
    } else {
      TileOf<S>::template add<false>(state.acc, s, seen, values, warp_key, lane, a.dim);
    }
  }

  // Ends a part, or the block: warps of keys one after another, in their order.
  __device__ void close(WarpState<S>& state, bool block, bool last, float v_factor) const {
    state.close(block && given(a.call.block_k) ? 1.0f : v_factor);
    const int own = warp_key / 16;
    const bool apart = last && !block && cluster > 1;
    if (apart) {
      // sums lie where others read tiles
      __syncthreads();
    }
    for (int turn = 0; turn < (apart ? 1 : S::kKeyWarps); ++turn) {
      if (own == turn || apart) {
        const int g = apart ? own : 0;
        state.merge_into(memory.sum_of(g), memory.tops + g * S::kRows, memory.totals + g * S::kRows, warp_row, lane);
      }
      // the next one adds to it
      __syncthreads();
    }
    state.clear();
  }

  __device__ void run(WarpState<S>& state) const {
    const BlockAttention& c = a.call;
    const auto scale = [&](const Tensor& t) {
      return given(t) ? load_as<float>(t.dtype, t.data, b * t.stride[0] + head * t.stride[1]) : 1.0f;
    };
    const float k_factor = scale(c.k_scale), v_factor = scale(c.v_scale);
    const bool finds = threadIdx.x < S::kKeys;
    for (int tile = 0; finds && tile < a.stages && tile < tiles; ++tile) {
      places_of(tile)[threadIdx.x] = find(tile);
    }
    // places are there, and sums of nothing
    __syncthreads();
    if (tiles == 0) {
      return;
    }
    copy_queries<S>(a, memory.q, b, head, first_row);
    for (int tile = 0; tile < a.stages - 1; ++tile) {
      send(tile);
    }
    state.clear();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      DMTP_WAIT_COPIES_BUT(a.stages - 2);
      // the tile has come whole, and all have left the one before
      __syncthreads();
      send(tile + a.stages - 1);
      const bool more = finds && tile + a.stages < tiles;
      const Place next = more ? find(tile + a.stages) : Place{};
      add(state, tile, ready(tile), k_factor);
      if (more) {
        places_of(tile + a.stages)[threadIdx.x] = next;
      }
      const bool block = tile < block_tiles, last = tile == tiles - 1;
      const int end = keys_of(tile).first + S::kKeys - request.base;
      if (last || (block ? tile == block_tiles - 1 : end % a.part == 0)) {
        close(state, block, last, v_factor);
      }
    }
  }
};

}  // namespace dmtp::cuda
