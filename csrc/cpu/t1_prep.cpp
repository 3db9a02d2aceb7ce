#include "t1_prep.h"

#include <algorithm>
#include <cfloat>

#include "project.h"
#include "vector.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int kCanonicalLanes = 256;
constexpr int64_t kGrain =
    1 << 15;  // multiply-adds or elements below which a second thread does not pay (not measured)

template <class F>
void with_type(DType type, F f) {
  switch (type) {
    case DType::bf16:
      return f(Bf16{});
    case DType::f16:
      return f(Fp16{});
    default:
      return f(float{});
  }
}

int64_t index_at(const Tensor& t, int64_t i) {
  return t.dtype == DType::i32 ? *t.row<int32_t>(i) : *t.row<int64_t>(i);
}

bool finite(float x) {
  return std::fabs(x) <= FLT_MAX;
}

void store_part(const Floats& x, int64_t n, float* out) {
  float lanes[kLanes];
  x.store(lanes);
  std::memcpy(out, lanes, n * sizeof(float));
}

// The canonical dot of x with itself (dmtp_kernels/ops/lm_head/canonical.py).
float squares(const float* x, int64_t n) {
  constexpr int kVectors = kCanonicalLanes / kLanes;
  Floats lanes[kVectors];
  for (Floats& lane : lanes) {
    lane = Floats::zero();
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = i + kLanes <= n ? Floats::load(x + i) : load_part(x + i, n - i);
    Floats& lane = lanes[i / kLanes % kVectors];
    lane = lane + v * v;
  }
  float tree[kCanonicalLanes];
  for (int j = 0; j < kVectors; ++j) {
    lanes[j].store(tree + j * kLanes);
  }
  for (int width = kCanonicalLanes / 2; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) {
      tree[j] = tree[2 * j] + tree[2 * j + 1];
    }
  }
  return tree[0];
}

// Norms x[n] in place; whether its mean square is finite.
bool rms_norm(float* x, int64_t n, const Tensor& weight, float eps, float offset) {
  const float mean = squares(x, n) / static_cast<float>(n);
  const Floats inverse = Floats::all(1.0f / std::sqrt(mean + eps)), shift = Floats::all(offset);
  with_type(weight.dtype, [&](auto type) {
    const auto* w = weight.row<decltype(type)>(0);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      (Floats::load(x + i) * inverse * (Floats::load(w + i) + shift)).store(x + i);
    }
    if (i < n) {
      store_part(load_part(x + i, n - i) * inverse * (load_part(w + i, n - i) + shift), n - i, x + i);
    }
  });
  return finite(mean);
}

template <class T>
void widen(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = to_float(from[i]);
  }
}

// n elements times the factor, each step rounded to T; the very bits when there is nothing to round.
template <class From, class T>
void plain_row(const From* from, int64_t n, float factor, T* to) {
  if constexpr (std::is_same_v<From, T>) {
    if (factor == 1.0f) {
      std::memcpy(to, from, n * sizeof(T));
      return;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const T value = from_float<T>(to_float(from[i]));
    to[i] = factor == 1.0f ? value : from_float<T>(to_float(value) * factor);
  }
}

// `to` holds the plain embedding; a residual that is zero or not finite leaves its bits alone.
template <class T>
void add_residual(const float* delta, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) {
    const T whole = from_float<T>(to_float(to[i]) + delta[i]);
    to[i] = delta[i] != 0.0f && finite(delta[i]) ? whole : to[i];
  }
}

template <class T>
void replace(const float* delta, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = finite(delta[i]) ? from_float<T>(delta[i]) : to[i];
  }
}

template <class F, class T>
void add_to_folded(const F* folded, const float* delta, int64_t n, T1Fusion fusion, T* to) {
  for (int64_t i = 0; i < n; ++i) {
    const float whole = to_float(folded[i]) + delta[i];
    if (fusion == T1Fusion::replace) {
      to[i] = finite(delta[i]) ? from_float<T>(whole) : to[i];
    } else {
      const F kept = delta[i] != 0.0f && finite(delta[i]) ? from_float<F>(whole) : folded[i];
      if constexpr (std::is_same_v<F, T>) {
        to[i] = kept;
      } else {
        to[i] = from_float<T>(to_float(kept));
      }
    }
  }
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
      depth = p.first.size[1] - skipped;
      stream_stride = t1_prep_stride(depth);
      rank_stride = p.up ? t1_prep_stride(p.up.size[1]) : 0;
      width_stride = t1_prep_stride(width);
      streams = p.scratch;
      ranks = streams + batch * stream_stride;
      deltas = ranks + batch * rank_stride;
    }
  }

  void run() {
    for (int64_t b = 0; b < batch; ++b) {
      place_ids(b);
    }
    if (p.fusion != T1Fusion::none) {
      p.parallel(batch, kGrain / (depth + 1) + 1, [this](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          make_stream(b);
        }
      });
      if (p.up) {
        over_columns(p.first.size[0], depth, [this](int64_t begin, int64_t end) {
          project(p.first, skipped, depth, streams, stream_stride, ranks, rank_stride, begin, end);
        });
        clear_padding(ranks, p.first.size[0], rank_stride);
      }
    }
    over_columns(width, p.up ? p.up.size[1] : depth, [this](int64_t begin, int64_t end) {
      if (p.up) {
        project(p.up, 0, p.up.size[1], ranks, rank_stride, deltas, width_stride, begin, end);
      } else if (p.fusion != T1Fusion::none) {
        project(p.first, skipped, depth, streams, stream_stride, deltas, width_stride, begin, end);
      }
      with_type(p.embedding.dtype, [&](auto type) { write_columns<decltype(type)>(begin, end); });
    });
  }

 private:
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
    float* x = streams + b * stream_stride;
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
    std::fill(x + depth, x + stream_stride, 0.0f);
    bool* certified = p.certified.row<bool>(b);
    *certified = *certified && all_finite;
  }

  void clear_padding(float* vectors, int64_t n, int64_t stride) {
    for (int64_t b = 0; b < batch; ++b) {
      std::fill(vectors + b * stride + n, vectors + (b + 1) * stride, 0.0f);
    }
  }

  // Cuts columns over the threads, in whole vectors.
  template <class Body>
  void over_columns(int64_t columns, int64_t work, Body body) {
    const int64_t each = (work + slots) * batch * kLanes;
    p.parallel(round_up(columns, kLanes) / kLanes, kGrain / (each + 1) + 1,
               [&](int64_t begin, int64_t end) { body(begin * kLanes, std::min(end * kLanes, columns)); });
  }

  void project(const Tensor& matrix, int64_t column, int64_t columns, const float* x, int64_t x_stride, float* out,
               int64_t out_stride, int64_t begin, int64_t end) {
    with_type(matrix.dtype, [&](auto type) {
      const auto* first = matrix.row<decltype(type)>(0) + column;
      Projection<decltype(type)>{first, matrix.stride[0], columns, x, x_stride, out, out_stride}(begin, end, batch);
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
          fuse(deltas + b * width_stride + begin, local, begin, n, out);
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
  int64_t skipped = 0, depth = 0, stream_stride = 0, rank_stride = 0, width_stride = 0;
  float *streams = nullptr, *ranks = nullptr, *deltas = nullptr;  // [B, depth], [B, r], [B, E]
};

}  // namespace

void t1_prep(const T1Prep& p) {
  Call(p).run();
}

}  // namespace dmtp::DMTP_CAPABILITY
