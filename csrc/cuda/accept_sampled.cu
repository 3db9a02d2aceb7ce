#include "cuda/accept_decide.cuh"
#include "cuda/launchers.h"

namespace dmtp::cuda {
namespace {

// The best of a thread's entries by log weight - log E.
__device__ Best race(const double* weight, int64_t first, const DrawKey& draw) {
  constexpr double kMargin = 1e-3;  // relative, over the rounding of bounds
  double bar = 0;
  Best best = nobody();
#pragma unroll
  for (int quarter = 0; quarter < kEntries / 4; ++quarter) {
    uint32_t words[4];
    philox(draw, static_cast<uint32_t>(first / 4 + quarter), words);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = 4 * quarter + k;
      // E is at least u: nothing scores above log(weight / u)
      if (!(weight[i] > 0 && weight[i] >= bar * uniform_of(words[k]))) {
        continue;
      }
      const double score = log_of(weight[i]) + gumbel_of(words[k]);
      if (score > best.score) {
        best = {score, first + i};
        bar = score < 0 ? exp_of(score) * (1 - kMargin) : 1 - kMargin;
      }
    }
  }
  return best;
}

// A block takes a part of a verify row and of its draft, which are read once: 14.9 MB for 8 fp32 rows of 248,320 and
// their 7 drafts are the floor (time: not measured). The last block of a request decides.
__global__ void __launch_bounds__(kPartThreads, 2) accept_rows_kernel(const Verify call) {
  DMTP_SHARED(Bests, tops);
  DMTP_SHARED(Totals, totals);
  DMTP_SHARED(int, last);
  const Tensor &logits = call.args.target_logits, &probs = call.args.draft_probs;
  const Place row = place_of(blockIdx.x, call.parts), place = place_of(row.row, call.rows);
  const int64_t b = place.row, j = place.at, part = row.at;
  const Request request = request_of(call.args, b);
  if (request.live() && j <= request.limit) {
    const int64_t first = part * kColumns + threadIdx.x * kEntries;
    double x[kEntries], each[kEntries];
    bool nan = load_logits(logits.dtype, row_at(logits, b, j), first, call.vocab, x);
    Best top = nobody();
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      top = first + i < call.vocab ? better(top, {x[i], first + i}) : top;
    }
    top = block_best(top, nan, tops);
    double mass = 0, draft = 0;
    bool bad = false;
    if (request.temperature > 0) {
      if (top.score > -kInfinity && top.score < kInfinity) {
        masses(call, b, j, Divisor(request.temperature), top.score, first, x, each);
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          mass = mass + each[i];
        }
      }
      if (given(probs) && !given(call.args.draft_ids) && proposed_at(call, request, b, j) >= 0) {
        load_entries(probs.dtype, row_at(probs, b, j), first, call.vocab, 0.0, each);
#pragma unroll
        for (int i = 0; i < kEntries; ++i) {
          draft = draft + each[i];
          bad |= each[i] < 0;
        }
      }
      // one below 0 is no distribution, nor is a sum of -inf or NaN
      draft = bad ? -kInfinity : draft;
      block_sum(mass, draft, totals);
    }
    if (threadIdx.x == 0) {
      call.row_parts[blockIdx.x] = {top.score, mass, draft, 0, top.id, nan};
    }
  }
  if (last_to_come(call.counters + b, call.rows * call.parts, last)) {
    decide(call, request, b);
  }
}

// Block verification: a block takes a part of a row 1..K-1, of the sum of max(P p - q, 0); the last of a request keeps
// the longest prefix.
__global__ void __launch_bounds__(kPartThreads, 2) accept_surplus_kernel(const Verify call) {
  DMTP_SHARED(Totals, totals);
  DMTP_SHARED(int, last);
  const Place row = place_of(blockIdx.x, call.parts), place = place_of(row.row, call.rows - 2);
  const int64_t b = place.row, j = place.at + 1, part = row.at;
  const Request request = request_of(call.args, b);
  const int64_t usable = request.sampled() ? call.requests[b].usable : 0;
  if (j < usable) {
    const int64_t first = part * kColumns + threadIdx.x * kEntries;
    const double ratio = call.states[b * call.rows + j].ratio;
    double p[kEntries], q[kEntries], surplus = 0, unused = 0;
    target_entries(call, b, j, Divisor(request.temperature), first, p);
    draft_entries(call, b, j, first, q);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const double above = ratio * p[i] - q[i];
      surplus = surplus + (above > 0 ? above : 0.0);
    }
    block_sum(surplus, unused, totals);
    if (threadIdx.x == 0) {
      call.row_parts[(b * call.rows + j) * call.parts + part].surplus = surplus;
    }
  }
  if (!last_to_come(call.counters + b, (call.rows - 2) * call.parts, last) || !request.sampled()) {
    return;
  }
  for (int64_t i = share_of_warp() + 1; i < usable; i += warps_of_block()) {
    const RowPart* parts = call.row_parts + (b * call.rows + i) * call.parts;
    double surplus = 0;
    for (int64_t k = lane_index(); k < call.parts; k += kLanes) {
      surplus = surplus + parts[k].surplus;
    }
    surplus = warp_sum(surplus);
    if (lane_index() == 0) {
      call.surpluses[b * call.rows + i] = surplus;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    keep_longest(call, b);
  }
}

// A block takes a part of the row after the accepted prefix: who wins the residual, or the target if none was refused.
// The last block of a request cuts what it emits.
__global__ void __launch_bounds__(kPartThreads, 2) accept_race_kernel(const Verify call) {
  DMTP_SHARED(Bests, residuals);
  DMTP_SHARED(Bests, targets);
  DMTP_SHARED(Bests, all_residuals);
  DMTP_SHARED(Bests, all_targets);
  DMTP_SHARED(int, last);
  const Place place = place_of(blockIdx.x, call.parts);
  const int64_t b = place.row, part = place.at;
  const Request request = request_of(call.args, b);
  const RequestState state = call.requests[b];
  const bool raced = request.sampled() && (state.flags & kUndecided) == 0;
  bool unused = false;
  if (raced) {
    const DrawKey draw = draw_of(call.args, b, kResidualStream);
    const int64_t first = part * kColumns + threadIdx.x * kEntries;
    double p[kEntries];
    target_entries(call, b, state.kept, Divisor(request.temperature), first, p);
    Best residual = nobody(), target = nobody();
    if (state.refused != 0) {
      double weight[kEntries];
      draft_entries(call, b, state.kept, first, weight);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        weight[i] = state.scale * p[i] - weight[i];
      }
      residual = block_best(race(weight, first, draw), unused, residuals);
    }
    // rounding alone can refuse a candidate where p and q agree, and leave no residual in any part
    if (residual.id < 0) {
      target = block_best(race(p, first, draw), unused, targets);
    }
    if (threadIdx.x == 0) {
      call.races[blockIdx.x] = {residual, target};
    }
  }
  if (!last_to_come(call.counters + b, call.parts, last)) {
    return;
  }
  int64_t token = state.token;
  if (raced) {
    Best residual = nobody(), target = nobody();
    for (int64_t i = threadIdx.x; i < call.parts; i += blockDim.x) {
      residual = better(residual, call.races[b * call.parts + i].residual);
      target = better(target, call.races[b * call.parts + i].target);
    }
    token = block_best(residual, unused, all_residuals).id;
    if (token < 0) {
      token = block_best(target, unused, all_targets).id;
    }
  }
  if (warp_index() != 0) {
    return;
  }
  emit(call.args.emission, b, lane_index(), request.live(), state.kept,
       [&](int64_t j) { return j < state.kept ? drawn_at(call.args, b, j) : token; });
  if (lane_index() == 0) {
    *row_of<int32_t>(call.args.status, b) = state.flags;
  }
}

// Hands out what the kernels keep in a call's memory.
template <class T>
T* taken(char*& memory, int64_t count) {
  T* start = reinterpret_cast<T*>(memory);
  memory += count * static_cast<int64_t>(sizeof(T));
  return start;
}

}  // namespace

const char* accept_sampled(const Scratched<AcceptSampled>& given, void* stream) {
  const AcceptSampled& args = given.args;
  const Tensor& logits = args.target_logits;
  const int64_t batch = logits.size[0], rows = logits.size[1], vocab = logits.size[2], parts = parts_of(vocab);
  if (batch == 0) {
    return nullptr;
  }
  Verify call{};
  call.args = args;
  call.rows = rows;
  call.parts = parts;
  call.vocab = vocab;
  call.counters = given.counters;
  auto* const start = static_cast<char*>(given.memory);
  char* memory = start;
  call.requests = taken<RequestState>(memory, batch);
  call.states = taken<RowState>(memory, batch * rows);
  call.surpluses = taken<double>(memory, batch * rows);
  call.row_parts = taken<RowPart>(memory, batch * rows * parts);
  call.races = taken<RacePart>(memory, batch * parts);
  Cut* cuts = taken<Cut>(memory, batch * rows);
  if (given.bytes < memory - start || given.count < batch) {
    return "too little memory was given";
  }
  const int threads = threads_for(vocab, kPartThreads);
  const char* error = nullptr;
  if (args.top_k || args.top_p) {
    call.cuts = cuts;
    error = row_cuts({logits, args.temperature, args.top_k, args.top_p, rows, vocab, 0, cuts}, batch, stream);
  }
  if (error == nullptr) {
    error = launch(accept_rows_kernel, batch * rows * parts, threads, stream, call);
  }
  if (error == nullptr && args.block && rows > 2) {
    error = launch(accept_surplus_kernel, batch * (rows - 2) * parts, threads, stream, call);
  }
  return error != nullptr ? error : launch(accept_race_kernel, batch * parts, threads, stream, call);
}

}  // namespace dmtp::cuda
