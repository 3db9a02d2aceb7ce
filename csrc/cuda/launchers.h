#pragma once

#include "dmtp/accept.h"
#include "dmtp/advance.h"
#include "dmtp/commit_kv.h"
#include "dmtp/draft_pages.h"

// One launch each, on a stream of the current device: null, or why it failed. Arguments are checked; `parallel` of a
// struct is not looked at.
namespace dmtp::cuda {

const char* accept_prefix(const AcceptPrefix&, void* stream);
const char* advance(const Advance&, void* stream);
const char* commit_kv(const CommitKV&, void* stream);
const char* draft_pages(const DraftPages&, void* stream);

// Whether there are kernels for a commit: heads that are computed on have bounds, and so has the number of caches.
bool commit_takes(const CommitKV&);

}  // namespace dmtp::cuda
