#pragma once

#include <algorithm>
#include <cstdint>

#include "dmtp/commit_kv.h"
#include "scratch.h"

namespace dmtp::DMTP_CAPABILITY {

enum : int32_t { kBadCount = 1, kBadSlot = 2, kBadOwner = 4, kBadPosition = 8 };

inline int64_t whole_at(const Tensor& t, int64_t i) {
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[i] : static_cast<const int32_t*>(t.data)[i];
}

// What goes where in a cache, the same for every layer. Slots are those that are written: -1 elsewhere.
struct CommitPlan {
  int64_t batch, rows;
  int64_t* count;   // [B]
  int64_t* slot;    // [B, R]
  int64_t* source;  // [B] the promoted row
  int64_t* target;  // [B]
};

// Who writes each slot of a call: open addressing over at most half of the entries.
class Writers {
 public:
  Writers(Scratch& scratch, int64_t writes) {
    while (mask_ < 2 * writes) {
      mask_ = 2 * mask_ + 1;
    }
    slot_ = scratch.fill<int64_t>(mask_ + 1, -1);
    last_ = scratch.take<int64_t>(mask_ + 1);
    owner_ = scratch.take<int64_t>(mask_ + 1);
  }

  // Writes are added in their order.
  void add(int64_t slot, int64_t order, int64_t request) {
    const int64_t i = find(slot);
    owner_[i] = slot_[i] == slot && owner_[i] != request ? kSeveral : request;
    slot_[i] = slot;
    last_[i] = order;
  }

  bool is_last(int64_t slot, int64_t order) const { return last_[find(slot)] == order; }
  bool several(int64_t slot) const { return owner_[find(slot)] == kSeveral; }

 private:
  static constexpr int64_t kSeveral = -1;

  int64_t find(int64_t slot) const {
    int64_t i = static_cast<int64_t>(static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15u >> 32) & mask_;
    while (slot_[i] != slot && slot_[i] >= 0) {
      i = (i + 1) & mask_;
    }
    return i;
  }

  int64_t mask_ = 15;
  int64_t *slot_, *last_, *owner_;
};

// Also adds the error bits.
inline CommitPlan commit_plan(const CommitKV& args, const CommitCache& cache, Scratch& scratch) {
  const int64_t batch = cache.dst.size[0], rows = cache.dst.size[1];
  CommitPlan plan{batch,
                  rows,
                  scratch.take<int64_t>(batch),
                  scratch.take<int64_t>(batch * rows),
                  scratch.fill<int64_t>(batch, -1),
                  scratch.fill<int64_t>(batch, -1)};
  Writers writers(scratch, batch * (rows + 1));
  const auto inside = [&](int64_t slot) { return slot >= cache.first_slot && slot < cache.num_slots; };
  auto* error = static_cast<int32_t*>(args.error.data);

  for (int64_t b = 0; b < batch; ++b) {
    const bool live = !args.live || static_cast<const bool*>(args.live.data)[b * args.live.stride[0]];
    const int64_t valid = whole_at(args.valid, b * args.valid.stride[0]);
    const int64_t count = live ? std::clamp<int64_t>(valid, 0, rows) : 0;
    int32_t flags = live && (valid < 0 || valid > rows) ? kBadCount : 0;
    plan.count[b] = count;
    const int64_t pending = cache.pending_slot ? whole_at(cache.pending_slot, b * cache.pending_slot.stride[0]) : -1;
    for (int64_t j = 0; j < rows; ++j) {
      int64_t slot = -1;
      if (count > 0 && j >= count) {
        slot = cache.scratch_dst ? whole_at(cache.scratch_dst, b * cache.scratch_dst.stride[0] + j) : -1;
      } else if (j < count) {
        slot = cache.pending_slot && j == count - 1 ? pending : whole_at(cache.dst, b * cache.dst.stride[0] + j);
      }
      flags |= slot >= cache.num_slots ? kBadSlot : 0;
      plan.slot[b * rows + j] = inside(slot) ? slot : -1;
      if (args.positions && inside(slot)) {
        const int64_t position = whole_at(args.positions, b * args.positions.stride[0] + j);
        flags |= position < 0 || position >= args.cos_sin.size[0] ? kBadPosition : 0;
      }
    }
    if (count > 0 && inside(pending)) {
      const int64_t target = whole_at(cache.promote_dst, b * cache.promote_dst.stride[0]);
      flags |= target >= cache.num_slots ? kBadSlot : 0;
      if (inside(target)) {
        plan.source[b] = pending;
        plan.target[b] = target;
        writers.add(target, b, b);
      }
    }
    error[b * args.error.stride[0]] |= flags;
  }
  for (int64_t i = 0; i < batch * rows; ++i) {
    if (plan.slot[i] >= 0) {
      writers.add(plan.slot[i], batch + i, i / rows);
    }
  }
  for (int64_t i = 0; i < batch * rows; ++i) {
    if (plan.slot[i] >= 0 && !writers.is_last(plan.slot[i], batch + i)) {
      plan.slot[i] = -1;
    }
  }
  for (int64_t b = 0; b < batch; ++b) {
    if (plan.target[b] < 0) {
      continue;
    }
    const bool taken = plan.target[b] != plan.source[b] && writers.several(plan.source[b]);
    error[b * args.error.stride[0]] |= taken ? kBadOwner : 0;
    if (taken || !writers.is_last(plan.target[b], b)) {
      plan.target[b] = -1;
    }
  }
  return plan;
}

}  // namespace dmtp::DMTP_CAPABILITY
