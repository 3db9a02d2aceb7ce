#include "cpu/block_attention.h"

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;

}  // namespace

void bind_block_attention(py::module_& m) {
  m.def(
      "block_attention",
      [](const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& page_table,
         const at::Tensor& ctx_len, const Optional& block_k, const Optional& block_v, const Optional& block_len,
         int64_t window, bool by_query, bool block_causal, const Optional& valid_from, double scale,
         const Optional& k_scale, const Optional& v_scale, double soft_cap, const Optional& sink, const at::Tensor& out,
         const at::Tensor& lse) {
        BlockAttention a{};
        a.q = view(q);
        a.k_cache = view(k_cache);
        a.v_cache = view(v_cache);
        a.page_table = view(page_table);
        a.ctx_len = view(ctx_len);
        a.block_k = view(block_k);
        a.block_v = view(block_v);
        a.block_len = view(block_len);
        a.valid_from = view(valid_from);
        a.k_scale = view(k_scale);
        a.v_scale = view(v_scale);
        a.sink = view(sink);
        a.window = window;
        a.by_query = by_query;
        a.block_causal = block_causal;
        a.scale = static_cast<float>(scale);
        a.soft_cap = static_cast<float>(soft_cap);
        a.out = view(out);
        a.lse = view(lse);
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        block_attention(a);
      },
      "Block attention of tensors that are not float64; scales are [B, Hkv], window < 0: no limit, soft_cap 0: none.");
}

}  // namespace dmtp
