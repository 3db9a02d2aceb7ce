#pragma once

#include "cuda/draws.cuh"

// Rows of logits cut into parts of a block each: 16-byte loads, the order of entries, reductions over a block.
namespace dmtp::cuda {

constexpr int kEntries = 8;                            // of a row that one thread takes
constexpr int kPartThreads = 256;                      // at most
constexpr int64_t kColumns = kPartThreads * kEntries;  // of a part

// not measured: eight entries a thread; 151,936 entries of 8 rows are 600 blocks, eight of which a processor holds
inline int64_t parts_of(int64_t columns) {
  return (columns + kColumns - 1) / kColumns;
}

// Of a block that takes up to `most` threads of a row.
inline int threads_for(int64_t columns, int most) {
  const int64_t threads = (columns + kEntries - 1) / kEntries;
  return static_cast<int>(threads >= most ? most : (threads + kLanes - 1) / kLanes * kLanes);
}

template <int kWords>
__device__ inline void load_words(const void* from, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint4 four = static_cast<const uint4*>(from)[i];
    words[4 * i] = four.x;
    words[4 * i + 1] = four.y;
    words[4 * i + 2] = four.z;
    words[4 * i + 3] = four.w;
  }
}

// Entries first .. first + 7 of a row; those from `end` on are not read, `fill` stands for them.
__device__ inline void load_entries(DType dtype, const void* row, int64_t first, int64_t end, double fill,
                                    double* out) {
  const char* from = static_cast<const char*>(row) + first * size_of(dtype);
  if (first + kEntries <= end && (reinterpret_cast<uintptr_t>(from) & 15) == 0) {
    uint32_t words[2 * kEntries];
    if (dtype == DType::f64) {
      load_words<4>(from, words);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        out[i] = bits_as<double>(static_cast<uint64_t>(words[2 * i + 1]) << 32 | words[2 * i]);
      }
    } else if (dtype == DType::f32) {
      load_words<2>(from, words);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        out[i] = bits_as<float>(words[i]);
      }
    } else {
      load_words<1>(from, words);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const auto half = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
        out[i] = dtype == DType::bf16 ? from_bf16(half) : from_fp16(half);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    out[i] = first + i < end ? load_as<double>(dtype, row, first + i) : fill;
  }
}

// As `load_entries`, with -inf for NaN; true where one is NaN.
__device__ inline bool load_logits(DType dtype, const void* row, int64_t first, int64_t end, double* out) {
  load_entries(dtype, row, first, end, -kInfinity, out);
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    nan |= out[i] != out[i];
    out[i] = out[i] != out[i] ? -kInfinity : out[i];
  }
  return nan;
}

// (x - top) / temperature: 0 at the top.
__device__ inline double log_weight(double x, double top, const Divisor& temperature) {
  return x == top ? 0.0 : temperature.under(x - top);
}

__device__ __host__ inline int key_bits(DType dtype) {
  return dtype == DType::f64 ? 64 : 32;
}

// Orders like the logit, which is not NaN; -0 counts as 0.
__device__ inline uint64_t key_of(DType dtype, double x) {
  if (dtype == DType::f64) {
    const uint64_t bits = bits_as<uint64_t>(x == 0 ? 0.0 : x);
    return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
  }
  const uint32_t bits = bits_as<uint32_t>(x == 0 ? 0.0f : static_cast<float>(x));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline double of_key(DType dtype, uint64_t key) {
  if (dtype == DType::f64) {
    return bits_as<double>(key >> 63 ? key ^ uint64_t{1} << 63 : ~key);
  }
  const auto low = static_cast<uint32_t>(key);
  return bits_as<float>(low >> 31 ? low ^ 0x80000000u : ~low);
}

constexpr int64_t kEveryId = int64_t{1} << 62;

// What the filters keep of a row: greater keys, and of this key the ids up to this.
struct Cut {
  uint64_t key;
  int64_t id;
};

__device__ inline bool keeps(const Cut& cut, DType dtype, double x, int64_t id) {
  const uint64_t key = key_of(dtype, x);
  return key > cut.key || (key == cut.key && id <= cut.id);
}

// The lowest id of the largest score; no id yet: -1.
struct Best {
  double score;
  int64_t id;
};

__device__ inline Best nobody() {
  return {-kInfinity, -1};
}

__device__ inline Best better(const Best& a, const Best& b) {
  const bool second =
      b.score > a.score || (b.score == a.score && static_cast<uint64_t>(b.id) < static_cast<uint64_t>(a.id));
  return second ? b : a;
}

__device__ inline Best warp_best(Best best) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const double score = __shfl_xor_sync(kAllLanes, best.score, step);
    const long long id = __shfl_xor_sync(kAllLanes, static_cast<long long>(best.id), step);
    best = better(best, {score, id});
  }
  return best;
}

// The same in all lanes: both sides of each sum are the same two.
__device__ inline double warp_sum(double x) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    x = x + __shfl_xor_sync(kAllLanes, x, step);
  }
  return x;
}

// Block x of a grid in rows of `count`; 64-bit quotients are calls.
struct Place {
  int64_t row, at;
};

__device__ inline Place place_of(int64_t x, int64_t count) {
  const auto of = static_cast<uint32_t>(x), by = static_cast<uint32_t>(count);
  return {of / by, of % by};
}

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % kLanes;
}

__device__ inline int warp_index() {
  return static_cast<int>(threadIdx.x) / kLanes;
}

__device__ inline int warps_of_block() {
  return static_cast<int>(blockDim.x) / kLanes;
}

// Which share of a block's work a warp takes: the first warp, which goes on with the results, takes the last one.
__device__ inline int share_of_warp() {
  return warps_of_block() - 1 - warp_index();
}

// What each warp of a block found, in shared memory; used once.
struct Bests {
  Best of[32];
  uint32_t flags[32];
};

// The best of all threads, in all of them; `flag` becomes whether any had it.
__device__ inline Best block_best(Best mine, bool& flag, Bests& room) {
  mine = warp_best(mine);
  const uint32_t flags = __ballot_sync(kAllLanes, flag);
  if (lane_index() == 0) {
    room.of[warp_index()] = mine;
    room.flags[warp_index()] = flags;
  }
  __syncthreads();
  Best best = room.of[0];
  uint32_t any = room.flags[0];
  for (int warp = 1; warp < warps_of_block(); ++warp) {
    best = better(best, room.of[warp]);
    any |= room.flags[warp];
  }
  flag = any != 0;
  return best;
}

// Whether this is the last of `count` blocks that come to a counter, which then is 0 again; all threads of a block call
// it, and what thread 0 of each has written is seen by all of the last. Starts from 0.
__device__ inline bool last_to_come(int* counter, int64_t count, int& room) {
  if (threadIdx.x == 0) {
    __threadfence();
    room = atomicAdd(counter, 1) + 1 == count;
    if (room != 0) {
      *counter = 0;
      __threadfence();
    }
  }
  __syncthreads();
  return room != 0;
}

}  // namespace dmtp::cuda
