#pragma once

#include "cuda/emit.cuh"
#include "cuda/row_cut.cuh"

// What the kernels of the sampled rules share: their memory, a request's limits, the distributions of a row.
namespace dmtp::cuda {

enum AcceptStatus : int32_t { kNanLogits = 1, kUndecided = 2, kBadParameter = 4, kBadDraft = 8 };

// Of a part of a verify row: the largest logit and its lowest id, the masses against it, sums of the draft's row.
struct RowPart {
  double top, mass, draft, surplus;
  int64_t first, nan;
};

// Of a verify row: `p` and `q` are those of the candidate it judges, `ratio` is the product P of those before it.
struct RowState {
  double top, total, draft, p, q, ratio;
  int64_t best;
  int32_t flags, usable;
};

struct RequestState {
  double scale;
  int64_t kept, usable, token;
  int32_t flags, refused;
};

// Of a part of the row after the accepted prefix: winners over the residual, and over the target where there is none.
struct RacePart {
  Best residual, target;
};

struct Verify {
  AcceptSampled args;
  int64_t rows, parts, vocab;
  Cut* cuts;  // [B, R], or null
  RowState* states;
  double* surpluses;  // [B, R]: the sums S of block verification
  RowPart* row_parts;
  RequestState* requests;
  RacePart* races;
  int* counters;  // [B]
};

struct Request {
  double temperature;
  int64_t limit;
  bool given, good;

  __device__ bool live() const { return given && good; }
  __device__ bool sampled() const { return live() && temperature > 0; }
};

__device__ inline Request request_of(const AcceptSampled& args, int64_t b) {
  const Tensor &t = args.temperature, &p = args.top_p;
  const double temperature = load_as<double>(t.dtype, t.data, b * t.stride[0]);
  const double top_p = dmtp::cuda::given(p) ? load_as<double>(p.dtype, p.data, b * p.stride[0]) : 1.0;
  const int64_t limit = limit_of(args.num_candidates, b, args.candidates.size[1] - 1);
  const bool good = temperature >= 0 && temperature < kInfinity && (top_p == top_p || temperature == 0);
  return {temperature, limit, limit >= 0 && index_of(args.emission.budget, b) > 0, good};
}

// Row j of request b of a tensor of three dimensions.
__device__ inline const void* row_at(const Tensor& t, int64_t b, int64_t j) {
  return static_cast<const char*>(t.data) + (b * t.stride[0] + j * t.stride[1]) * size_of(t.dtype);
}

// The candidate that row j judges.
__device__ inline int64_t drawn_at(const AcceptSampled& args, int64_t b, int64_t j) {
  return index_at(args.candidates, b * args.candidates.stride[0] + (j + 1) * args.candidates.stride[1]);
}

// -1 where there is none: behind the limit, or outside the vocabulary.
__device__ inline int64_t proposed_at(const Verify& call, const Request& request, int64_t b, int64_t j) {
  const int64_t drawn = j < request.limit ? drawn_at(call.args, b, j) : -1;
  return drawn < call.vocab ? drawn : -1;
}

__device__ inline DrawKey draw_of(const AcceptSampled& args, int64_t b, Stream stream) {
  return {index_of(args.seed, b), index_of(args.position, b), stream};
}

// exp((x - top) / temperature) of eight entries of row j, 0 for what the cut drops; the row has no NaN.
__device__ inline void masses(const Verify& call, int64_t b, int64_t j, const Divisor& temperature, double top,
                              int64_t first, const double* x, double* mass) {
  const DType dtype = call.args.target_logits.dtype;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const bool kept = call.cuts == nullptr || keeps(call.cuts[b * call.rows + j], dtype, x[i], first + i);
    mass[i] = kept ? exp_of(log_weight(x[i], top, temperature)) : 0.0;
  }
}

// p of eight entries of row j.
__device__ inline void target_entries(const Verify& call, int64_t b, int64_t j, const Divisor& temperature,
                                      int64_t first, double* p) {
  const Tensor& logits = call.args.target_logits;
  const RowState& row = call.states[b * call.rows + j];
  double x[kEntries];
  load_logits(logits.dtype, row_at(logits, b, j), first, call.vocab, x);
  masses(call, b, j, temperature, row.top, first, x, p);
  const Divisor total(row.total);
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    p[i] = total.under(p[i]);
  }
}

// q of eight entries of row j, a thread's part of the 256 of its warp: all lanes call it.
__device__ inline void draft_entries(const Verify& call, int64_t b, int64_t j, int64_t first, double* q) {
  const Tensor &probs = call.args.draft_probs, &ids = call.args.draft_ids;
  if (!given(probs)) {
    const int64_t drawn = drawn_at(call.args, b, j);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      q[i] = first + i == drawn;
    }
    return;
  }
  const void* row = row_at(probs, b, j);
  if (!given(ids)) {
    load_entries(probs.dtype, row, first, call.vocab, 0.0, q);
  } else {
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      q[i] = 0;
    }
    const int64_t start = first - lane_index() * kEntries, listed = b * ids.stride[0] + j * ids.stride[1];
    for (int64_t from = 0; from < ids.size[2]; from += kLanes) {
      const int64_t entry = from + lane_index(), id = entry < ids.size[2] ? index_at(ids, listed + entry) : -1;
      const bool inside = id >= start && id < start + kLanes * kEntries;
      const double prob = inside ? load_as<double>(probs.dtype, row, entry) : 0.0;
      // few of a list: one after the other, in the list's order
      for (uint32_t hits = __ballot_sync(kAllLanes, inside); hits != 0; hits &= hits - 1) {
        const int lane = __ffs(static_cast<int>(hits)) - 1;
        const int64_t at = __shfl_sync(kAllLanes, static_cast<long long>(id), lane) - first;
        const double value = __shfl_sync(kAllLanes, prob, lane);
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          q[i] = q[i] + (at == i ? value : 0.0);
        }
      }
    }
  }
  const Divisor total(call.states[b * call.rows + j].draft);
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    q[i] = total.under(q[i]);
  }
}

// What each warp of a block adds up, in shared memory; used once.
struct Totals {
  double a[32], b[32];
};

// The sums of all threads, in all of them.
__device__ inline void block_sum(double& a, double& b, Totals& room) {
  a = warp_sum(a);
  b = warp_sum(b);
  if (lane_index() == 0) {
    room.a[warp_index()] = a;
    room.b[warp_index()] = b;
  }
  __syncthreads();
  a = room.a[0];
  b = room.b[0];
  for (int warp = 1; warp < warps_of_block(); ++warp) {
    a = a + room.a[warp];
    b = b + room.b[warp];
  }
}

}  // namespace dmtp::cuda
