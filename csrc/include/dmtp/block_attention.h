#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

// One call of block_attention. Tensors are as the op takes them; none is fp64.
struct BlockAttention {
  Tensor q;           // [B, S, Hq, D]
  Tensor k_cache;     // [pages, P, Hkv, D]
  Tensor v_cache;     // [pages, P, Hkv, D]
  Tensor page_table;  // [B, MP]
  Tensor ctx_len;     // [B]
  Tensor block_k;     // [B, Sb, Hkv, D] or absent: the block is in the cache
  Tensor block_v;
  Tensor block_len;   // [B] or absent
  Tensor valid_from;  // [B] or absent
  Tensor k_scale;     // fp32 [], [1], [Hkv] or [B, Hkv], or absent
  Tensor v_scale;
  Tensor sink;  // [Hq] or absent

  int64_t window;  // negative: no limit
  bool by_query;   // the window is each query's own
  bool block_causal;
  float scale;
  float soft_cap;  // 0: none

  Tensor out;  // [B, S, Hq, D], out
  Tensor lse;  // [B, S, Hq] fp32, out

  ParallelFor parallel;
};

}  // namespace dmtp
