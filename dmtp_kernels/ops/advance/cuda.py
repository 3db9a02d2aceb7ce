"""The round's bookkeeping on the compiled CUDA kernel, which is called as the CPU's is."""

from __future__ import annotations

from functools import partial

from dmtp_kernels import backends
from dmtp_kernels.ops.advance import cpu

advance_round = partial(cpu.advance_round, library=backends.cuda_library)
