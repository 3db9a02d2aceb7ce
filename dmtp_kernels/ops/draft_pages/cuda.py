"""The temporary page tables on the compiled CUDA kernel, which is called as the CPU's is."""

from __future__ import annotations

from functools import partial

from dmtp_kernels import backends
from dmtp_kernels.ops.draft_pages import cpu

draft_page_table = partial(cpu.draft_page_table, library=backends.cuda_library)
draft_page_table_from_slots = partial(cpu.draft_page_table_from_slots, library=backends.cuda_library)
