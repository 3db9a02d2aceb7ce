#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

// One per op: adds its functions to `dmtp_kernels._C`. Arguments come checked, by position.
namespace dmtp {

void bind_accept(pybind11::module_&);
void bind_advance(pybind11::module_&);
void bind_block_attention(pybind11::module_&);
void bind_calls(pybind11::module_&);
void bind_commit_kv(pybind11::module_&);
void bind_draft_pages(pybind11::module_&);
void bind_lm_head(pybind11::module_&);
void bind_sample(pybind11::module_&);
void bind_t1_prep(pybind11::module_&);

}  // namespace dmtp
