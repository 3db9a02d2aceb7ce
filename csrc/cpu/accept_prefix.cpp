#include "accept.h"
#include "accept_emit.h"

namespace dmtp::DMTP_CAPABILITY {
namespace {

constexpr int64_t kGrain = 1 << 10;  // requests that are worth a thread: not measured

void one_request(const AcceptPrefix& args, int64_t b) {
  const int64_t limit = limit_of(args.num_candidates, b, args.candidates.size[1] - 1);
  int64_t accepted = 0;
  while (accepted < limit) {
    const int64_t drawn = index_at(args.candidates, b, accepted + 1);
    if (drawn < 0 || drawn != index_at(args.target, b, accepted)) {
      break;
    }
    ++accepted;
  }
  emit(args.emission, b, limit >= 0, accepted, [&](int64_t j) { return index_at(args.target, b, j); });
}

}  // namespace

void accept_prefix(const AcceptPrefix& args) {
  args.parallel(args.candidates.size[0], kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      one_request(args, b);
    }
  });
}

}  // namespace dmtp::DMTP_CAPABILITY
