#include "advance.h"

#include <algorithm>

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int64_t kGrain = 256;  // requests that are worth a thread: not measured
constexpr int32_t kBadCount = 1, kBadGrant = 2, kNoPage = 4;

int64_t get(const Tensor& t, int64_t offset) {
  return t.dtype == DType::i64 ? static_cast<const int64_t*>(t.data)[offset]
                               : static_cast<const int32_t*>(t.data)[offset];
}

void set(const Tensor& t, int64_t offset, int64_t value) {
  if (t.dtype == DType::i64) {
    static_cast<int64_t*>(t.data)[offset] = value;
  } else {
    static_cast<int32_t*>(t.data)[offset] = static_cast<int32_t>(value);
  }
}

int64_t get_of(const Tensor& t, int64_t b) {
  return get(t, b * t.stride[0]);
}

void set_of(const Tensor& t, int64_t b, int64_t value) {
  set(t, b * t.stride[0], value);
}

// Enters the pages granted to request b, in order; whether one was skipped.
bool enter_grants(const Advance& args, int64_t b) {
  bool skipped = false;
  for (int64_t g = 0; args.grants && g < args.grants.size[1]; ++g) {
    int32_t* grant = args.grants.row<int32_t>(b) + g * args.grants.stride[1];
    const int64_t number = grant[0], column = grant[1], page = grant[2];
    if (number < 0) {
      continue;
    }
    grant[0] = -1;
    if (number < args.num_tables && column >= 0 && column < args.tables[number].size[1] && page >= args.first_page) {
      set(args.tables[number], b * args.tables[number].stride[0] + column, page);
    } else {
      skipped = true;
    }
  }
  return skipped;
}

int64_t slot_of(const Advance& args, int64_t t, int64_t b, int64_t position) {
  const Tensor& table = args.tables[t];
  const int64_t size = args.page_sizes[t], column = position / size;
  if (position < 0 || column >= table.size[1]) {
    return -1;
  }
  const int64_t page = get(table, b * table.stride[0] + column);
  return page >= args.first_page ? page * size + position % size : -1;
}

void one_request(const Advance& args, int64_t b) {
  const int64_t rows = args.positions.size[1], given = get_of(args.commit_len, b);
  int64_t left = get_of(args.budget, b), length = get_of(args.length, b);
  const bool miscounted = left > 0 && (given < 0 || given > rows);
  const int64_t count = left > 0 ? std::clamp<int64_t>(given, 0, rows) : 0;
  if (count > 0) {
    const int64_t ended = get_of(args.ended, b);
    length += count;
    left = ended == 0 ? std::max<int64_t>(left - count, 0) : 0;
    set_of(args.length, b, length);
    set_of(args.anchor, b, get_of(args.bonus, b));
    set_of(args.finished, b, ended);
    set_of(args.budget, b, left);
  }
  int32_t error = enter_grants(args, b) ? kBadGrant : 0;

  const bool live = left > 0;
  error |= live && miscounted ? kBadCount : 0;
  const int64_t first = live ? length : 0;
  for (int64_t j = 0; j < rows; ++j) {
    args.positions.row<int64_t>(b)[j * args.positions.stride[1]] = first + j;
    args.token_positions.row<int64_t>(b)[j * args.token_positions.stride[1]] = first + j + 1;
  }
  args.context_len.row<int64_t>(b)[0] = first;
  args.history_len.row<int64_t>(b)[0] = std::max<int64_t>(first - 1, 0);
  for (int64_t s = 0; s < args.block_ids.size[1]; ++s) {
    const bool known = s == 0 && live;
    args.block_ids.row<int64_t>(b)[s * args.block_ids.stride[1]] = known ? get_of(args.anchor, b) : args.mask_id;
  }
  for (int64_t t = 0; t < args.num_tables; ++t) {
    int64_t* slots = args.slots.row<int64_t>(b) + t * args.slots.stride[1];
    for (int64_t j = 0; j < rows; ++j) {
      const int64_t slot = live ? slot_of(args, t, b, first + j) : -1;
      slots[j * args.slots.stride[2]] = slot;
      error |= slot < 0 && j < left ? kNoPage : 0;
    }
    int64_t* previous = args.previous_slots.row<int64_t>(b) + t * args.previous_slots.stride[1];
    *previous = live ? slot_of(args, t, b, first - 1) : -1;
  }
  args.error.row<int32_t>(b)[0] = error;
}

}  // namespace

void advance(const Advance& args) {
  args.parallel(args.length.size[0], kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      one_request(args, b);
    }
  });
}

}  // namespace dmtp::DMTP_CAPABILITY
