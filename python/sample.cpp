#include "cpu/sample.h"

#include "bindings.h"
#include "torch/library.h"

namespace py = pybind11;

namespace dmtp {
namespace {

using Optional = std::optional<at::Tensor>;

}  // namespace

void bind_sample(py::module_& m) {
  m.def(
      "sample_rows",
      [](const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& seed, const at::Tensor& position,
         const Optional& top_k, const Optional& top_p, std::optional<int64_t> num_valid, int64_t stream,
         const at::Tensor& token, const at::Tensor& status) {
        SampleRows a{};
        a.logits = view(logits);
        a.temperature = view(temperature);
        a.seed = view(seed);
        a.position = view(position);
        a.top_k = view(top_k);
        a.top_p = view(top_p);
        a.num_valid = num_valid.value_or(logits.size(1));
        a.stream = static_cast<uint32_t>(stream);
        a.token = view(token);
        a.status = view(status);
        a.parallel = parallel_for();
        py::gil_scoped_release release;
        sample_rows(a);
      },
      "One token per row of logits.");
}

}  // namespace dmtp
