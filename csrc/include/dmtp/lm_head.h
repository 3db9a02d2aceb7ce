#pragma once

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

enum class ScreenFormat : int8_t { dense, int8, int8_g64, int6_g64, int4_g32, low_rank };
enum class IdMap : int8_t { none, offset, absolute };

// The most columns whose digit sums stay in 32 bits.
constexpr int64_t kMaxScreenColumns = 16384;

// The tensors and scalars of `LMHead` (dmtp_kernels/ops/lm_head/head.py).
struct LMHead {
  Tensor weight;  // [V, H]
  Tensor codes;   // int8 [V, H] or packed uint8 [V, bytes]
  Tensor scale;   // fp32 [V] or [V, groups]
  Tensor bound;   // fp32 [V]
  Tensor down;    // [r, H]
  Tensor up;      // [V, r]
  Tensor id_map;  // [V]
  ScreenFormat format;
  IdMap id_map_mode;
  bool full_scan;
  int64_t num_valid;
  int64_t id_offset;
  int64_t capacity;
};

struct LMHeadSelect {
  LMHead head;
  Tensor hidden;  // [n, H]
  int64_t k;
  bool bf16_logits;
  Tensor key;     // out, i64 [n, k]
  Tensor status;  // out, i32 [n]
  ParallelFor parallel;
};

struct LMHeadScreen {
  LMHead head;
  Tensor hidden;  // [n, H]
  int64_t k;
  Tensor ids;          // out, i64 [n, K]
  Tensor count;        // out, i32 [n]
  Tensor lower_bound;  // out, fp32 [n]
  ParallelFor parallel;
};

struct LMHeadRescore {
  Tensor hidden;  // [n, H]
  Tensor weight;  // [V, H]
  Tensor ids;     // i32 or i64 [n, K]
  Tensor count;   // i32 or i64 [n]
  int64_t k;
  int64_t id_offset;
  int64_t num_valid;
  bool bf16_logits;
  Tensor key;  // out, i64 [n, k]
  ParallelFor parallel;
};

}  // namespace dmtp
