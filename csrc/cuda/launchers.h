#pragma once

#include "cuda/scratch.h"
#include "dmtp/accept.h"
#include "dmtp/advance.h"
#include "dmtp/block_attention.h"
#include "dmtp/commit_kv.h"
#include "dmtp/draft_pages.h"
#include "dmtp/sample.h"
#include "dmtp/t1_prep.h"

// One launch each unless said otherwise, on a stream of the current device: null, or why it failed. Arguments are
// checked; `parallel` of a struct is not looked at.
namespace dmtp::cuda {

const char* accept_prefix(const AcceptPrefix&, void* stream);
// Two launches, three for a block of two candidates or more, and one more where requests are filtered.
const char* accept_sampled(const Scratched<AcceptSampled>&, void* stream);
const char* advance(const Advance&, void* stream);
const char* commit_kv(const CommitKV&, void* stream);
const char* draft_pages(const DraftPages&, void* stream);
// Two launches where a row is filtered.
const char* sample_rows(const Scratched<SampleRows>&, void* stream);

// T1 preparation in `t1_prep_bytes` of scratch. `barrier`: two int32 that are zero before the first call and that no
// two calls use at the same time. One launch for up to 16 requests, or one for each phase.
const char* t1_prep(const T1Call&, void* scratch, void* barrier, void* stream);
// -1 where there are no kernels for a call.
int64_t t1_prep_bytes(const T1Call&);

// Bytes of scratch that a call needs for partial sums of long histories (0: none), or -1 where there are no kernels for
// it.
int64_t block_attention_bytes(const BlockAttention&);
// One launch, or two where a request may have more than one chunk.
const char* block_attention(const BlockAttention&, void* scratch, void* stream);

// Whether there are kernels for a commit: heads that are computed on have bounds, and so has the number of caches.
bool commit_takes(const CommitKV&);

}  // namespace dmtp::cuda
