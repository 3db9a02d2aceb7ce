"""Both launches of block attention together against keys, values, queries and outputs: partial sums count."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops.block_attention.spec import SPEC, TRAFFIC
from dmtp_kernels.testing import interpreter
from profiling import traffic as tool

interpreter.install()
# one request alone is split for the device's programs: what its partial sums cost is printed, not hidden
LIMITS = {"mtp_16k": 1.05, "mtp_fp8_16k": 1.05, "mtp_4k_alone": 1.30}


@pytest.mark.parametrize("name", LIMITS)
def test_partial_sums_are_few(name: str) -> None:
    (case,) = (t for t in TRAFFIC if t.case.name == name)
    rows = tool.measure(case, tool.run_op("block_attention"))
    assert len(rows) == 2
    floor = SPEC.floor_bytes(*case.case.make(torch.Generator().manual_seed(7)))
    ratio = sum(row.bytes for row in rows) / floor
    assert 1.0 < ratio <= LIMITS[name], ratio
