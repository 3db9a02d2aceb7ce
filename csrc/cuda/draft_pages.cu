#include "cuda/device.cuh"
#include "cuda/launchers.h"
#include "dmtp/draft_pages.h"

namespace dmtp::cuda {
namespace {

constexpr int kThreads = 128;  // a column each; not measured: only latency counts

// One tile of a request's columns; the block of the first tile also writes its lengths.
__global__ void __launch_bounds__(kThreads) draft_pages_kernel(const DraftPages args, int64_t tiles) {
  const int64_t b = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t page_size = args.page_size, columns = args.source.size[1], width = args.draft_table.size[1];
  const int64_t row = given(args.pool) ? index_of(args.pool, b) : b, asked = index_of(args.ctx_len, b);
  const int64_t capacity = args.slots ? columns : columns * page_size;
  const bool live = asked > 0 && row >= 0 && row < args.source.size[0];
  const bool fits = live && asked <= capacity - args.block_slots, refused = live && !fits;
  const int64_t context = fits ? asked : 0;
  int64_t start = most(context - args.window, 0);
  if (given(args.valid_from)) {
    start = most(start, index_of(args.valid_from, b));
  }
  start = least(start, context);
  const int64_t first = start / page_size, length = context - first * page_size;
  if (tile == 0 && threadIdx.x == 0) {
    // a length of -1 makes the request inert to attention: with 0 it would attend its block alone
    *row_of<int32_t>(args.draft_len, b) = refused ? -1 : static_cast<int32_t>(length);
    *row_of<int32_t>(args.kv_skip, b) = refused ? -1 : static_cast<int32_t>(start - first * page_size);
  }
  const int64_t column = tile * kThreads + threadIdx.x;
  if (column >= width) {
    return;
  }
  int64_t page = 0;
  if (fits && column * page_size < length + args.block_slots) {
    const int64_t entry = (first + column) * (args.slots ? page_size : 1);
    page = index_at(args.source, row * args.source.stride[0] + entry * args.source.stride[1]);
    // division rounds towards zero: a negative slot may become page 0, which is what it must become
    page = args.slots ? page / page_size : page;
    page = page >= 0 && page <= INT32_MAX ? page : 0;
  }
  *row_of<int32_t>(args.draft_table, b, column) = static_cast<int32_t>(page);
}

}  // namespace

const char* draft_pages(const DraftPages& args, void* stream) {
  const int64_t batch = args.ctx_len.size[0], width = args.draft_table.size[1];
  // a table without columns still has lengths
  const int64_t tiles = width > kThreads ? (width + kThreads - 1) / kThreads : 1;
  return batch == 0 ? nullptr : launch(draft_pages_kernel, batch * tiles, kThreads, stream, args, tiles);
}

}  // namespace dmtp::cuda
