#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention_sum.cuh"

// The kernel, the shapes that it is compiled for, and their choice. Sources block_attention_*.cu compile some each.
namespace dmtp::cuda {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) block_attention_kernel(const __grid_constant__ AttentionLaunch a) {
  DMTP_DYNAMIC_SHARED(char, memory);
  const int rank = a.cluster > 1 ? cluster_rank() : 0;
  int item = static_cast<int>(blockIdx.x) / a.cluster;
  const int first_row = item % a.tiles * S::kRows;
  item /= a.tiles;
  const int head = item % a.heads;
  item /= a.heads;
  const int chunk = item % a.chunks;
  const int64_t b = item / a.chunks;
  const Request request = request_of(a, b);
  const int rows = kParts * a.part, first = request.base + chunk * rows;
  const Span whole = span_of<S::kKeys>(request, first, rows);
  if (chunk > 0 && whole.begin >= whole.end) {
    return;
  }
  // a context of one part is the first block's: the others leave
  const int cluster = request.ctx - request.base > a.part ? a.cluster : 1;
  if (rank >= cluster) {
    return;
  }
  const Span span = cluster > 1 ? span_of<S::kKeys>(request, first + rank * a.part, a.part) : whole;
  const int block_tiles = chunk == 0 && rank == 0 ? (request.length + S::kKeys - 1) / S::kKeys : 0;
  const int tiles = block_tiles + (span.begin < span.end ? (span.end - span.begin + S::kKeys - 1) / S::kKeys : 0);
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const AttentionMemory<S> own(&memory);
  if (threadIdx.x < 4) {
    own.sources[threadIdx.x] = source_of(a, static_cast<int>(threadIdx.x), b, head);
  }
  for (int i = static_cast<int>(threadIdx.x); i < S::kKeyWarps * S::kRows; i += S::kThreads) {
    own.tops[i] = kNone;
    own.totals[i] = 0;
  }
  WarpState<S> state;
  const int warp_row = warp % S::kRowWarps * 16, warp_key = warp / S::kRowWarps * 16;
  const Summing<S> summing{a,           own,   b,       head,     first_row, request, span,
                           block_tiles, tiles, cluster, warp_row, warp_key,  lane};
  summing.run(state);
  if (cluster > 1) {
    DMTP_WAIT_FOR_CLUSTER();
  }
  const bool alone = request.ctx - request.base <= rows;
  const int share = S::kRows / cluster;
  constexpr int kFours = S::kDim / 4;
  for (int i = static_cast<int>(threadIdx.x); i < share * kFours; i += S::kThreads) {
    const int row = rank * share + i / kFours, column = i % kFours * 4, number = first_row + row;
    if (number >= a.query_rows || column >= a.dim) {
      continue;
    }
    State sum;
    for (int other = 0; other < cluster; ++other) {
      for (int g = 0; g < (cluster > 1 ? S::kKeyWarps : 1); ++g) {
        const auto there = [&](float* mine) { return cluster > 1 ? of_block(mine, other) : mine; };
        const float top = *there(own.tops + g * S::kRows + row);
        // one of no key was not written
        if (top != kNone) {
          const float total = *there(own.totals + g * S::kRows + row);
          sum.add(top, total, *reinterpret_cast<float4*>(there(&sum_at<S>(own.sum_of(g), row, column)->x)));
        }
      }
    }
    if (alone) {
      finish(a, b, head, number, column, sum);
    } else {
      leave(a, partial_row(a, b, head, chunk, number), column, sum);
    }
  }
  if (cluster > 1) {
    // nobody leaves while others read what it has summed
    DMTP_WAIT_FOR_CLUSTER();
  }
}

template <class S>
int stages_of() {
  const int64_t fit = (shared_limit() - S::kFixedBytes) / S::kStageBytes;
  return static_cast<int>(std::min<int64_t>(fit, S::kMostStages));
}

template <class S>
const char* launch_shape(AttentionLaunch a, void* stream) {
  constexpr auto kKernel = block_attention_kernel<S>;
  a.tiles = (a.query_rows + S::kRows - 1) / S::kRows;
  a.stages = stages_of<S>();
  const int64_t shared = S::kFixedBytes + int64_t{a.stages} * S::kStageBytes;
  // clusters where blocks of whole chunks are too few for the device: not measured. A wide table may hold short
  // histories, so no more than two chunks a request are counted on.
  const int64_t blocks = a.batch * a.heads * a.tiles * std::min(a.chunks, 2);
  const bool parts = a.capacity > a.part && (a.window < 0 || a.window > a.part);
  const bool few = parts && blocks < processors() * 3 / 4;
  a.cluster = few && most_cluster<kKernel>(S::kThreads, shared) >= kParts ? kParts : 1;
  const int64_t each = int64_t{a.chunks} * a.heads * a.tiles * a.cluster;
  if (a.batch > kMostBlocks / each) {
    return kTooManyBlocks;
  }
  return launch_clusters(kKernel, a.batch * each, a.cluster, S::kThreads, shared, stream, a);
}

// Calls `each` with the shape for a call; false where none fits the device.
template <class Kind, bool kFp8, class Each>
bool with_shape(const AttentionLaunch& a, Each each) {
  const auto found = [&](auto shape) { return stages_of<decltype(shape)>() >= 2 && (each(shape), true); };
  const auto of_dim = [&](auto padded) {
    constexpr int kDim = decltype(padded)::value;
    if constexpr (std::is_same_v<Kind, Fp32Fma>) {
      return found(AttentionShape<Kind, kDim, 2, 1, kFp8>{});
    } else {
      if constexpr (std::is_same_v<Kind, Bf16Mma>) {
        if (a.query_rows <= 32 && found(AttentionShape<Kind, kDim, 2, 4, kFp8>{})) {
          return true;
        }
      }
      return found(AttentionShape<Kind, kDim, 4, 2, kFp8>{});
    }
  };
  return a.dim <= 64    ? of_dim(std::integral_constant<int, 64>{})
         : a.dim <= 128 ? of_dim(std::integral_constant<int, 128>{})
                        : of_dim(std::integral_constant<int, 256>{});
}

// Null, or why the launch failed.
template <class Kind, bool kFp8>
const char* launch_attention(const AttentionLaunch& a, void* stream) {
  const char* error = "no kernel for this call";
  with_shape<Kind, kFp8>(a, [&](auto shape) { error = launch_shape<decltype(shape)>(a, stream); });
  return error;
}

extern template const char* launch_attention<Bf16Mma, false>(const AttentionLaunch&, void*);
extern template const char* launch_attention<Bf16Mma, true>(const AttentionLaunch&, void*);
extern template const char* launch_attention<Fp16Mma, false>(const AttentionLaunch&, void*);
extern template const char* launch_attention<Fp16Mma, true>(const AttentionLaunch&, void*);
extern template const char* launch_attention<Fp32Fma, false>(const AttentionLaunch&, void*);

}  // namespace dmtp::cuda
