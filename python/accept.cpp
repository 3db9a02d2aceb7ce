#include "cpu/accept.h"

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;

// The limits of a round, and the first five outputs of every rule.
Emission emission_of(const at::Tensor& stop_ids, const at::Tensor& budget, const at::Tensor& accept_len,
                     const at::Tensor& commit_len, const at::Tensor& bonus, const at::Tensor& out_tokens,
                     const at::Tensor& finished) {
  Emission e{};
  e.stop_ids = view(stop_ids);
  if (stop_ids.dim() == 1) {
    e.stop_ids.size[1] = e.stop_ids.size[0];
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

}  // namespace

void bind_accept(py::module_& m) {
  m.def(
      "accept_prefix",
      [](const at::Tensor& candidates, const at::Tensor& target, const at::Tensor& stop_ids, const at::Tensor& budget,
         const Optional& num_candidates, const at::Tensor& accept_len, const at::Tensor& commit_len,
         const at::Tensor& bonus, const at::Tensor& out_tokens, const at::Tensor& finished) {
        AcceptPrefix a{};
        a.candidates = view(candidates);
        a.target = view(target);
        a.num_candidates = view(num_candidates);
        a.emission = emission_of(stop_ids, budget, accept_len, commit_len, bonus, out_tokens, finished);
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        accept_prefix(a);
      },
      "Target-only verification.");
  m.def(
      "accept_sampled",
      [](bool block, const at::Tensor& candidates, const at::Tensor& target_logits, const at::Tensor& temperature,
         const at::Tensor& seed, const at::Tensor& position, const at::Tensor& stop_ids, const at::Tensor& budget,
         const Optional& draft_probs, const Optional& num_candidates, const Optional& top_k, const Optional& top_p,
         const Optional& draft_ids, const at::Tensor& accept_len, const at::Tensor& commit_len, const at::Tensor& bonus,
         const at::Tensor& out_tokens, const at::Tensor& finished, const at::Tensor& status) {
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
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        accept_sampled(a);
      },
      "Rejection sampling, or block verification.");
}

}  // namespace dmtp
