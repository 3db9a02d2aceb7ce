#include "cpu/commit_kv.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;
using Tensors = std::vector<at::Tensor>;

int64_t slots_of(const at::Tensor& cache) {
  return cache.dim() == 4 ? cache.size(0) * cache.size(1) : cache.size(0);
}

int64_t page_size_of(const at::Tensor& cache) {
  return cache.dim() == 4 ? cache.size(1) : 0;
}

void add_layers(std::vector<CommitLayer>& layers, const Tensors& rows, const Tensors& caches, const Tensors& scales,
                const Tensors& norms, bool rotated) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto of = [&](const Tensors& list) { return list.empty() ? Tensor{} : view(list[list.size() > 1 ? i : 0]); };
    layers.push_back({view(rows[i]), view(caches[i]), of(scales), of(norms), rotated, 0});
  }
}

void run(CommitKV& a, const std::vector<CommitLayer>& layers, const std::vector<CommitCache>& caches) {
  a.layers = layers.data();
  a.count = static_cast<int64_t>(layers.size());
  a.caches = caches.data();
  a.cache_count = static_cast<int64_t>(caches.size());
  a.parallel = parallel_for();
  py::gil_scoped_release release;
  commit_kv(a);
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
        a.valid = view(valid);
        a.hidden = view(hidden);
        a.next_hidden = view(next_hidden);
        a.lengths = view(lengths);
        a.live = view(live);
        a.cos_sin = view(cos_sin);
        a.positions = view(positions);
        a.norm_eps = k_norm_eps;
        a.norm_offset = k_norm_offset;
        a.error = view(error);
        run(a, layers,
            {{view(dst), view(pending_slot), view(promote_dst), view(scratch_dst), slots_of(cache), page_size_of(cache),
              first_slot}});
      },
      "Commit of a round's rows; scales are [B, Hkv]. Lists of scales and norms: none, one, or one a layer.");
  m.def(
      "commit_round",
      [](const Tensors& rows_k, const Tensors& rows_v, const Tensors& k_caches, const Tensors& v_caches,
         const at::Tensor& valid, const Tensors& dst, const std::vector<int64_t>& counts, const Optional& pending_slot,
         const Optional& promote_dst, const Optional& scratch_dst, const Optional& hidden, const Optional& next_hidden,
         const Optional& lengths, const Optional& live, const std::vector<int64_t>& first_slot,
         const std::vector<Optional>& k_scale, const std::vector<Optional>& v_scale, const at::Tensor& error) {
        std::vector<CommitLayer> layers;
        std::vector<CommitCache> caches;
        layers.reserve(2 * rows_k.size());
        caches.reserve(counts.size());
        size_t layer = 0;
        for (size_t c = 0; c < counts.size(); ++c) {
          const at::Tensor& cache = k_caches[layer];
          caches.push_back({view(dst[c]),
                            {},
                            {},
                            {},
                            slots_of(cache),
                            page_size_of(cache),
                            first_slot[first_slot.size() > 1 ? c : 0]});
          for (int64_t i = 0; i < counts[c]; ++i, ++layer) {
            const auto of = [&](const std::vector<Optional>& list) {
              return list.empty() ? Tensor{} : view(list[layer]);
            };
            const auto owner = static_cast<int64_t>(c);
            layers.push_back({view(rows_k[layer]), view(k_caches[layer]), of(k_scale), {}, false, owner});
            layers.push_back({view(rows_v[layer]), view(v_caches[layer]), of(v_scale), {}, false, owner});
          }
        }
        caches.back().pending_slot = view(pending_slot);
        caches.back().promote_dst = view(promote_dst);
        caches.back().scratch_dst = view(scratch_dst);
        CommitKV a{};
        a.valid = view(valid);
        a.hidden = view(hidden);
        a.next_hidden = view(next_hidden);
        a.lengths = view(lengths);
        a.live = view(live);
        a.error = view(error);
        run(a, layers, caches);
      },
      "Commit of a round's rows to caches of `counts[c]` layers each; scales are none, or [B, Hkv] or None a layer.");
}

}  // namespace dmtp
