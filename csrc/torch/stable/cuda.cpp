#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cuda/launchers.h"
#include "tensors.h"

// Torch's side of csrc/cuda over its stable C interface: one binary serves every torch from 2.11 on, and the library
// loads, and refuses, where torch was built without CUDA.

#ifndef DMTP_CUDA_LIBRARY
#define DMTP_CUDA_LIBRARY dmtp_cuda
#define DMTP_CUDA_KEY CUDA
#endif

namespace dmtp {
namespace {

using Stables = std::vector<Stable>;
using Whole = std::vector<int64_t>;

// The current stream of a device. It is looked for in the torch that runs, since one without CUDA has no such function.
void* stream_of(int32_t device) {
#ifdef DMTP_CUDA_HOST
  (void)device;
  return nullptr;
#else
  using Function = AOTITorchError (*)(int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
    return reinterpret_cast<Function>(library == nullptr ? nullptr
                                                         : dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (function == nullptr) {
    throw std::runtime_error("this torch has no CUDA streams");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(function(device, &stream));
  return stream;
#endif
}

// Launches on the tensor's device, on its current stream.
template <class Launch>
void run(Launch launch, const Stable& tensor) {
  const torch::stable::accelerator::DeviceIndex device = tensor.get_device_index();
#ifndef DMTP_CUDA_HOST
  const torch::stable::accelerator::DeviceGuard guard(device);
#endif
  const char* error = launch(stream_of(device));
  if (error != nullptr) {
    throw std::runtime_error(std::string("launch failed: ") + error);
  }
}

template <class Args>
void run(const char* (*launch)(const Args&, void*), const Args& args, const Stable& tensor) {
  run([&](void* stream) { return launch(args, stream); }, tensor);
}

// `places`: where each argument is among the tensors, -1 where it is absent.
template <size_t count>
void place(Tensor* const (&read)[count], const Stables& tensors, const Whole& places) {
  for (size_t i = 0; i < count; ++i) {
    *read[i] = places.at(i) < 0 ? Tensor{} : view(tensors.at(places[i]));
  }
}

void draft_pages(const Stable& source, const MaybeStable& pool, const Stable& ctx_len, const MaybeStable& valid_from,
                 int64_t window, int64_t page_size, int64_t block_slots, bool slots, const Stable& draft_table,
                 const Stable& draft_len, const Stable& kv_skip) {
  DraftPages a{};
  a.source = view(source);
  a.pool = view(pool);
  a.ctx_len = view(ctx_len);
  a.valid_from = view(valid_from);
  a.window = window;
  a.page_size = page_size;
  a.block_slots = block_slots;
  a.slots = slots;
  a.draft_table = view(draft_table);
  a.draft_len = view(draft_len);
  a.kv_skip = view(kv_skip);
  run(cuda::draft_pages, a, source);
}

void advance_round(const Stables& state, const Stables& tables, const Whole& page_sizes, const MaybeStable& grants,
                   int64_t mask_id, int64_t first_page, const Stables& outputs) {
  Advance a{};
  Tensor* const moved[] = {&a.length, &a.anchor, &a.budget, &a.finished, &a.commit_len, &a.bonus, &a.ended};
  for (size_t i = 0; i < std::size(moved); ++i) {
    *moved[i] = view(state.at(i));
  }
  a.num_tables = static_cast<int64_t>(tables.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    a.tables[t] = view(tables[t]);
    a.page_sizes[t] = page_sizes.at(t);
  }
  a.grants = view(grants);
  a.mask_id = mask_id;
  a.first_page = first_page;
  Tensor* const written[] = {&a.positions, &a.token_positions, &a.context_len, &a.history_len,
                             &a.slots,     &a.previous_slots,  &a.block_ids,   &a.error};
  for (size_t i = 0; i < std::size(written); ++i) {
    *written[i] = view(outputs.at(i));
  }
  run(cuda::advance, a, state.at(0));
}

// The limits of a round, and the first five outputs of every rule.
Emission emission_of(const Stable& stop_ids, const Stable& budget, const Stable& accept_len, const Stable& commit_len,
                     const Stable& bonus, const Stable& out_tokens, const Stable& finished) {
  Emission e{};
  e.stop_ids = view(stop_ids);
  if (stop_ids.dim() == 1) {
    e.stop_ids.size[1] = e.stop_ids.size[0];
    e.stop_ids.stride[1] = e.stop_ids.stride[0];
    e.stop_ids.stride[0] = 0;
  }
  e.budget = view(budget);
  e.accept_len = view(accept_len);
  e.commit_len = view(commit_len);
  e.bonus = view(bonus);
  e.out_tokens = view(out_tokens);
  e.finished = view(finished);
  return e;
}

void accept_prefix(const Stable& candidates, const Stable& target, const Stable& stop_ids, const Stable& budget,
                   const MaybeStable& num_candidates, const Stable& accept_len, const Stable& commit_len,
                   const Stable& bonus, const Stable& out_tokens, const Stable& finished) {
  AcceptPrefix a{};
  a.candidates = view(candidates);
  a.target = view(target);
  a.num_candidates = view(num_candidates);
  a.emission = emission_of(stop_ids, budget, accept_len, commit_len, bonus, out_tokens, finished);
  run(cuda::accept_prefix, a, candidates);
}

template <class Args>
cuda::Scratched<Args> scratched(const Args& args, const Stable& memory, const Stable& counters) {
  return {args, memory.data_ptr(), memory.numel(), static_cast<int32_t*>(counters.data_ptr()), counters.numel()};
}

void accept_sampled(bool block, const Stable& candidates, const Stable& target_logits, const Stable& temperature,
                    const Stable& seed, const Stable& position, const Stable& stop_ids, const Stable& budget,
                    const MaybeStable& draft_probs, const MaybeStable& num_candidates, const MaybeStable& top_k,
                    const MaybeStable& top_p, const MaybeStable& draft_ids, const Stable& accept_len,
                    const Stable& commit_len, const Stable& bonus, const Stable& out_tokens, const Stable& finished,
                    const Stable& status, const Stable& memory, const Stable& counters) {
  AcceptSampled a{};
  a.candidates = view(candidates);
  a.target_logits = view(target_logits);
  a.temperature = view(temperature);
  a.seed = view(seed);
  a.position = view(position);
  a.draft_probs = view(draft_probs);
  a.num_candidates = view(num_candidates);
  a.top_k = view(top_k);
  a.top_p = view(top_p);
  a.draft_ids = view(draft_ids);
  a.block = block;
  a.emission = emission_of(stop_ids, budget, accept_len, commit_len, bonus, out_tokens, finished);
  a.status = view(status);
  run(cuda::accept_sampled, scratched(a, memory, counters), target_logits);
}

void sample_rows(const Stable& logits, const Stable& temperature, const Stable& seed, const Stable& position,
                 const MaybeStable& top_k, const MaybeStable& top_p, int64_t num_valid, int64_t stream,
                 const Stable& token, const Stable& status, const Stable& memory, const Stable& counters) {
  SampleRows a{};
  a.logits = view(logits);
  a.temperature = view(temperature);
  a.seed = view(seed);
  a.position = view(position);
  a.top_k = view(top_k);
  a.top_p = view(top_p);
  a.num_valid = num_valid;
  a.stream = static_cast<uint32_t>(stream);
  a.token = view(token);
  a.status = view(status);
  run(cuda::sample_rows, scratched(a, memory, counters), logits);
}

// K and V of all layers of all caches. Indices are -1 where a layer has none; the first `rotated` are rotated. False,
// with nothing written, where there is no kernel for the call.
bool commit(const Stables& rows, const Stables& caches, const Whole& owners, const Stables& scales,
            const Whole& scale_of, const Stables& norms, const Whole& norm_of, int64_t rotated, const Stable& valid,
            const Stables& dst, const Whole& first_slot, const MaybeStable& pending_slot,
            const MaybeStable& promote_dst, const MaybeStable& scratch_dst, const MaybeStable& hidden,
            const MaybeStable& next_hidden, const MaybeStable& lengths, const MaybeStable& live, double norm_eps,
            double norm_offset, const MaybeStable& cos_sin, const MaybeStable& positions, const Stable& error) {
  const auto picked = [](const Stables& list, int64_t i) { return i < 0 ? Tensor{} : view(list.at(i)); };
  std::vector<CommitLayer> layers;
  std::vector<CommitCache> own(dst.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    layers.push_back({view(rows[i]), view(caches.at(i)), picked(scales, scale_of.at(i)), picked(norms, norm_of.at(i)),
                      static_cast<int64_t>(i) < rotated, owners.at(i)});
    const bool paged = caches[i].dim() == 4;
    CommitCache& cache = own.at(owners[i]);
    cache.num_slots = caches[i].size(0) * (paged ? caches[i].size(1) : 1);
    cache.page_size = paged ? caches[i].size(1) : 0;
  }
  for (size_t c = 0; c < own.size(); ++c) {
    own[c].dst = view(dst[c]);
    own[c].first_slot = first_slot.at(c);
  }
  own.back().pending_slot = view(pending_slot);
  own.back().promote_dst = view(promote_dst);
  own.back().scratch_dst = view(scratch_dst);
  CommitKV a{};
  a.layers = layers.data();
  a.count = static_cast<int64_t>(layers.size());
  a.caches = own.data();
  a.cache_count = static_cast<int64_t>(own.size());
  a.valid = view(valid);
  a.hidden = view(hidden);
  a.next_hidden = view(next_hidden);
  a.lengths = view(lengths);
  a.live = view(live);
  a.cos_sin = view(cos_sin);
  a.positions = view(positions);
  a.norm_eps = norm_eps;
  a.norm_offset = norm_offset;
  a.error = view(error);
  if (!cuda::commit_takes(a)) {
    return false;
  }
  run(cuda::commit_kv, a, valid);
  return true;
}

// 0 when it ran, else the bytes of scratch that it needs, or -1 where there are no kernels for the call.
int64_t block_attention(const Stables& tensors, const Whole& places, int64_t window, bool by_query, bool block_causal,
                        double scale, double soft_cap, const Stable& out, const Stable& lse, const Stable& scratch) {
  BlockAttention a{};
  Tensor* const read[] = {&a.q,       &a.k_cache,   &a.v_cache,    &a.page_table, &a.ctx_len, &a.block_k,
                          &a.block_v, &a.block_len, &a.valid_from, &a.k_scale,    &a.v_scale, &a.sink};
  place(read, tensors, places);
  a.window = window;
  a.by_query = by_query;
  a.block_causal = block_causal;
  a.scale = static_cast<float>(scale);
  a.soft_cap = static_cast<float>(soft_cap);
  a.out = view(out);
  a.lse = view(lse);
  int64_t taken = 0;
  const auto launch = [&](void* stream) -> const char* {
    const int64_t needed = cuda::block_attention_bytes(a);  // of the device that is current here
    if (needed < 0 || needed > scratch.numel()) {
      taken = needed;
      return nullptr;
    }
    return cuda::block_attention(a, scratch.data_ptr(), stream);
  };
  run(launch, out);
  return taken;
}

// 0 when it ran, else the bytes of scratch that it needs, or -1 where there are no kernels for the call.
int64_t t1_prep(const Stables& tensors, const Whole& places, const Whole& whole, double eps_e, double eps_m,
                double offset_e, double offset_m, double embed_scale, const Stables& outputs, const Stable& scratch,
                const Stable& barrier) {
  T1Call c{};
  T1Prep& p = c.prep;
  Tensor* const read[] = {&p.anchor_ids,  &p.token,      &p.status,     &p.hidden,     &p.embedding,  &p.mask_embed,
                          &p.folded,      &p.first,      &p.up,         &p.norm_e,     &p.norm_m,     &c.hidden,
                          &c.head.weight, &c.head.codes, &c.head.scale, &c.head.bound, &c.head.id_map};
  place(read, tensors, places);
  Tensor* const written[] = {&p.t1, &p.block_ids, &p.block_embeds, &p.certified};
  for (size_t i = 0; i < std::size(written); ++i) {
    *written[i] = view(outputs.at(i));
  }
  p.fusion = static_cast<T1Fusion>(whole.at(0));
  p.at_masks = whole.at(1) != 0;
  p.anchors = whole.at(2);
  p.num_masks = whole.at(3);
  p.mask_id = whole.at(4);
  p.embedding_start = whole.at(5);
  p.num_embeddings = whole.at(6);
  c.head.format = static_cast<ScreenFormat>(whole.at(7));
  c.head.id_map_mode = static_cast<IdMap>(whole.at(8));
  c.head.full_scan = whole.at(9) != 0;
  c.head.num_valid = whole.at(10);
  c.head.id_offset = whole.at(11);
  c.bf16_logits = whole.at(12) != 0;
  c.one_launch = whole.at(13) != 0;
  p.eps_e = static_cast<float>(eps_e);
  p.eps_m = static_cast<float>(eps_m);
  p.offset_e = static_cast<float>(offset_e);
  p.offset_m = static_cast<float>(offset_m);
  p.embed_scale = static_cast<float>(embed_scale);
  const int64_t needed = cuda::t1_prep_bytes(c);
  if (needed < 0 || needed > scratch.numel()) {
    return needed;
  }
  const auto launch = [&](void* stream) { return cuda::t1_prep(c, scratch.data_ptr(), barrier.data_ptr(), stream); };
  run(launch, tensors.at(0));
  return 0;
}

}  // namespace
}  // namespace dmtp

STABLE_TORCH_LIBRARY(DMTP_CUDA_LIBRARY, m) {
  m.def(
      "draft_pages(Tensor source, Tensor? pool, Tensor ctx_len, Tensor? valid_from, int window, int page_size, "
      "int block_slots, bool slots, Tensor(a!) draft_table, Tensor(b!) draft_len, Tensor(c!) kv_skip) -> ()");
  m.def(
      "advance_round(Tensor(a!)[] state, Tensor(b!)[] tables, int[] page_sizes, Tensor(c!)? grants, int mask_id, "
      "int first_page, Tensor(d!)[] outputs) -> ()");
  m.def(
      "accept_prefix(Tensor candidates, Tensor target, Tensor stop_ids, Tensor budget, Tensor? num_candidates, "
      "Tensor(a!) accept_len, Tensor(b!) commit_len, Tensor(c!) bonus, Tensor(d!) out_tokens, Tensor(e!) finished) "
      "-> ()");
  m.def(
      "accept_sampled(bool block, Tensor candidates, Tensor target_logits, Tensor temperature, Tensor seed, "
      "Tensor position, Tensor stop_ids, Tensor budget, Tensor? draft_probs, Tensor? num_candidates, Tensor? top_k, "
      "Tensor? top_p, Tensor? draft_ids, Tensor(a!) accept_len, Tensor(b!) commit_len, Tensor(c!) bonus, "
      "Tensor(d!) out_tokens, Tensor(e!) finished, Tensor(f!) status, Tensor(g!) memory, Tensor(h!) counters) -> ()");
  m.def(
      "sample_rows(Tensor logits, Tensor temperature, Tensor seed, Tensor position, Tensor? top_k, Tensor? top_p, "
      "int num_valid, int stream, Tensor(a!) token, Tensor(b!) status, Tensor(c!) memory, Tensor(d!) counters) -> ()");
  m.def(
      "block_attention(Tensor[] tensors, int[] places, int window, bool by_query, bool block_causal, float scale, "
      "float soft_cap, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) scratch) -> int");
  m.def(
      "t1_prep(Tensor[] tensors, int[] places, int[] whole, float eps_e, float eps_m, float offset_e, float offset_m, "
      "float embed_scale, Tensor(a!)[] outputs, Tensor(b!) scratch, Tensor(c!) barrier) -> int");
  m.def(
      "commit(Tensor[] rows, Tensor(a!)[] caches, int[] owners, Tensor[] scales, int[] scale_of, Tensor[] norms, "
      "int[] norm_of, int rotated, Tensor valid, Tensor[] dst, int[] first_slot, Tensor? pending_slot, "
      "Tensor? promote_dst, Tensor? scratch_dst, Tensor? hidden, Tensor(b!)? next_hidden, Tensor(c!)? lengths, "
      "Tensor? live, float norm_eps, float norm_offset, Tensor? cos_sin, Tensor? positions, Tensor(d!) error) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(DMTP_CUDA_LIBRARY, DMTP_CUDA_KEY, m) {
  m.impl("draft_pages", TORCH_BOX(&dmtp::draft_pages));
  m.impl("advance_round", TORCH_BOX(&dmtp::advance_round));
  m.impl("accept_prefix", TORCH_BOX(&dmtp::accept_prefix));
  m.impl("accept_sampled", TORCH_BOX(&dmtp::accept_sampled));
  m.impl("sample_rows", TORCH_BOX(&dmtp::sample_rows));
  m.impl("block_attention", TORCH_BOX(&dmtp::block_attention));
  m.impl("t1_prep", TORCH_BOX(&dmtp::t1_prep));
  m.impl("commit", TORCH_BOX(&dmtp::commit));
}
