#include "draft_pages.h"

#include <algorithm>
#include <limits>

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int64_t kGrain = 1 << 14;  // columns that are worth a thread: not measured

int64_t index_at(const Tensor& t, int64_t i) {
  return t.dtype == DType::i64 ? t.row<const int64_t>(i)[0] : t.row<const int32_t>(i)[0];
}

int32_t page_or_null(int64_t id) {
  return id >= 0 && id <= std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(id) : 0;
}

// Columns [0, count) of one table, from one entry of each page; a page id is the slot of a page of one.
template <class T>
void copy_pages(const T* from, int64_t slots_of_page, int64_t count, int32_t* to, int64_t to_step) {
  if (slots_of_page == 1 && to_step == 1) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = page_or_null(from[i]);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    // division rounds towards zero: a negative slot may become page 0, which is what it must become
    to[i * to_step] = page_or_null(from[i * slots_of_page] / static_cast<T>(slots_of_page));
  }
}

void one_table(const DraftPages& args, int64_t b) {
  const int64_t page_size = args.page_size, columns = args.source.size[1];
  const int64_t row = args.pool ? index_at(args.pool, b) : b, given = index_at(args.ctx_len, b);
  const int64_t capacity = args.slots ? columns : columns * page_size;
  const bool live = given > 0 && row >= 0 && row < args.source.size[0];
  const bool fits = live && given <= capacity - args.block_slots, refused = live && !fits;
  const int64_t context = fits ? given : 0;
  int64_t start = std::max<int64_t>(context - args.window, 0);
  if (args.valid_from) {
    start = std::max(start, index_at(args.valid_from, b));
  }
  start = std::min(start, context);
  const int64_t first = start / page_size, length = context - first * page_size;
  args.draft_len.row<int32_t>(b)[0] = refused ? -1 : static_cast<int32_t>(length);
  args.kv_skip.row<int32_t>(b)[0] = refused ? -1 : static_cast<int32_t>(start % page_size);

  const int64_t width = args.draft_table.size[1], to_step = args.draft_table.stride[1];
  const int64_t used = fits ? std::min(width, (length + args.block_slots + page_size - 1) / page_size) : 0;
  auto* to = args.draft_table.row<int32_t>(b);
  const int64_t slots_of_page = args.slots ? page_size : 1;
  if (used > 0 && args.source.dtype == DType::i64) {
    copy_pages(args.source.row<const int64_t>(row) + first * slots_of_page, slots_of_page, used, to, to_step);
  } else if (used > 0) {
    copy_pages(args.source.row<const int32_t>(row) + first * slots_of_page, slots_of_page, used, to, to_step);
  }
  for (int64_t i = used; i < width; ++i) {
    to[i * to_step] = 0;
  }
}

}  // namespace

void draft_pages(const DraftPages& args) {
  const int64_t batch = args.ctx_len.size[0], width = args.draft_table.size[1];
  args.parallel(batch, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      one_table(args, b);
    }
  });
}

}  // namespace dmtp::DMTP_CAPABILITY
