#pragma once

#include <algorithm>
#include <limits>

#include "lm_head_scorer.h"

namespace dmtp::DMTP_CAPABILITY {

constexpr int64_t kNoKey = std::numeric_limits<int64_t>::min();

// The k greatest values it was offered, in memory of the caller's.
template <class T>
class Best {
 public:
  Best(T* heap, int64_t k) : heap_(heap), k_(k) {}

  T least() const { return heap_[0]; }

  void offer(T value) {
    if (!(value > heap_[0])) {
      return;
    }
    int64_t at = 0;
    for (int64_t child = 1; child < k_; child = 2 * at + 1) {
      child += child + 1 < k_ && heap_[child + 1] < heap_[child];
      if (!(heap_[child] < value)) {
        break;
      }
      heap_[at] = heap_[child];
      at = child;
    }
    heap_[at] = value;
  }

 private:
  T* heap_;
  int64_t k_;
};

// Ranges of [0, total), handed to threads as they come: one that is held up takes fewer.
class Ranges {
 public:
  Ranges(int64_t total, int64_t size) : total_(total), size_(size) {}

  // The start of a range; `total` or more when there is none left.
  int64_t take() { return next_.fetch_add(size_, std::memory_order_relaxed); }
  int64_t end(int64_t begin) const { return std::min(begin + size_, total_); }

 private:
  std::atomic<int64_t> next_{0};
  int64_t total_, size_;
};

inline float bf16_rounded(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

// monotone(logit) << 32 | ~token (ops/lm_head/keys.py), of a logit that is not NaN.
inline int64_t encode_key(float logit, int64_t token) {
  logit += 0.0f;
  int32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  const int64_t ordered = bits < 0 ? bits ^ 0x7fffffff : bits;
  return static_cast<int64_t>(static_cast<uint64_t>(ordered) << 32 | (~static_cast<uint64_t>(token) & 0xffffffff));
}

inline void offer_logit(float logit, int64_t token, bool bf16_logits, Best<int64_t>& best) {
  if (logit == logit) {
    best.offer(encode_key(bf16_logits ? bf16_rounded(logit) : logit, token));
  }
}

inline int64_t token_of(const LMHead& head, int64_t row) {
  const int64_t own = row + head.id_offset;
  if (head.id_map_mode == IdMap::none) {
    return own;
  }
  const int64_t mapped =
      head.id_map.dtype == DType::i32 ? head.id_map.row<const int32_t>(row)[0] : head.id_map.row<const int64_t>(row)[0];
  return head.id_map_mode == IdMap::offset ? own + mapped : mapped;
}

// Which of the rows first .. first + rows - 1 have a token, as bits.
inline uint32_t named_rows(const LMHead& head, int64_t first, int rows) {
  uint32_t bits = rows < 32 ? (uint32_t{1} << rows) - 1 : ~uint32_t{0};
  if (head.id_map_mode != IdMap::none) {
    for (int r = 0; r < rows; ++r) {
      bits &= ~(static_cast<uint32_t>(token_of(head, first + r) < 0) << r);
    }
  }
  return bits;
}

inline bool is_certified(const LMHead& head) {
  return head.format != ScreenFormat::int4_g32 && head.format != ScreenFormat::low_rank;
}

// What a screening pass leaves of a batch of states.
struct Screened {
  int64_t groups;          // from one state to the next, whole blocks
  const float* upper;      // [n, groups], what the best row of a group may reach: its score where nothing is proved
  const float* threshold;  // [n], below it a group has no row that counts; both rounded to bf16 where logits are
  const float* lower;      // [n], proved lower bound of the k-th best logit; -inf where nothing is proved
};

Screened screen(const LMHead&, const Scorer&, const States&, int64_t k, bool bf16_logits, int workers, Scratch&,
                const ParallelFor&);

// Writes rows (head ids, ascending) that count, their number and the lower bounds of states first .. first + n - 1.
void list_rows(const LMHeadScreen&, const Scorer&, const States&, const Screened&, int64_t first, int workers,
               Scratch&);

// Writes the k best keys of states first .. first + n - 1 from the canonical dots of rows that count; of all rows when
// `screened` is null.
void finish(const LMHeadSelect&, const States&, const Screened* screened, int64_t first, int workers, Scratch&);

// Sorts what the workers found into `key`, rows first ... best is [workers, n, k].
void merge_keys(const int64_t* best, int workers, int64_t n, int64_t k, const Tensor& key, int64_t first, Scratch&);

// At most so many threads for so many bytes: waking one must be worth it.
inline int worker_count(const ParallelFor& parallel, int64_t bytes) {
  constexpr int64_t kWorthAThread = 1 << 18;
  return static_cast<int>(std::clamp<int64_t>(bytes / kWorthAThread, 1, std::max(parallel.threads, 1)));
}

}  // namespace dmtp::DMTP_CAPABILITY
