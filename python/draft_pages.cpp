#include "cpu/draft_pages.h"

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;

}  // namespace

void bind_draft_pages(py::module_& m) {
  m.def(
      "draft_pages",
      [](const at::Tensor& source, const Optional& pool, const at::Tensor& ctx_len, const Optional& valid_from,
         int64_t window, int64_t page_size, int64_t block_slots, bool slots, const at::Tensor& draft_table,
         const at::Tensor& draft_len, const at::Tensor& kv_skip) {
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
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        draft_pages(a);
      },
      "Temporary page tables from page tables [R, M], or from token slots.");
}

}  // namespace dmtp
