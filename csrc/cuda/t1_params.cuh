#pragma once

#include "cuda/convert.cuh"
#include "cuda/grid.cuh"
#include "dmtp/t1_prep.h"

// What the phases of T1 preparation read, and the memory through which they hand on to each other.
namespace dmtp::cuda {

constexpr int kPrepWarps = 4, kPrepThreads = kPrepWarps * kLanes;
constexpr int kPrepBlocks = 3;   // of a processor: 72 KB of rows on their way; more would spill
constexpr int kTileRows = 16;    // rows of a matrix that a warp multiplies at once, and that share one upper end
constexpr int kTileStates = 8;   // requests that one matrix instruction takes
constexpr int kMostStates = 16;  // requests of one launch
constexpr int kChunk = 128;      // bytes of a row that are staged at once

// Elements of fp32, fp16 and bf16 memory.
__device__ inline float load_float(DType dtype, const void* from, int64_t i) {
  if (dtype == DType::f32) {
    return static_cast<const float*>(from)[i];
  }
  const uint16_t half = static_cast<const uint16_t*>(from)[i];
  return dtype == DType::bf16 ? from_bf16(half) : from_fp16(half);
}

__device__ inline void store_float(DType dtype, void* to, int64_t i, float x) {
  if (dtype == DType::f32) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] = dtype == DType::bf16 ? to_bf16(x) : to_fp16(x);
  }
}

__device__ inline float rounded_to(DType dtype, float x) {
  return dtype == DType::f32 ? x : dtype == DType::bf16 ? from_bf16(to_bf16(x)) : from_fp16(to_fp16(x));
}

// How a matrix is multiplied: with fp32 FMAs, or by tensor cores with states as bf16, fp16, three bf16 that add up to
// an fp32, or three int8 digits.
enum class Multiply : int8_t { plain, bf16, fp16, parts, digits };

__host__ __device__ constexpr int planes_of(Multiply how) {
  return how == Multiply::parts || how == Multiply::digits ? 3 : 1;
}

// Vectors of all requests as products with rows of `item` bytes an element read them, zeros behind them up to whole
// chunks. Plain: fp32 [states / 8, padded, 8]. Else fragments of mma: 8 bytes a lane, [states / 8, steps, planes, 32].
struct Operand {
  char* data;
  int64_t padded;
  int item;
  Multiply how;
};

__host__ __device__ inline int64_t operand_bytes(const Operand& o, int64_t states) {
  const int64_t tiles = (states + kTileStates - 1) / kTileStates;
  return o.how == Multiply::plain ? tiles * o.padded * kTileStates * 4
                                  : tiles * (o.padded * o.item / 32) * planes_of(o.how) * kLanes * 8;
}

// Where element k of request b is in a plane of fragments.
__device__ inline char* fragment_at(const Operand& o, int64_t b, int64_t k, int plane) {
  const int64_t byte = k * o.item, steps = o.padded * o.item / 32;
  const int64_t block = ((b / kTileStates * steps + byte / 32) * planes_of(o.how) + plane) * kLanes;
  const int64_t lane = b % kTileStates * 4 + byte % 16 / 4;
  return o.data + (block + lane) * 8 + byte % 32 / 16 * 4 + byte % 4;
}

__device__ inline void put(const Operand& o, int64_t b, int64_t k, float x) {
  if (o.how == Multiply::plain) {
    reinterpret_cast<float*>(o.data)[(b / kTileStates * o.padded + k) * kTileStates + b % kTileStates] = x;
  } else if (o.how == Multiply::fp16) {
    *reinterpret_cast<uint16_t*>(fragment_at(o, b, k, 0)) = to_fp16(x);
  } else {
    // cut, not rounded: what is cut off is exact, and nothing grows to infinity
#pragma unroll 1
    for (int plane = 0; plane < planes_of(o.how); ++plane) {
      const uint32_t bits = bits_as<uint32_t>(x) & 0xffff0000;
      *reinterpret_cast<uint16_t*>(fragment_at(o, b, k, plane)) = static_cast<uint16_t>(bits >> 16);
      x -= bits_as<float>(bits);
    }
  }
}

// Rows of a matrix in memory.
struct Rows {
  const char* first;
  int64_t stride, bytes;  // from row to row, and of a row
  int64_t count;
  bool aligned;  // each starts at a multiple of 16 bytes
};

// One launch, or one chain of launches, for up to `kMostStates` requests.
struct T1Launch {
  T1Prep prep;
  LMHead head;
  Tensor h_mtp;  // [B, H] what the head reads
  bool select, scan, bf16_logits, keys;
  int64_t batch, width, slots, groups;

  Rows screen_rows, first_rows, up_rows;
  Operand states, streams, low;  // of the screen, of the first matrix, of `up`

  float* wide;          // [B, H rounded up to 256] the states in fp32
  int64_t wide_stride;  // elements
  float* length;        // [B] no less than the 2-norm of each state
  float* step;          // [B] the unit of its digits, NaN where it has none
  int32_t* best;        // [B] greatest lower end, ordered as the float
  int32_t* upper;       // [B, groups] greatest upper end of 16 rows
  long long* key;       // [B]
  int32_t* finite;      // [B] whether the mean square of the hidden state is
  GridBarrier* barrier;
};

}  // namespace dmtp::cuda
