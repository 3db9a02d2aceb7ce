#pragma once

#include "cuda/accept_rows.cuh"

// The decisions of one request, by one block.
namespace dmtp::cuda {

__device__ inline double uniform_at(const AcceptSampled& args, int64_t b, int64_t row) {
  return uniform_of(word_at(draw_of(args, b, kAcceptStream), row));
}

// Sums of a draft's row over its entries, and of those of one candidate; by one warp.
struct DraftRow {
  double total, of_drawn;
  bool bad;
};

__device__ inline DraftRow joined_draft(const Verify& call, int64_t b, int64_t j, int64_t drawn) {
  const Tensor &probs = call.args.draft_probs, &ids = call.args.draft_ids;
  if (!given(probs)) {
    return {1.0, 1.0, false};
  }
  DraftRow out{0, 0, false};
  const void* row = row_at(probs, b, j);
  if (!given(ids)) {
    const RowPart* parts = call.row_parts + (b * call.rows + j) * call.parts;
    for (int64_t i = lane_index(); i < call.parts; i += kLanes) {
      out.total = out.total + parts[i].draft;
    }
    out.of_drawn = load_as<double>(probs.dtype, row, drawn);
  } else {
    for (int64_t i = lane_index(); i < ids.size[2]; i += kLanes) {
      const int64_t id = index_at(ids, b * ids.stride[0] + j * ids.stride[1] + i);
      const double prob = id >= 0 ? load_as<double>(probs.dtype, row, i) : 0.0;
      out.total = out.total + prob;
      out.of_drawn = out.of_drawn + (id == drawn ? prob : 0.0);
      out.bad |= prob < 0 || id >= call.vocab;
    }
    out.of_drawn = warp_sum(out.of_drawn);
  }
  out.total = warp_sum(out.total);
  // a NaN shows in the sum
  out.bad = __any_sync(kAllLanes, out.bad) != 0 || !(out.total > 0 && out.total < kInfinity);
  return out;
}

// A verify row from its parts, by one warp.
__device__ inline RowState joined_row(const Verify& call, const Request& request, int64_t b, int64_t j) {
  const RowPart* parts = call.row_parts + (b * call.rows + j) * call.parts;
  Best top = nobody();
  bool nan = false;
  for (int64_t i = lane_index(); i < call.parts; i += kLanes) {
    top = better(top, {parts[i].top, parts[i].first});
    nan |= parts[i].nan != 0;
  }
  top = warp_best(top);
  nan = __any_sync(kAllLanes, nan) != 0;
  const bool greedy = request.temperature == 0;
  const bool undecided = top.score == -kInfinity || (!greedy && (nan || top.score == kInfinity));
  const int64_t drawn = proposed_at(call, request, b, j);
  RowState out{};
  out.top = top.score;
  out.best = undecided ? -1 : top.id;
  out.flags = (nan ? kNanLogits : 0) + (undecided ? kUndecided : 0);
  out.usable = drawn >= 0 && !undecided && (!greedy || drawn == out.best);
  if (greedy) {
    return out;
  }
  const Divisor temperature(request.temperature);
  if (!undecided) {
    double total = 0;
    for (int64_t i = lane_index(); i < call.parts; i += kLanes) {
      total = total + parts[i].mass * exp_of(log_weight(parts[i].top, top.score, temperature));
    }
    out.total = warp_sum(total);
  }
  if (drawn >= 0) {
    const DraftRow draft = joined_draft(call, b, j, drawn);
    out.draft = draft.total;
    out.q = draft.bad ? 0.0 : Divisor(draft.total).under(draft.of_drawn);
    out.flags += draft.bad ? kBadDraft : 0;
    out.usable = out.usable != 0 && !draft.bad;
  }
  if (out.usable != 0) {
    const Tensor& logits = call.args.target_logits;
    const double x = load_as<double>(logits.dtype, row_at(logits, b, j), drawn);
    const bool kept = call.cuts == nullptr || keeps(call.cuts[b * call.rows + j], logits.dtype, x, drawn);
    out.p = kept ? Divisor(out.total).under(exp_of(log_weight(x, top.score, temperature))) : 0.0;
  }
  return out;
}

// Block verification, by one thread: the longest prefix whose draw falls below its chance.
__device__ inline void keep_longest(const Verify& call, int64_t b) {
  RequestState& state = call.requests[b];
  state.kept = 0;
  for (int64_t i = 1; i <= state.usable; ++i) {
    const RowState& row = call.states[b * call.rows + i];
    const double surplus = i < state.usable ? call.surpluses[b * call.rows + i] : 0.0;
    const double below = surplus + 1.0 - row.ratio;
    const double chance = i == state.usable ? row.ratio : below > 0 ? Divisor(below).under(surplus) : 1.0;
    if (uniform_at(call.args, b, i - 1) < chance) {
      state.kept = i;
      state.scale = row.ratio;
    }
  }
  state.refused = state.kept < state.usable;
  // what is wrong with the row that ends the draft counts where the prefix reaches it
  state.flags = state.refused != 0 ? 0 : state.flags;
}

// Joins the rows and walks the candidates: those kept one by one, or for block verification the usable ones.
__device__ inline void decide(const Verify& call, const Request& request, int64_t b) {
  RequestState state{1.0, 0, 0, -1, request.given && !request.good ? kBadParameter : 0, 0};
  if (request.live()) {
    for (int64_t j = share_of_warp(); j <= request.limit; j += warps_of_block()) {
      const RowState row = joined_row(call, request, b, j);
      if (lane_index() == 0) {
        call.states[b * call.rows + j] = row;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) {
    return;
  }
  const bool greedy = request.temperature == 0;
  double ratio = 1;
  for (bool open = request.live(); open;) {
    RowState& row = call.states[b * call.rows + state.kept];
    row.ratio = ratio;
    state.token = greedy ? row.best : -1;
    state.flags = greedy ? state.flags | row.flags : row.usable != 0 ? 0 : row.flags;
    open = row.usable != 0;
    if (open && !greedy && call.args.block) {
      ratio = row.q > 0 ? ratio * Divisor(row.q).under(row.p) : 0.0;
      ratio = ratio < 1 ? ratio : 1.0;
    } else if (open && !greedy) {
      // no division: u < p / q; a candidate that q says cannot be drawn is refused
      open = uniform_at(call.args, b, state.kept) * row.q < row.p && row.q > 0;
      state.refused = !open;
    }
    state.kept += open;
  }
  state.usable = state.kept;
  call.requests[b] = state;
  if (call.args.block && call.rows == 2 && request.sampled()) {
    keep_longest(call, b);
  }
}

}  // namespace dmtp::cuda
