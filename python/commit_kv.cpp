#include "cpu/commit_kv.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;

void add_layers(std::vector<CommitLayer>& layers, const Tensors& rows, const Tensors& caches, const Tensors& scales,
                const Tensors& norms, bool rotated) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto of = [&](const Tensors& list) { return list.empty() ? Tensor{} : view(list[list.size() > 1 ? i : 0]); };
    layers.push_back({view(rows[i]), view(caches[i]), of(scales), of(norms), rotated});
  }
}

}  // namespace

void bind_commit_kv(py::module_& m) {
  m.def(
      "commit_kv",
      [](const Tensors& rows_k, const Tensors& rows_v, const Tensors& k_caches, const Tensors& v_caches,
         const at::Tensor& valid, const at::Tensor& dst, const Optional& pending_slot, const Optional& promote_dst,
         const Optional& scratch_dst, const Optional& hidden, const Optional& next_hidden, const Optional& lengths,
         const Optional& live, int64_t first_slot, const Tensors& k_scale, const Tensors& v_scale,
         const Tensors& k_norm, double k_norm_eps, double k_norm_offset, const Optional& cos_sin,
         const Optional& positions, const at::Tensor& error) {
        std::vector<CommitLayer> layers;
        layers.reserve(2 * rows_k.size());
        add_layers(layers, rows_k, k_caches, k_scale, k_norm, cos_sin.has_value());
        add_layers(layers, rows_v, v_caches, v_scale, {}, false);
        const at::Tensor& cache = k_caches[0];
        CommitKV a{};
        a.layers = layers.data();
        a.count = static_cast<int64_t>(layers.size());
        a.valid = view(valid);
        a.dst = view(dst);
        a.pending_slot = view(pending_slot);
        a.promote_dst = view(promote_dst);
        a.scratch_dst = view(scratch_dst);
        a.hidden = view(hidden);
        a.next_hidden = view(next_hidden);
        a.lengths = view(lengths);
        a.live = view(live);
        a.cos_sin = view(cos_sin);
        a.positions = view(positions);
        a.page_size = cache.dim() == 4 ? cache.size(1) : 0;
        a.num_slots = cache.dim() == 4 ? cache.size(0) * cache.size(1) : cache.size(0);
        a.first_slot = first_slot;
        a.norm_eps = k_norm_eps;
        a.norm_offset = k_norm_offset;
        a.error = view(error);
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        commit_kv(a);
      },
      "Commit of a round's rows; scales are [B, Hkv]. Lists of scales and norms: none, one, or one a layer.");
}

}  // namespace dmtp
