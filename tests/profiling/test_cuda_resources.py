"""What nvcc says of the CUDA kernels: no spills, and rows that are copied 16 bytes at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from profiling import cuda_resources

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")


def test_no_kernel_of_the_commit_spills_and_rows_are_loaded_wide() -> None:
    (source,) = (s for s in cuda_resources.sources() if s.name == "commit_kv.cu")
    found = {usage.kernel: usage for usage in cuda_resources.usages(source, 90)}
    copies = [usage for name, usage in found.items() if name.startswith("commit_copy_kernel<uint4")]
    assert len(copies) == 2 and all(usage.load_bits == 128 for usage in copies)
    assert len(found) == 8 and not any(usage.faults() for usage in found.values())


def test_a_source_that_does_not_compile_is_said(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void wrong_kernel() { nothing(); }\n")
    with pytest.raises(RuntimeError, match=r"nvcc does not compile wrong.cu, sm_80:\n.*nothing"):
        cuda_resources.usages(source, 80)
