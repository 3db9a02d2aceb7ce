#include "cuda/emit.cuh"
#include "cuda/launchers.h"

namespace dmtp::cuda {
namespace {

// One warp for one request.
__global__ void __launch_bounds__(kLanes) accept_prefix_kernel(const AcceptPrefix args) {
  const int64_t b = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const Tensor &candidates = args.candidates, &target = args.target;
  const int64_t limit = limit_of(args.num_candidates, b, candidates.size[1] - 1);
  const auto at = [&](const Tensor& t, int64_t j) { return index_at(t, b * t.stride[0] + j * t.stride[1]); };
  int64_t accepted = 0;
  for (bool open = true; open && accepted < limit;) {
    const int64_t j = accepted + lane;
    bool kept = false;
    if (j < limit) {
      const int64_t drawn = at(candidates, j + 1);
      kept = drawn >= 0 && drawn == at(target, j);
    }
    const uint32_t refused = __ballot_sync(kAllLanes, !kept);
    accepted += refused != 0 ? __ffs(static_cast<int>(refused)) - 1 : kLanes;
    open = refused == 0;
  }
  emit(args.emission, b, lane, limit >= 0, accepted, [&](int64_t j) { return at(target, j); });
}

}  // namespace

const char* accept_prefix(const AcceptPrefix& args, void* stream) {
  const int64_t batch = args.candidates.size[0];
  return batch == 0 ? nullptr : launch(accept_prefix_kernel, batch, kLanes, stream, args);
}

}  // namespace dmtp::cuda
