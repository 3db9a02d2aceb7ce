#include "t1_prep.h"

#include <algorithm>

#include "project.h"
#include "project_tiles.h"
#include "scratch.h"
#include "t1_rows.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

// Multiply-adds per thread: a second one costs 2 to 4 us, about what these take.
constexpr int64_t kGrain = 1 << 17;

int64_t index_at(const Tensor& t, int64_t i) {
  return t.dtype == DType::i32 ? *t.row<int32_t>(i) : *t.row<int64_t>(i);
}

// Distance in floats between the vectors of two requests: whole steps, and never a multiple of a page, so that several
// of them share the first cache.
int64_t stride_of(int64_t n) {
  return pieces(n, kTileDepth) * kTileDepth + kLanes;
}

class Call {
 public:
  explicit Call(const T1Prep& p)
      : p(p),
        batch(p.anchor_ids.size[0]),
        width(p.embedding.size[1]),
        slots(p.anchors + p.num_masks),
        fused_slot(p.anchors - 1) {
    if (p.fusion != T1Fusion::none) {
      reads_embedding = p.norm_e && !p.folded;
      skipped = p.folded ? width : 0;
      streams = take_vectors(p.first.size[1] - skipped, p.first);
      if (p.up) {
        ranks = take_vectors(p.up.size[1], p.up);
      }
      deltas = take_vectors(width, {});
    }
  }

  void run() {
    for (int64_t b = 0; b < batch; ++b) {
      place_ids(b);
    }
    if (p.fusion != T1Fusion::none) {
      p.parallel(batch, kGrain / (streams.depth + 1) + 1, [this](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          make_stream(b);
        }
      });
      split_vectors(streams);
      if (p.up) {
        over_columns(ranks.depth, streams.depth,
                     [this](int64_t begin, int64_t end) { project(p.first, skipped, streams, ranks, begin, end); });
        for (int64_t b = 0; b < batch; ++b) {
          clear_padding(ranks, b);
        }
        split_vectors(ranks);
      }
    }
    over_columns(width, p.up ? ranks.depth : streams.depth, [this](int64_t begin, int64_t end) {
      if (p.up) {
        project(p.up, 0, ranks, deltas, begin, end);
      } else if (p.fusion != T1Fusion::none) {
        project(p.first, skipped, streams, deltas, begin, end);
      }
      with_type(p.embedding.dtype, [&](auto type) { write_columns<decltype(type)>(begin, end); });
    });
  }

 private:
  // One vector per request, in fp32 and, for a matrix that runs on tiles, as those read it.
  struct Vectors {
    float* data = nullptr;
    int64_t depth = 0, stride = 0;
    uint32_t* words = nullptr;

    float* of(int64_t b) const { return data + b * stride; }
  };

  Vectors take_vectors(int64_t depth, const Tensor& matrix) {
    Vectors out{nullptr, depth, stride_of(depth), nullptr};
    out.data = scratch.take<float>(batch * out.stride);
    if (kHasTiles && matrix.dtype == DType::bf16) {
      out.words = scratch.take<uint32_t>(split_words(depth, batch));
    }
    return out;
  }

  void split_vectors(const Vectors& v) {
    if (v.words != nullptr) {
      const int64_t steps = split_words(v.depth, batch) / kTileWords;
      p.parallel(steps, kGrain / kTileWords,
                 [&](int64_t begin, int64_t end) { split(v.data, v.stride, v.depth, batch, begin, end, v.words); });
    }
  }

  void clear_padding(const Vectors& v, int64_t b) { std::fill(v.of(b) + v.depth, v.of(b) + v.stride, 0.0f); }

  void place_ids(int64_t b) {
    constexpr int32_t kUncertified = 2;
    int64_t anchor = index_at(p.anchor_ids, b), token = index_at(p.token, b);
    bool proved = true;
    if (p.status) {
      token = static_cast<int32_t>(~static_cast<uint32_t>(token));  // a key carries ~id below its logit
      proved = (*p.status.row<int32_t>(b) & kUncertified) == 0;
    }
    const bool live = anchor >= 0;
    token = live && token >= 0 && token < p.num_embeddings ? token : -1;
    anchor = anchor < p.num_embeddings ? std::max<int64_t>(anchor, -1) : -1;
    *p.t1.row<int64_t>(b) = token;
    for (int64_t s = 0; s < slots; ++s) {
      *at<int64_t>(p.block_ids, b, s) = s > fused_slot ? (live ? p.mask_id : -1) : s == fused_slot ? token : anchor;
    }
    *p.certified.row<bool>(b) = proved && token >= 0 && anchor >= 0;
  }

  // One RMSNorm of each stream, the embedding first.
  void make_stream(int64_t b) {
    float* x = streams.of(b);
    bool all_finite = true;
    int64_t done = 0;
    if (reads_embedding) {
      // a row whose T1 lives elsewhere reads another row: its statistics count, its result does not
      const int64_t local = std::clamp<int64_t>(*p.t1.row<int64_t>(b) - p.embedding_start, 0, p.embedding.size[0] - 1);
      with_type(p.embedding.dtype, [&](auto type) {
        using T = decltype(type);
        const T* row = p.embedding.row<T>(local);
        widen(row, width, x);
        if (p.embed_scale != 1.0f) {
          for (int64_t i = 0; i < width; ++i) {
            x[i] = to_float(from_float<T>(x[i] * p.embed_scale));
          }
        }
      });
      all_finite = rms_norm(x, width, p.norm_e, p.eps_e, p.offset_e);
      done = width;
    }
    const int64_t hidden = p.hidden.size[1];
    with_type(p.hidden.dtype, [&](auto type) { widen(p.hidden.row<decltype(type)>(b), hidden, x + done); });
    all_finite = rms_norm(x + done, hidden, p.norm_m, p.eps_m, p.offset_m) && all_finite;
    clear_padding(streams, b);
    bool* certified = p.certified.row<bool>(b);
    *certified = *certified && all_finite;
  }

  // Cuts columns over the threads, in whole vectors.
  template <class Body>
  void over_columns(int64_t columns, int64_t work, Body body) {
    const int64_t each = (work + slots) * batch * kLanes;
    p.parallel(pieces(columns, kLanes), kGrain / (each + 1) + 1,
               [&](int64_t begin, int64_t end) { body(begin * kLanes, std::min(end * kLanes, columns)); });
  }

  // to[row] = matrix[row, column :] . from, rows [begin, end). Which rows run on tiles depends on the matrix alone.
  void project(const Tensor& matrix, int64_t column, const Vectors& from, const Vectors& to, int64_t begin,
               int64_t end) {
    const int64_t row_stride = matrix.stride[0];
#if defined(__AMX_BF16__)
    if (from.words != nullptr) {
      const TileProjection tiles{
          matrix.row<Bf16>(0) + column, row_stride, from.depth, from.words, batch, to.data, to.stride};
      begin = tiles(begin, end);
    }
#endif
    with_type(matrix.dtype, [&](auto type) {
      using W = decltype(type);
      const W* first = matrix.row<W>(0) + column;
      Projection<W>{first, row_stride, from.depth, from.data, from.stride, to.data, to.stride}(begin, end, batch);
    });
  }

  template <class T>
  static T* at(const Tensor& t, int64_t b, int64_t s) {
    return t.row<T>(b) + s * t.stride[1];
  }

  // Columns [begin, end) of every slot: the plain embedding, and what the fusion does to it.
  template <class T>
  void write_columns(int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t s = 0; s < slots; ++s) {
        T* out = at<T>(p.block_embeds, b, s) + begin;
        const int64_t id = *at<int64_t>(p.block_ids, b, s), local = id - p.embedding_start;
        if (id < 0 || local < 0 || local >= p.embedding.size[0]) {
          std::memset(out, 0, n * sizeof(T));
          continue;
        }
        if (s > fused_slot && p.mask_embed) {
          with_type(p.mask_embed.dtype,
                    [&](auto type) { plain_row(p.mask_embed.row<decltype(type)>(0) + begin, n, p.embed_scale, out); });
        } else {
          plain_row(p.embedding.row<T>(local) + begin, n, p.embed_scale, out);
        }
        if (p.fusion != T1Fusion::none && (p.at_masks ? s > fused_slot : s == fused_slot)) {
          fuse(deltas.of(b) + begin, local, begin, n, out);
        }
      }
    }
  }

  template <class T>
  void fuse(const float* delta, int64_t local, int64_t begin, int64_t n, T* out) {
    if (p.folded) {
      with_type(p.folded.dtype, [&](auto type) {
        add_to_folded(p.folded.row<decltype(type)>(local) + begin, delta, n, p.fusion, out);
      });
    } else if (p.fusion == T1Fusion::replace) {
      replace(delta, n, out);
    } else {
      add_residual(delta, n, out);
    }
  }

  const T1Prep& p;
  int64_t batch, width, slots, fused_slot;
  bool reads_embedding = false;
  int64_t skipped = 0;  // leading columns of the matrix that the folded table stands for
  Scratch scratch;
  Vectors streams, ranks, deltas;  // [B, in], [B, r], [B, E]
};

}  // namespace

void t1_prep(const T1Prep& p) {
  Call(p).run();
}

}  // namespace dmtp::DMTP_CAPABILITY
