#pragma once

#include "cuda/t1_norms.cuh"
#include "cuda/t1_stream.cuh"

// From T1 to the drafter's block: ids, plain embeddings, streams, projections and what they change
// (dmtp_kernels/ops/t1_prep/README.md).
namespace dmtp::cuda {

constexpr int32_t kUncertified = 2;

struct Tokens {
  int64_t anchor, t1;  // -1 where missing or outside the table
  bool live, proved;
};

__device__ inline Tokens tokens_of(const T1Launch& a, int64_t b) {
  const T1Prep& p = a.prep;
  int64_t anchor = index_of(p.anchor_ids, b), token = index_of(p.token, b);
  bool proved = true;
  if (a.keys) {
    token = static_cast<int32_t>(~static_cast<uint32_t>(token));  // a key carries ~id below its logit
    proved = !given(p.status) || (*row_of<int32_t>(p.status, b) & kUncertified) == 0;
  }
  const bool live = anchor >= 0;
  token = live && token >= 0 && token < p.num_embeddings ? token : -1;
  return {anchor < p.num_embeddings ? most(anchor, -1) : -1, token, live, proved};
}

__device__ inline int64_t id_of(const T1Launch& a, const Tokens& tokens, int64_t slot) {
  const int64_t at = a.prep.anchors - 1;
  return slot > at ? (tokens.live ? a.prep.mask_id : -1) : slot == at ? tokens.t1 : tokens.anchor;
}

__device__ inline bool is_fused(const T1Launch& a, int64_t slot) {
  const int64_t at = a.prep.anchors - 1;
  return a.prep.fusion != T1Fusion::none && (a.prep.at_masks ? slot > at : slot == at);
}

__device__ inline char* block_row(const T1Launch& a, int64_t b, int64_t slot) {
  const Tensor& out = a.prep.block_embeds;
  return static_cast<char*>(out.data) + (b * out.stride[0] + slot * out.stride[1]) * size_of(out.dtype);
}

// The table's row of a token, null where this shard has none.
__device__ inline const char* table_row(const Tensor& table, int64_t id, int64_t start) {
  const int64_t local = id - start;
  return id < 0 || local < 0 || local >= table.size[0]
             ? nullptr
             : static_cast<const char*>(table.data) + local * table.stride[0] * size_of(table.dtype);
}

// Where a slot's plain embedding comes from: no row means zeros.
struct Source {
  const char* row;
  DType dtype;
};

__device__ inline Source source_of(const T1Launch& a, int64_t id, int64_t slot) {
  const T1Prep& p = a.prep;
  const char* row = table_row(p.embedding, id, p.embedding_start);
  if (row != nullptr && slot >= p.anchors && given(p.mask_embed)) {
    return {static_cast<const char*>(p.mask_embed.data), p.mask_embed.dtype};
  }
  return {row, p.embedding.dtype};
}

// Element i of the plain embedding, bit for bit where nothing is to be rounded.
__device__ inline void put_plain(const T1Launch& a, const Source& from, char* out, int64_t i) {
  const DType dtype = a.prep.embedding.dtype;
  if (from.row == nullptr) {
    store_float(dtype, out, i, 0.0f);
  } else if (from.dtype != dtype || a.prep.embed_scale != 1.0f) {
    store_float(dtype, out, i, load_float(from.dtype, from.row, i));
    if (a.prep.embed_scale != 1.0f) {
      store_float(dtype, out, i, load_float(dtype, out, i) * a.prep.embed_scale);
    }
  } else if (dtype == DType::f32) {
    reinterpret_cast<uint32_t*>(out)[i] = reinterpret_cast<const uint32_t*>(from.row)[i];
  } else {
    reinterpret_cast<uint16_t*>(out)[i] = reinterpret_cast<const uint16_t*>(from.row)[i];
  }
}

__device__ inline void fill_plain(const T1Launch& a, int64_t b, int64_t slot, int64_t id) {
  const Source from = source_of(a, id, slot);
  char* out = block_row(a, b, slot);
  const DType dtype = a.prep.embedding.dtype;
  const int64_t bytes = a.width * size_of(dtype);
  const auto addresses = reinterpret_cast<uintptr_t>(from.row) | reinterpret_cast<uintptr_t>(out);
  const bool copied = from.row == nullptr || (from.dtype == dtype && a.prep.embed_scale == 1.0f);
  if (copied && addresses % 16 == 0 && bytes % 16 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kPrepThreads) {
      reinterpret_cast<uint4*>(out)[i] = from.row == nullptr ? uint4{} : reinterpret_cast<const uint4*>(from.row)[i];
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < a.width; i += kPrepThreads) {
    put_plain(a, from, out, i);
  }
}

// The hidden half of request b's stream, with the zeros behind it.
__device__ inline bool put_hidden(int& turn, const T1Launch& a, int64_t b) {
  const T1Prep& p = a.prep;
  const int64_t size = p.hidden.size[1], depth = a.first_rows.bytes / a.streams.item;
  for (int64_t i = depth + threadIdx.x; i < a.streams.padded; i += kPrepThreads) {
    put(a.streams, b, i, 0.0f);
  }
  const char* row = static_cast<const char*>(p.hidden.data) + b * p.hidden.stride[0] * size_of(p.hidden.dtype);
  return put_norm(turn, a.streams, b, depth - size, p.hidden.dtype, row, size, 1.0f, p.norm_m, p.eps_m, p.offset_m);
}

// Ids of every slot, plain slots, and what of the streams waits for T1. A block has a slot of a request.
__device__ inline void place(const T1Launch& a) {
  const T1Prep& p = a.prep;
  const bool first = threadIdx.x == 0;
  int turn = 0;
  for (int64_t item = blockIdx.x; item < a.batch * a.slots; item += gridDim.x) {
    const int64_t b = item / a.slots, slot = item % a.slots;
    const Tokens tokens = tokens_of(a, b);
    const int64_t id = id_of(a, tokens, slot);
    if (first) {
      *row_of<int64_t>(p.block_ids, b, slot) = id;
    }
    if (!is_fused(a, slot)) {
      fill_plain(a, b, slot, id);
    }
    if (slot != p.anchors - 1) {
      continue;
    }
    bool finite = true;
    if (p.fusion != T1Fusion::none) {
      finite = a.finite[b] != 0;
      if (given(p.norm_e) && !given(p.folded)) {
        // a row whose T1 lives elsewhere reads another row: its statistics count, its result does not
        const int64_t local = within(tokens.t1 - p.embedding_start, 0, p.embedding.size[0] - 1);
        const char* row =
            static_cast<const char*>(p.embedding.data) + local * p.embedding.stride[0] * size_of(p.embedding.dtype);
        const bool finite_e = put_norm(turn, a.streams, b, 0, p.embedding.dtype, row, a.width, p.embed_scale, p.norm_e,
                                       p.eps_e, p.offset_e);
        finite = finite && finite_e;
      }
    }
    if (first) {
      *row_of<int64_t>(p.t1, b) = tokens.t1;
      *row_of<bool>(p.certified, b) = tokens.proved && tokens.t1 >= 0 && tokens.anchor >= 0 && finite;
    }
  }
}

// Column i of a fused slot, whose residual is `delta`.
__device__ inline void fuse(const T1Launch& a, const Source& from, const char* folded, char* out, int64_t i,
                            float delta) {
  const T1Prep& p = a.prep;
  const DType dtype = p.embedding.dtype;
  const bool replaced = p.fusion == T1Fusion::replace;
  put_plain(a, from, out, i);
  if (from.row == nullptr) {
    return;
  }
  const bool counts = is_finite(delta) && (replaced || delta != 0.0f);
  if (folded == nullptr) {
    if (counts) {
      store_float(dtype, out, i, replaced ? delta : load_float(dtype, out, i) + delta);
    }
    return;
  }
  const float base = load_float(p.folded.dtype, folded, i);
  if (replaced) {
    if (counts) {
      store_float(dtype, out, i, base + delta);
    }
    return;
  }
  // the sum is rounded to the folded table's type first
  store_float(dtype, out, i, counts ? rounded_to(p.folded.dtype, base + delta) : base);
}

__device__ inline void fuse_column(const T1Launch& a, int64_t b, int64_t column, float delta) {
  const T1Prep& p = a.prep;
  const Tokens tokens = tokens_of(a, b);
  for (int64_t slot = 0; slot < a.slots; ++slot) {
    if (is_fused(a, slot)) {
      const int64_t id = id_of(a, tokens, slot);
      const char* folded = given(p.folded) ? table_row(p.folded, id, p.embedding_start) : nullptr;
      fuse(a, source_of(a, id, slot), folded, block_row(a, b, slot), column, delta);
    }
  }
}

template <int kTiles>
struct Partial {
  float of[2][kPrepWarps][kTiles * kTileStates][kTileRows + 1];
};

// Products of 16 rows at a time with all streams: a warp has every fourth chunk of the columns, the four are added in
// order. `last`: columns of the block; else elements of the vector that `up` reads.
template <class Product, int kTiles>
__device__ void project_by(const T1Launch& a, Staged& staged, Partial<kTiles>& partial, bool last, const Rows& rows,
                           const Operand& from, Product product) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t tiles = ((last ? rows.count : a.low.padded) + kTileRows - 1) / kTileRows;
  int turn = 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
    product.clear();
    stream(
        rows, staged.of[warp], lane, tile, 1, tile + 1, warp, kPrepWarps,
        [&](const Stage& stage, int64_t chunk) { product.add(stage, chunk, from, lane); }, [](int64_t) {});
    product.finish(lane);
    auto& sums = partial.of[turn];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[warp][n * kTileStates + lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = product.value(n, j);
      }
    }
    // nobody writes there again before all threads have met here for the next tile, and so have read it
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kTiles * kTileStates * kTileRows; i += kPrepThreads) {
      const int b = i / kTileRows, row = i % kTileRows;
      const int64_t number = tile * kTileRows + row;
      if (b >= a.batch) {
        break;
      }
      float sum = sums[0][b][row];
      for (int w = 1; w < kPrepWarps; ++w) {
        sum += sums[w][b][row];
      }
      if (!last) {
        put(a.low, b, number, number < rows.count ? sum : 0.0f);
      } else if (number < rows.count) {
        fuse_column(a, b, number, sum);
      }
    }
  }
}

template <int kTiles>
__device__ void project(const T1Launch& a, Staged& staged, bool last) {
  DMTP_SHARED(Partial<kTiles>, partial);
  const bool up = last && given(a.prep.up);
  const Rows& rows = up ? a.up_rows : a.first_rows;
  const Operand& from = up ? a.low : a.streams;
  if (from.how == Multiply::parts) {
    return project_by<PartProduct<kTiles>, kTiles>(a, staged, partial, last, rows, from, {});
  }
  PlainProduct<kTiles> product;
  product.dtype = up ? a.prep.up.dtype : a.prep.first.dtype;
  project_by<PlainProduct<kTiles>, kTiles>(a, staged, partial, last, rows, from, product);
}

}  // namespace dmtp::cuda
