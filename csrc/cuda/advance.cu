#include "cuda/device.cuh"
#include "cuda/launchers.h"
#include "dmtp/advance.h"

namespace dmtp::cuda {
namespace {

constexpr int32_t kBadCount = 1, kBadGrant = 2, kNoPage = 4;

// Enters the pages granted to request b, a later grant over an earlier one; whether the lane had one that was skipped.
__device__ bool enter_grants(const Advance& args, int64_t b, int lane) {
  bool skipped = false;
  const int64_t count = given(args.grants) ? args.grants.size[1] : 0;
  for (int64_t from = 0; from < count; from += kLanes) {
    int64_t number = -1, column = 0, page = 0;
    if (from + lane < count) {
      int32_t* grant = row_of<int32_t>(args.grants, b, from + lane);
      number = grant[0];
      column = grant[1];
      page = grant[2];
      if (number >= 0) {
        grant[0] = -1;
      }
    }
    bool inside = number >= 0 && number < args.num_tables && column >= 0 && page >= args.first_page;
    inside = inside && column < args.tables[number].size[1];
    skipped = skipped || (number >= 0 && !inside);
    // of the lanes that enter one column the last does
    const uint64_t place =
        inside ? static_cast<uint64_t>(number) << 32 | static_cast<uint32_t>(column) : ~static_cast<uint64_t>(lane);
    const uint32_t same = __match_any_sync(kAllLanes, static_cast<unsigned long long>(place));
    if (inside && same >> lane == 1) {
      const Tensor& table = args.tables[number];
      set_index(table, b * table.stride[0] + column * table.stride[1], page);
    }
    // before the next lanes enter the same columns, and before any lane reads the tables
    __syncwarp();
  }
  return skipped;
}

__device__ int64_t slot_of(const Advance& args, int64_t t, int64_t b, int64_t position) {
  const Tensor& table = args.tables[t];
  const int64_t size = args.page_sizes[t], column = position / size;
  if (position < 0 || column >= table.size[1]) {
    return -1;
  }
  const int64_t page = index_at(table, b * table.stride[0] + column * table.stride[1]);
  return page >= args.first_page ? page * size + position % size : -1;
}

// One warp for one request.
__global__ void __launch_bounds__(kLanes) advance_kernel(const Advance args) {
  const int64_t b = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t rows = args.positions.size[1], asked = index_of(args.commit_len, b);
  int64_t left = index_of(args.budget, b), length = index_of(args.length, b), anchor = index_of(args.anchor, b);
  const bool miscounted = left > 0 && (asked < 0 || asked > rows);
  const int64_t count = left > 0 ? within(asked, 0, rows) : 0;
  int64_t ended = 0;
  if (count > 0) {
    ended = index_of(args.ended, b);
    length += count;
    anchor = index_of(args.bonus, b);
    left = ended == 0 ? most(left - count, 0) : 0;
  }
  // every lane has read what the first one moves
  __syncwarp();
  if (lane == 0 && count > 0) {
    set_index(args.length, b * args.length.stride[0], length);
    set_index(args.anchor, b * args.anchor.stride[0], anchor);
    set_index(args.finished, b * args.finished.stride[0], ended);
    set_index(args.budget, b * args.budget.stride[0], left);
  }
  const bool skipped = enter_grants(args, b, lane);

  const bool live = left > 0;
  const int64_t first = live ? length : 0;
  bool homeless = false;
  for (int64_t j = lane; j < rows; j += kLanes) {
    *row_of<int64_t>(args.positions, b, j) = first + j;
    *row_of<int64_t>(args.token_positions, b, j) = first + j + 1;
    for (int64_t t = 0; t < args.num_tables; ++t) {
      const int64_t slot = live ? slot_of(args, t, b, first + j) : -1;
      row_of<int64_t>(args.slots, b, t)[j * args.slots.stride[2]] = slot;
      homeless = homeless || (slot < 0 && j < left);
    }
  }
  for (int64_t s = lane; s < args.block_ids.size[1]; s += kLanes) {
    *row_of<int64_t>(args.block_ids, b, s) = s == 0 && live ? anchor : args.mask_id;
  }
  if (lane < args.num_tables) {
    *row_of<int64_t>(args.previous_slots, b, lane) = live ? slot_of(args, lane, b, first - 1) : -1;
  }
  int32_t error = live && miscounted ? kBadCount : 0;
  error |= __any_sync(kAllLanes, skipped) ? kBadGrant : 0;
  error |= __any_sync(kAllLanes, homeless) ? kNoPage : 0;
  if (lane == 0) {
    *row_of<int64_t>(args.context_len, b) = first;
    *row_of<int64_t>(args.history_len, b) = most(first - 1, 0);
    *row_of<int32_t>(args.error, b) = error;
  }
}

}  // namespace

const char* advance(const Advance& args, void* stream) {
  const int64_t batch = args.length.size[0];
  return batch == 0 ? nullptr : launch(advance_kernel, batch, kLanes, stream, args);
}

}  // namespace dmtp::cuda
