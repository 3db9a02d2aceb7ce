#include "cuda/launchers.h"
#include "cuda/row_cut.cuh"

namespace dmtp::cuda {
namespace {

enum Status : int32_t { kNanIgnored = 1, kNothingToChoose = 2, kBadParameter = 4 };

// No winner scores less: the largest entry has weight 0 and the largest exponential is 33 log 2.
constexpr float kLeastScore = -3.2f;
// What the errors of fp32 weights above -26 and of gumbel_bound stay below.
constexpr float kMargin = 1e-3f;

// What a block leaves of its part of a row: the largest entry, its lowest id, the winner of the race, whether one is
// NaN.
struct Part {
  double top;
  int64_t first, winner, nan;
};

struct Row {
  const void* logits;
  double temperature;
  DrawKey draw;
  bool bad;

  __device__ bool sampled(double top) const {
    return temperature > 0 && temperature < kInfinity && top > -kInfinity && top < kInfinity;
  }
};

__device__ double float_of(const Tensor& t, int64_t row) {
  return load_as<double>(t.dtype, t.data, row * t.stride[0]);
}

__device__ Row row_at(const SampleRows& args, int64_t row) {
  const double temperature = float_of(args.temperature, row);
  const double top_p = given(args.top_p) ? float_of(args.top_p, row) : 1.0;
  const bool bad = !(temperature >= 0) || temperature == kInfinity || (top_p != top_p && temperature != 0);
  const int64_t at = row * args.logits.stride[0] * size_of(args.logits.dtype);
  return {static_cast<const char*>(args.logits.data) + at,
          temperature,
          {index_of(args.seed, row), index_of(args.position, row), args.stream},
          bad};
}

__device__ void write(const SampleRows& args, int64_t row, bool bad, double top, bool nan, int64_t token) {
  const bool empty = top == -kInfinity;
  *row_of<int64_t>(args.token, row) = empty || bad ? -1 : token;
  *row_of<int32_t>(args.status, row) =
      (nan ? kNanIgnored : 0) + (empty ? kNothingToChoose : 0) + (bad ? kBadParameter : 0);
}

// The best of a thread's entries by (x - top) / temperature - log E among those the cut keeps. fp32 bounds rule out all
// but a few, which float64 decides.
__device__ Best race(const Row& row, const Divisor& divisor, DType dtype, const double* x, int64_t first, int64_t end,
                     double top, const Cut& cut) {
  const bool screened = row.temperature > 1e-30 && row.temperature < 1e30;
  const float scale = screened ? static_cast<float>(divisor.inverse) : 0.0f;
  float bar = kLeastScore - kMargin;
  Best best = nobody();
#pragma unroll
  for (int quarter = 0; quarter < kEntries / 4; ++quarter) {
    uint32_t words[4];
    philox(row.draw, static_cast<uint32_t>(first / 4 + quarter), words);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = 4 * quarter + k;
      const float bound = static_cast<float>(x[i] - top) * scale + gumbel_bound(words[k]);
      if (first + i >= end || (screened && !(bound >= bar)) || !keeps(cut, dtype, x[i], first + i)) {
        continue;
      }
      const double score = log_weight(x[i], top, divisor) + gumbel_of(words[k]);
      if (score > best.score) {
        best = {score, first + i};
        const float least = static_cast<float>(score) - kMargin;
        bar = bar > least ? bar : least;
      }
    }
  }
  return best;
}

// A block takes a part of a row, which is read once: 7.9 MB for 8 fp32 rows of 248,320 entries are the floor, and 32
// bytes a part (time: not measured). The last block of a row decides between the winners of its parts.
__global__ void __launch_bounds__(kPartThreads)
    sample_race_kernel(const SampleRows args, const Cut* cuts, int64_t parts, Part* left, int* counters) {
  DMTP_SHARED(Bests, tops);
  DMTP_SHARED(Bests, winners);
  DMTP_SHARED(Bests, parts_tops);
  DMTP_SHARED(Bests, parts_winners);
  DMTP_SHARED(int, last);
  const Place place = place_of(blockIdx.x, parts);
  const int64_t r = place.row;
  const DType dtype = args.logits.dtype;
  const Row row = row_at(args, r);
  const Divisor divisor(row.temperature);
  const int64_t first = place.at * kColumns + threadIdx.x * kEntries, end = args.num_valid;
  double x[kEntries];
  bool nan = load_logits(dtype, row.logits, first, end, x);
  Best top = nobody();
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    top = first + i < end ? better(top, {x[i], first + i}) : top;
  }
  top = block_best(top, nan, tops);
  int64_t winner = top.id;
  bool unused = false;
  if (row.sampled(top.score)) {
    const Cut cut = cuts != nullptr ? cuts[r] : Cut{0, kEveryId};
    winner = block_best(race(row, divisor, dtype, x, first, end, top.score, cut), unused, winners).id;
  }
  if (parts == 1) {
    if (threadIdx.x == 0) {
      write(args, r, row.bad, top.score, nan, winner);
    }
    return;
  }
  if (threadIdx.x == 0) {
    left[blockIdx.x] = {top.score, top.id, winner, nan};
  }
  if (!last_to_come(counters + r, parts, last)) {
    return;
  }
  const Part* all = left + r * parts;
  Best highest = nobody();
  nan = false;
  for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) {
    highest = better(highest, {all[i].top, all[i].first});
    nan |= all[i].nan != 0;
  }
  highest = block_best(highest, nan, parts_tops);
  int64_t token = highest.id;
  if (row.sampled(highest.score)) {
    Best best = nobody();
    for (int64_t i = threadIdx.x; i < parts; i += blockDim.x) {
      const int64_t id = all[i].winner;
      if (id >= 0 && all[i].top > -kInfinity) {
        const double weight = log_weight(load_as<double>(dtype, row.logits, id), highest.score, divisor);
        best = better(best, {weight + gumbel_of(word_at(row.draw, id)), id});
      }
    }
    token = block_best(best, unused, parts_winners).id;
  }
  if (threadIdx.x == 0) {
    write(args, r, row.bad, highest.score, nan, token);
  }
}

}  // namespace

const char* sample_rows(const Scratched<SampleRows>& call, void* stream) {
  const SampleRows& args = call.args;
  const int64_t rows = args.logits.size[0], parts = parts_of(args.num_valid);
  if (rows == 0) {
    return nullptr;
  }
  const bool filtered = static_cast<bool>(args.top_k) || static_cast<bool>(args.top_p);
  auto* cuts = static_cast<Cut*>(call.memory);
  auto* left = reinterpret_cast<Part*>(cuts + rows);
  if (call.bytes < rows * static_cast<int64_t>(sizeof(Cut) + parts * sizeof(Part)) || call.count < rows) {
    return "too little memory was given";
  }
  if (filtered) {
    CutRows search{args.logits, args.temperature, args.top_k, args.top_p, 1, args.num_valid, 0, cuts};
    const char* error = row_cuts(search, rows, stream);
    if (error != nullptr) {
      return error;
    }
  }
  return launch(sample_race_kernel, rows * parts, threads_for(args.num_valid, kPartThreads), stream, args,
                filtered ? cuts : nullptr, parts, left, call.counters);
}

}  // namespace dmtp::cuda
