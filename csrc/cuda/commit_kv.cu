#include <algorithm>

#include "cuda/commit_rows.cuh"
#include "cuda/launchers.h"

namespace dmtp::cuda {
namespace {

// Hidden, length and error bits of request b.
__device__ void finish_request(const Commit& c, int64_t b, int64_t count, Writers& s) {
  DMTP_SHARED(unsigned, flags);
  if (threadIdx.x == 0) {
    flags = 0;
  }
  for (int i = 0; i < c.cache_count; ++i) {
    const CommitCache& cache = c.caches[i];
    const Promotion promotion = promotion_of(cache, b, count);
    __syncthreads();
    for (int64_t j = threadIdx.x; j < c.counts.rows; j += blockDim.x) {
      const int64_t slot = slot_of(cache, b, j, count);
      unsigned found = slot >= cache.num_slots ? kBadSlot : 0;
      if (given(c.positions) && inside(cache, slot)) {
        const int64_t position = index_at(c.positions, b * c.positions.stride[0] + j);
        found |= position < 0 || position >= c.cos_sin.size[0] ? kBadPosition : 0;
      }
      if (found != 0) {
        atomicOr(&flags, found);
      }
    }
    if (promotion.target >= 0 && promotion.target != promotion.source) {
      look(c.counts, cache, b, c.counts.rows, count, promotion, s);
      if (threadIdx.x == 0 && s.taken != 0) {
        atomicOr(&flags, static_cast<unsigned>(kBadOwner));
      }
    } else if (threadIdx.x == 0 && count > 0 && given(cache.pending_slot) &&
               inside(cache, index_of(cache.pending_slot, b)) && index_of(cache.promote_dst, b) >= cache.num_slots) {
      atomicOr(&flags, static_cast<unsigned>(kBadSlot));
    }
  }
  if (count > 0 && given(c.hidden)) {
    const int64_t size = size_of(c.hidden.dtype), bytes = c.hidden.size[2] * size;
    const char* from =
        static_cast<const char*>(c.hidden.data) + (b * c.hidden.stride[0] + (count - 1) * c.hidden.stride[1]) * size;
    char* to = static_cast<char*>(c.next_hidden.data) + b * c.next_hidden.stride[0] * size;
    const bool wide = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | bytes) % 16 == 0;
    for (int64_t i = threadIdx.x; wide && i < bytes / 16; i += blockDim.x) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    for (int64_t i = threadIdx.x; !wide && i < bytes; i += blockDim.x) {
      to[i] = from[i];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (count > 0 && given(c.lengths)) {
      const int64_t at = b * c.lengths.stride[0];
      set_index(c.lengths, at, index_at(c.lengths, at) + count);
    }
    const int64_t valid = index_of(c.counts.valid, b);
    const bool miscounted = is_live(c.counts, b) && (valid < 0 || valid > c.counts.rows);
    *row_of<int32_t>(c.error, b) = static_cast<int32_t>(flags) | (miscounted ? kBadCount : 0);
  }
}

// One block: a tile of one request's rows in one layer's K or V, or what a request has once.
template <class Move>
__device__ void commit_block(const Commit& c, Move move) {
  DMTP_SHARED(Writers, s);
  const int64_t b = blockIdx.x / c.units, unit = blockIdx.x % c.units, count = count_of(c.counts, b);
  if (unit == c.units - 1) {
    if (c.last) {
      finish_request(c, b, count, s);
    }
    return;
  }
  if (count == 0) {
    return;
  }
  const Kind& kind = kind_of(c, unit);
  const CommitCache& cache = c.caches[kind.owner];
  const int64_t tile = (unit - kind.first_unit) / kind.groups, group = (unit - kind.first_unit) % kind.groups;
  Promotion promotion = promotion_of(cache, b, count);
  look(c.counts, cache, b, tile * kTile, count, promotion, s);
  // by the block that overwrites the slot it is read from
  if (s.overruled != 0 || s.taken != 0 || s.winner / kTile != tile) {
    promotion = {};
  }
  move(kind, b, tile * kTile, group, s, promotion);
}

template <class Unit, int kRows>
__global__ void __launch_bounds__(kCommitThreads) commit_copy_kernel(const __grid_constant__ Commit c) {
  commit_block(c, [&](const Kind& kind, int64_t b, int64_t first, int64_t group, const Writers& s, Promotion p) {
    copy_rows<Unit, kRows>(kind, b, first, group, s, p);
  });
}

template <class Wide>
__global__ void __launch_bounds__(kCommitThreads) commit_made_kernel(const __grid_constant__ Commit c) {
  commit_block(c, [&](const Kind& kind, int64_t b, int64_t first, int64_t group, const Writers& s, Promotion p) {
    make_rows<Wide>(c, kind, b, first, group, s, p);
  });
}

Kind kind_from(const CommitKV& args, const CommitLayer& layer) {
  Kind kind{};
  const int64_t from = size_of(layer.rows.dtype), to = size_of(layer.cache.dtype);
  const bool paged = args.caches[layer.owner].page_size > 0;
  kind.rows = static_cast<const char*>(layer.rows.data);
  kind.cache = static_cast<char*>(layer.cache.data);
  kind.scale = static_cast<const float*>(layer.scale.data);
  kind.norm = static_cast<const char*>(layer.norm.data);
  for (int i = 0; i < 3; ++i) {
    kind.rows_step[i] = layer.rows.stride[i] * from;
  }
  kind.cache_step[0] = layer.cache.stride[0] * to;
  kind.cache_step[1] = paged ? layer.cache.stride[1] * to : 0;
  kind.cache_step[2] = layer.cache.stride[paged ? 2 : 1] * to;
  kind.scale_step[0] = layer.scale.stride[0];
  kind.scale_step[1] = layer.scale.stride[1];
  kind.heads = layer.rows.size[2];
  kind.dim = layer.rows.size[3];
  kind.page_size = paged ? args.caches[layer.owner].page_size : 1;
  kind.rows_type = layer.rows.dtype;
  kind.cache_type = layer.cache.dtype;
  kind.norm_type = layer.norm.dtype;
  kind.rotated = layer.rotated;
  kind.copied = layer.rows.dtype == layer.cache.dtype && !layer.norm && !layer.rotated && !layer.scale;
  kind.owner = static_cast<int>(layer.owner);
  return kind;
}

// The widest of 16, 2 and 1 bytes that all addresses of a kind are multiples of.
int width_of(const Kind& kind) {
  auto all = reinterpret_cast<uintptr_t>(kind.rows) | reinterpret_cast<uintptr_t>(kind.cache);
  all |= static_cast<uintptr_t>(kind.dim * size_of(kind.cache_type));
  for (int i = 0; i < 3; ++i) {
    all |= static_cast<uintptr_t>(kind.rows_step[i]) | static_cast<uintptr_t>(kind.cache_step[i]);
  }
  return all % 16 == 0 ? 16 : all % 2 == 0 ? 2 : 1;
}

template <class Unit>
const char* launch_copy(const Commit& c, int64_t blocks, void* stream) {
  return c.counts.rows <= 8 ? launch(commit_copy_kernel<Unit, 8>, blocks, kCommitThreads, stream, c)
                            : launch(commit_copy_kernel<Unit, kTile>, blocks, kCommitThreads, stream, c);
}

const char* launch_kinds(Commit& c, void* stream) {
  bool copied = true, wide = false;
  int width = 16;
  for (int i = 0; i < c.count; ++i) {
    const Kind& kind = c.kinds[i];
    copied = copied && kind.copied;
    wide = wide || kind.rows_type == DType::f64 || kind.cache_type == DType::f64;
    width = std::min(width, width_of(kind));
  }
  c.units = 0;
  for (int i = 0; i < c.count; ++i) {
    Kind& kind = c.kinds[i];
    const int64_t bytes = kind.heads * kind.dim * size_of(kind.cache_type);
    kind.groups = copied ? (bytes + kBytes - 1) / kBytes : kind.heads;
    kind.first_unit = c.units;
    c.units += kind.groups * c.tiles;
  }
  ++c.units;
  const int64_t blocks = c.counts.batch * c.units;
  if (!copied) {
    return wide ? launch(commit_made_kernel<double>, blocks, kCommitThreads, stream, c)
                : launch(commit_made_kernel<float>, blocks, kCommitThreads, stream, c);
  }
  return width == 16  ? launch_copy<uint4>(c, blocks, stream)
         : width == 2 ? launch_copy<uint16_t>(c, blocks, stream)
                      : launch_copy<uint8_t>(c, blocks, stream);
}

}  // namespace

bool commit_takes(const CommitKV& args) {
  bool copied = true, fits = true;
  for (int64_t i = 0; i < args.count; ++i) {
    const Kind kind = kind_from(args, args.layers[i]);
    const int64_t rows = std::min<int64_t>(args.layers[i].rows.size[1], kTile);
    copied = copied && kind.copied;
    fits = fits && kind.dim <= kMostDim && rows * kind.dim * size_of(kind.cache_type) <= kStaged;
  }
  return args.cache_count <= kMostCaches && (copied || fits);
}

const char* commit_kv(const CommitKV& args, void* stream) {
  Commit c{};
  c.counts = {args.valid, args.live, args.error.size[0], args.caches[0].dst.size[1]};
  if (c.counts.batch == 0) {
    return nullptr;
  }
  std::copy(args.caches, args.caches + args.cache_count, c.caches);
  c.cache_count = static_cast<int>(args.cache_count);
  c.hidden = args.hidden;
  c.next_hidden = args.next_hidden;
  c.lengths = args.lengths;
  c.cos_sin = args.cos_sin;
  c.positions = args.positions;
  c.error = args.error;
  c.norm_eps = args.norm_eps;
  c.norm_offset = args.norm_offset;
  c.tiles = (c.counts.rows + kTile - 1) / kTile;
  const char* error = nullptr;
  for (int64_t i = 0; error == nullptr && !c.last;) {
    for (c.count = 0; i < args.count && c.count < kMostKinds; ++i) {
      const CommitLayer& layer = args.layers[i];
      if (layer.rows.size[2] > 0 && layer.rows.size[3] > 0 && args.caches[layer.owner].num_slots > 0) {
        c.kinds[c.count++] = kind_from(args, layer);
      }
    }
    c.last = i == args.count;
    error = launch_kinds(c, stream);
  }
  return error;
}

}  // namespace dmtp::cuda
