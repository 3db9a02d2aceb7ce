#pragma once

#include "dmtp/lm_head.h"
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

  ParallelFor parallel;
};

// One call of fused_t1_prep on a GPU. Where there is a head it decides, and `prep.token` and `prep.status` are absent.
struct T1Call {
  T1Prep prep;
  LMHead head;
  Tensor hidden;  // [B, H] what the head reads
  bool bf16_logits;
  bool one_launch;  // all phases in a cooperative kernel, where the device can
};

}  // namespace dmtp
