#include "cpu/advance.h"

#include <pybind11/stl.h>

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {

void bind_advance(py::module_& m) {
  m.def(
      "advance_round",
      [](const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& tables,
         const std::vector<int64_t>& page_sizes, const std::optional<at::Tensor>& grants, int64_t mask_id,
         int64_t first_page, const std::vector<at::Tensor>& outputs) {
        Advance a{};
        Tensor* const moved[] = {&a.length, &a.anchor, &a.budget, &a.finished, &a.commit_len, &a.bonus, &a.ended};
        for (size_t i = 0; i < std::size(moved); ++i) {
          *moved[i] = view(state.at(i));
        }
        a.num_tables = static_cast<int64_t>(tables.size());
        for (size_t t = 0; t < tables.size(); ++t) {
          a.tables[t] = view(tables[t]);
          a.page_sizes[t] = page_sizes[t];
        }
        a.grants = view(grants);
        a.mask_id = mask_id;
        a.first_page = first_page;
        Tensor* const written[] = {&a.positions, &a.token_positions, &a.context_len, &a.history_len,
                                   &a.slots,     &a.previous_slots,  &a.block_ids,   &a.error};
        for (size_t i = 0; i < std::size(written); ++i) {
          *written[i] = view(outputs.at(i));
        }
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        advance(a);
      },
      "A round's bookkeeping: state [B] x7, up to three page tables, outputs in the op's order.");
}

}  // namespace dmtp
