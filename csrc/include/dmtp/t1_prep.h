#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

enum class T1Fusion { none, residual, replace };

// One call of fused_t1_prep after the selection. Tensors are as the op takes them; none is fp64.
struct T1Prep {
  Tensor anchor_ids;  // [B]
  Tensor token;       // [B] the caller's T1, or keys of the head
  Tensor status;      // [B] of the head, absent where the caller gave T1
  Tensor hidden;      // [B, H] what the fusion reads
  Tensor embedding;   // [Ve, E]
  Tensor mask_embed;  // [E] or absent
  Tensor folded;      // [Ve, E] or absent
  Tensor first;       // [E or r, in] the matrix that reads the streams
  Tensor up;          // [E, r] or absent
  Tensor norm_e;      // [E] or absent
  Tensor norm_m;      // [H]

  T1Fusion fusion;
  bool at_masks;
  float eps_e, eps_m, offset_e, offset_m;
  int64_t anchors, num_masks, mask_id, embedding_start, num_embeddings;
  float embed_scale;

  Tensor t1;            // [B] int64, out
  Tensor block_ids;     // [B, S] int64, out
  Tensor block_embeds;  // [B, S, E], out
  Tensor certified;     // [B] bool, out

  float* scratch;  // of t1_prep_scratch floats
  ParallelFor parallel;
};

constexpr int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}

// Distance in floats between the vectors of two requests: whole registers, and never a multiple of a page, so that
// several of them share the first cache.
constexpr int64_t t1_prep_stride(int64_t n) {
  return round_up(n, 16) + 16;
}

// Floats of scratch: streams, low-rank vectors and residuals of every request.
constexpr int64_t t1_prep_scratch(int64_t batch, int64_t in, int64_t rank, int64_t width) {
  return batch * (t1_prep_stride(in) + t1_prep_stride(rank) + t1_prep_stride(width));
}

}  // namespace dmtp
