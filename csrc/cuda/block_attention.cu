#include "cuda/attention_launch.cuh"
#include "cuda/launchers.h"

namespace dmtp::cuda {
namespace {

constexpr int kCombineThreads = 128;

// The sums of a request's chunks in their order; requests of one chunk have been written.
__global__ void __launch_bounds__(kCombineThreads)
    block_attention_combine_kernel(const __grid_constant__ AttentionLaunch a) {
  const int pieces = (a.dim + 3) / 4;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x;
  const int64_t owner = item / pieces / a.query_rows, b = owner / a.heads;
  if (b >= a.batch) {
    return;
  }
  const int column = static_cast<int>(item % pieces) * 4, row = static_cast<int>(item / pieces % a.query_rows);
  const int head = static_cast<int>(owner % a.heads), rows = kParts * a.part;
  const Request r = request_of(a, b);
  if (r.ctx - r.base <= rows) {
    return;
  }
  State s;
  const int last = r.low < r.ctx ? (r.ctx - r.base + rows - 1) / rows : 1;
  for (int chunk = 0; chunk < last; ++chunk) {
    // the first one holds the block, wherever the context begins
    if (chunk == 0 || chunk >= (r.low - r.base) / rows) {
      const int64_t at = partial_row(a, b, head, chunk, row);
      s.add(load_global(a.tops + at), load_global(a.totals + at), left_at(a, at, column));
    }
  }
  finish(a, b, head, row, column, s);
}

constexpr int64_t kMostRows = 1 << 30;  // of a table: 32-bit positions

bool multiple_of_16(const Tensor& t, int64_t item) {
  auto bits = reinterpret_cast<uintptr_t>(t.data);
  for (int i = 0; i < 3; ++i) {
    bits |= t.size[i] > 1 ? static_cast<uintptr_t>(t.stride[i] * item) : 0;
  }
  return bits % 16 == 0;
}

bool is_fp8(DType dtype) {
  return dtype == DType::f8e4m3 || dtype == DType::f8e5m2;
}

bool takes(const BlockAttention& c) {
  const DType q = c.q.dtype, k = c.k_cache.dtype, v = c.v_cache.dtype;
  const bool narrow = q == DType::bf16 || q == DType::f16;
  const int64_t rows = c.block_k ? c.block_k.size[1] : c.q.size[1];
  return (narrow || q == DType::f32) && ((k == q && v == q) || (narrow && is_fp8(k) && is_fp8(v))) &&
         c.q.size[3] <= 256 &&
         std::max({c.page_table.size[1] * c.k_cache.size[1], rows, c.k_cache.size[0], c.q.size[1] * c.q.size[2]}) <=
             kMostRows;
}

// Rows of a part: eight of them leave partial sums, written and read in fp32, of some 3 % of their keys and values.
int64_t part_of(const AttentionLaunch& a, int64_t row_bytes) {
  int64_t part = 512;
  while (part < kMostRows / 16 && part * row_bytes < static_cast<int64_t>(a.query_rows) * a.dim * 30) {
    part *= 2;
  }
  return part;
}

AttentionLaunch launch_for(const BlockAttention& c) {
  AttentionLaunch a{};
  a.call = c;
  a.batch = c.q.size[0];
  a.slots = static_cast<int>(c.q.size[1]);
  a.dim = static_cast<int>(c.q.size[3]);
  a.heads = static_cast<int>(c.k_cache.size[2]);
  a.group = static_cast<int>(c.q.size[2]) / a.heads;
  a.query_rows = a.slots * a.group;
  a.block_rows = static_cast<int>(c.block_k ? c.block_k.size[1] : c.q.size[1]);
  a.pages = static_cast<int>(c.k_cache.size[0]);
  a.page_size = static_cast<int>(c.k_cache.size[1]);
  a.capacity = a.pages == 0 ? 0 : static_cast<int>(c.page_table.size[1]) * a.page_size;
  a.window = c.window < 0 ? -1 : static_cast<int>(std::min(c.window, kMostRows + (kMostRows - 1)));
  const int64_t item = size_of(c.q.dtype), k_item = size_of(c.k_cache.dtype), v_item = size_of(c.v_cache.dtype);
  a.part = static_cast<int>(part_of(a, a.dim * (k_item + v_item)));
  const int64_t span = a.window < 0 ? a.capacity : std::min(a.capacity, a.window), chunk = kParts * int64_t{a.part};
  a.chunks = static_cast<int>(std::max<int64_t>(1, (span + chunk - 1) / chunk));
  a.factor = c.soft_cap == 0 ? c.scale * kLog2e : c.scale / c.soft_cap;
  a.cap = c.soft_cap * kLog2e;
  const auto pieces = [&](int64_t bytes) { return a.dim * bytes % 16 == 0; };
  a.query_aligned = pieces(item) && multiple_of_16(c.q, item);
  a.cache_aligned =
      pieces(k_item) && pieces(v_item) && multiple_of_16(c.k_cache, k_item) && multiple_of_16(c.v_cache, v_item);
  a.block_aligned = pieces(item) && multiple_of_16(c.block_k, item) && multiple_of_16(c.block_v, item);
  a.out_aligned = c.out.stride[3] == 1 && multiple_of_16(c.out, item);
  return a;
}

// Calls `each` with the kind of products of a call and whether its cache is fp8.
template <class Each>
auto with_kind(const BlockAttention& c, Each each) {
  const bool fp8 = is_fp8(c.k_cache.dtype);
  return c.q.dtype == DType::f32    ? each(Fp32Fma{}, std::false_type{})
         : c.q.dtype == DType::bf16 ? (fp8 ? each(Bf16Mma{}, std::true_type{}) : each(Bf16Mma{}, std::false_type{}))
         : fp8                      ? each(Fp16Mma{}, std::true_type{})
                                    : each(Fp16Mma{}, std::false_type{});
}

}  // namespace

int64_t block_attention_bytes(const BlockAttention& c) {
  if (!takes(c)) {
    return -1;
  }
  const AttentionLaunch a = launch_for(c);
  const bool fits = with_kind(
      c, [&](auto kind, auto fp8) { return with_shape<decltype(kind), decltype(fp8)::value>(a, [](auto) {}); });
  return !fits ? -1 : a.chunks == 1 ? 0 : a.batch * a.heads * a.chunks * a.query_rows * (a.dim + 2) * 4;
}

const char* block_attention(const BlockAttention& c, void* scratch, void* stream) {
  AttentionLaunch a = launch_for(c);
  const int64_t rows = a.batch * a.heads * a.chunks * a.query_rows;
  a.sums = static_cast<float*>(scratch);
  a.totals = a.sums + rows * a.dim;
  a.tops = a.totals + rows;
  const char* error = with_kind(
      c, [&](auto kind, auto fp8) { return launch_attention<decltype(kind), decltype(fp8)::value>(a, stream); });
  if (error != nullptr || a.chunks == 1) {
    return error;
  }
  const int64_t items = a.batch * a.heads * a.query_rows * ((a.dim + 3) / 4);
  return launch(block_attention_combine_kernel, (items + kCombineThreads - 1) / kCombineThreads, kCombineThreads,
                stream, a);
}

}  // namespace dmtp::cuda
