#include "cpu/t1_prep.h"

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;

T1Fusion fusion_of(const std::string& mode) {
  return mode == "none" ? T1Fusion::none : mode == "replace" ? T1Fusion::replace : T1Fusion::residual;
}

bool any_fp64(const T1Prep& p) {
  for (const Tensor* t : {&p.hidden, &p.embedding, &p.mask_embed, &p.folded, &p.first, &p.up, &p.norm_e, &p.norm_m}) {
    if (t->dtype == DType::f64) {
      return true;
    }
  }
  return false;
}

}  // namespace

void bind_t1_prep(py::module_& m) {
  m.def(
      "t1_prep",
      [](const at::Tensor& anchor_ids, const at::Tensor& token, const Optional& status, const at::Tensor& hidden,
         const at::Tensor& embedding, const Optional& mask_embed, const Optional& folded, const Optional& first,
         const Optional& up, const Optional& norm_e, const Optional& norm_m, const std::string& mode, bool at_masks,
         double eps_e, double eps_m, double offset_e, double offset_m, int64_t anchors, int64_t num_masks,
         int64_t mask_id, double embed_scale, int64_t embedding_start, int64_t num_embeddings, const at::Tensor& t1,
         const at::Tensor& block_ids, const at::Tensor& block_embeds, const at::Tensor& certified) {
        T1Prep p{};
        p.anchor_ids = view(anchor_ids);
        p.token = view(token);
        p.status = view(status);
        p.hidden = view(hidden);
        p.embedding = view(embedding);
        p.mask_embed = view(mask_embed);
        p.folded = view(folded);
        p.first = view(first);
        p.up = view(up);
        p.norm_e = view(norm_e);
        p.norm_m = view(norm_m);
        p.fusion = fusion_of(mode);
        p.at_masks = at_masks;
        p.eps_e = static_cast<float>(eps_e);
        p.eps_m = static_cast<float>(eps_m);
        p.offset_e = static_cast<float>(offset_e);
        p.offset_m = static_cast<float>(offset_m);
        p.anchors = anchors;
        p.num_masks = num_masks;
        p.mask_id = mask_id;
        p.embed_scale = static_cast<float>(embed_scale);
        p.embedding_start = embedding_start;
        p.num_embeddings = num_embeddings;
        p.t1 = view(t1);
        p.block_ids = view(block_ids);
        p.block_embeds = view(block_embeds);
        p.certified = view(certified);
        if (any_fp64(p)) {
          return false;
        }
        if (p.block_embeds.size[2] > 1 && p.block_embeds.stride[2] != 1) {
          throw std::invalid_argument("block_embeds: last dimension must be contiguous (stride 1)");
        }
        p.parallel = parallel_for();
        py::gil_scoped_release release;
        t1_prep(p);
        return true;
      },
      "T1 preparation after the selection; False, with nothing written, where a tensor is float64.");
}

}  // namespace dmtp
