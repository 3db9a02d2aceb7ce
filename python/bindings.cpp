#include "bindings.h"

#include <pybind11/stl.h>

#include <sstream>
#include <utility>

#include "build_info.h"
#include "cpu/capability.h"
#include "torch/library.h"

namespace py = pybind11;

namespace {

// The parts of [0, n) that the threads got, for the test that they are torch's.
std::vector<std::pair<int64_t, int64_t>> parallel_parts(int64_t n, int64_t grain) {
  std::vector<std::pair<int64_t, int64_t>> parts(n, {0, 0});
  dmtp::parallel_for()(n, grain, [&](int64_t begin, int64_t end) { parts[begin] = {begin, end}; });
  std::erase_if(parts, [](const auto& p) { return p.second == 0; });
  return parts;
}

py::dict build_info() {
  py::dict capabilities;
  for (const auto& [name, flags] : {DMTP_CAPABILITY_FLAGS}) {
    capabilities[name] = flags;
  }
  py::list architectures;
  std::istringstream words(DMTP_CUDA_ARCHITECTURES);
  for (std::string word; words >> word;) {
    architectures.append(word);
  }
  py::dict info;
  info["version"] = DMTP_VERSION;
  info["torch"] = DMTP_TORCH;
  info["compiler"] = DMTP_COMPILER;
  info["flags"] = DMTP_FLAGS;
  info["capabilities"] = capabilities;
  info["cuda_compiler"] = DMTP_CUDA_COMPILER;
  info["cuda_architectures"] = architectures;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled CPU kernels of dmtp_kernels; the ops' cpu backends call them with checked arguments.";
  m.def("capability", [] { return dmtp::name_of(dmtp::capability()); }, "Instruction set in force.");
  m.def("set_capability", &dmtp::set_capability, py::arg("name"), "Run at a lower instruction set, or back.");
  m.def("capabilities", &dmtp::capabilities, "Instruction sets this processor runs, lowest first.");
  m.def("build_info", &build_info,
        "What the build used; cuda_compiler and cuda_architectures are empty where it made no CUDA kernels.");
  m.def("parallel_parts", &parallel_parts, py::arg("n"), py::arg("grain"), "How n items are cut over the threads.");
  dmtp::bind_accept(m);
  dmtp::bind_advance(m);
  dmtp::bind_block_attention(m);
  dmtp::bind_calls(m);
  dmtp::bind_commit_kv(m);
  dmtp::bind_draft_pages(m);
  dmtp::bind_lm_head(m);
  dmtp::bind_sample(m);
  dmtp::bind_t1_prep(m);
}
