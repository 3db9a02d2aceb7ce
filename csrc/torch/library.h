#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "dmtp/parallel.h"
#include "dmtp/types.h"

namespace dmtp {

// A kernel's view of a CPU tensor of up to four dimensions. Shapes are the op's to check, before this is called.
Tensor view(const at::Tensor&);
Tensor view(const std::optional<at::Tensor>&);

// at::parallel_for and how many threads it may use now.
ParallelFor parallel_for();

}  // namespace dmtp
