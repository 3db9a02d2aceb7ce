#pragma once

#include "cuda/attention_tile.cuh"

// Rows of q, keys and values from global to shared memory.
namespace dmtp::cuda {

// Where a row of a tile lies: page -1, nowhere, and nobody sees it.
struct Place {
  int page, offset;
};

// A tile of keys: of the block, from its row `first` on, or of the context, from position `first` on.
struct Keys {
  bool block;
  int first;
};

// The place of row i of a tile.
__device__ inline Place place_of(const AttentionLaunch& a, const Request& r, const Span& span, int64_t b,
                                 const Keys& keys, int i) {
  int position = keys.first + i;
  if (keys.block) {
    if (position >= r.length) {
      return {-1, 0};
    }
    if (given(a.call.block_k)) {
      return {0, position};
    }
    position += r.ctx;
  } else if (position < r.low || position >= span.end) {
    return {-1, 0};
  }
  const auto at = static_cast<unsigned>(position), size = static_cast<unsigned>(a.page_size), column = at / size;
  const Tensor& table = a.call.page_table;
  const int64_t page = index_at(table, b * table.stride[0] + static_cast<int64_t>(column) * table.stride[1]);
  const bool mapped = page >= 0 && page < a.pages;
  return {mapped ? static_cast<int>(page) : -1, static_cast<int>(at - column * size)};
}

// Keys and values of the cache, then of the block.
__device__ inline RowsOfKeys source_of(const AttentionLaunch& a, int which, int64_t b, int head) {
  const BlockAttention& c = a.call;
  const bool block = which >= 2;
  const Tensor& t = block ? (which == 2 ? c.block_k : c.block_v) : which == 0 ? c.k_cache : c.v_cache;
  const int64_t item = size_of(t.dtype), first = head * t.stride[2] + (block ? b * t.stride[0] : 0);
  return {static_cast<const char*>(t.data) + first * item, block ? 0 : t.stride[0] * item, t.stride[1] * item};
}

// `count` bytes, of which 16 lie in a piece, or as many as there are; zeros behind them.
__device__ inline void copy_piece(void* to, const char* from, int count, bool aligned) {
  if (aligned) {
    copy_async(to, from, count);
    return;
  }
#pragma unroll 1
  for (int byte = 0; byte < 16; ++byte) {
    static_cast<char*>(to)[byte] = byte < count ? load_global(from + byte) : 0;
  }
}

__device__ inline int bytes_of_piece(int row_bytes, int piece) {
  const int left = row_bytes - 16 * piece;
  return left < 0 ? 0 : left < 16 ? left : 16;
}

// The rows of a tile as they are in memory: 16-bit and 32-bit elements lie as products read them, bytes in order.
template <class S, bool kRaw>
__device__ void copy_tile(char* to, const RowsOfKeys& source, const Place* places, int row_bytes, bool aligned) {
  constexpr int kPieces = kRaw ? S::kDim / 16 : S::kPieces;
  // from shared memory: in registers all sources would stay there from tile to tile, and spill
  const RowsOfKeys from = source;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < S::kKeys * kPieces; i += S::kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const Place place = places[row];
    const int count = place.page < 0 ? 0 : bytes_of_piece(row_bytes, piece);
    const char* at = count == 0 ? from.data : from.data + place.page * from.page + place.offset * from.row + piece * 16;
    copy_piece(kRaw ? to + i * 16 : piece_of<S>(to, row, piece), at, count, aligned);
  }
}

// Query rows of a block, zeros where there are none.
template <class S>
__device__ void copy_queries(const AttentionLaunch& a, char* to, int64_t b, int head, int first) {
  const Tensor& q = a.call.q;
  const int row_bytes = a.dim * S::kItem;
  for (int i = static_cast<int>(threadIdx.x); i < S::kRows * S::kPieces; i += S::kThreads) {
    const int row = i / S::kPieces, piece = i % S::kPieces, number = first + row;
    const int count = number < a.query_rows ? bytes_of_piece(row_bytes, piece) : 0;
    const int slot = number / a.group;
    const int64_t at = b * q.stride[0] + slot * q.stride[1] + (head * a.group + number - slot * a.group) * q.stride[2];
    const char* data = static_cast<const char*>(q.data);
    copy_piece(piece_of<S>(to, row, piece), count == 0 ? data : data + at * S::kItem + piece * 16, count,
               a.query_aligned);
  }
}

#ifdef DMTP_CUDA_HOST
// Two fp8 codes as 16-bit elements, exactly.
template <class Kind>
uint32_t widened(Kind kind, DType dtype, uint32_t two) {
  const auto one = [&](uint32_t code) {
    if (dtype == DType::f8e5m2) {
      return from_fp16(static_cast<uint16_t>(code << 8));
    }
    const float sign = code & 0x80 ? -1.0f : 1.0f, fraction = static_cast<float>(code & 7);
    const int exponent = static_cast<int>(code >> 3 & 15);
    return (code & 0x7f) == 0x7f ? NAN
           : exponent == 0       ? sign * fraction * 0x1p-9f
                                 : sign * std::ldexp(8 + fraction, exponent - 10);
  };
  return packed(kind, one(two & 0xff), one(two >> 8 & 0xff));
}
#else
// Two fp8 codes as fp16: e5m2 is the upper half of one; of e4m3 the exponents are 8 smaller, and its greatest is NaN.
__device__ inline uint32_t half_of(DType dtype, uint32_t two) {
  const uint32_t upper = __byte_perm(two, 0, 0x1404);
  if (dtype == DType::f8e5m2) {
    return upper;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t both;
  asm("{ .reg .b16 x; cvt.u16.u32 x, %1; cvt.rn.f16x2.e4m3x2 %0, x; }" : "=r"(both) : "r"(two));
  return both;
#else
  uint32_t both = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1;
  uint32_t scaled;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(both), "r"(0x5c005c00u));
  scaled |= (upper & 0x7f00u) == 0x7f00u ? 0x7fffu : 0;
  return scaled | ((upper & 0x7f000000u) == 0x7f000000u ? 0x7fff0000u : 0);
#endif
}
__device__ inline uint32_t widened(Fp16Mma, DType dtype, uint32_t two) {
  return half_of(dtype, two);
}
__device__ inline uint32_t widened(Bf16Mma kind, DType dtype, uint32_t two) {
  float low, high;
  asm("{ .reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y; }"
      : "=f"(low), "=f"(high)
      : "r"(half_of(dtype, two)));
  return packed(kind, low, high);
}
#endif

// A tile of fp8 codes as products read it.
template <class S>
__device__ void widen_tile(char* to, const char* codes, DType dtype) {
  constexpr int kPieces = S::kDim / 16;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < S::kKeys * kPieces; i += S::kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const uint4 raw = reinterpret_cast<const uint4*>(codes)[i];
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      // every other four lanes begin with the second half: eight of them are in all banks
      const int half = turn ^ (piece / 4 % 2);
      const uint32_t a = half == 0 ? raw.x : raw.z, b = half == 0 ? raw.y : raw.w;
      typename S::Kind kind;
      *reinterpret_cast<uint4*>(piece_of<S>(to, row, 2 * piece + half)) = {
          widened(kind, dtype, a & 0xffff), widened(kind, dtype, a >> 16), widened(kind, dtype, b & 0xffff),
          widened(kind, dtype, b >> 16)};
    }
  }
}

}  // namespace dmtp::cuda
