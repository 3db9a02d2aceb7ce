"""The commit's one launch against the rows it moves, and what was compiled against what is launched."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops.commit_kv.config import variants
from dmtp_kernels.ops.commit_kv.spec import COMMIT, TRAFFIC
from dmtp_kernels.testing import interpreter
from profiling import traffic as tool

interpreter.install()
CASES = pytest.mark.parametrize("case", TRAFFIC, ids=[t.case.name for t in TRAFFIC])


@CASES
def test_nothing_moves_twice(case: tool.Traffic) -> None:
    (row,) = tool.measure(case, tool.run_op(case.op), variants())
    assert row.launches == 1 and row.within
    assert row.variant is not None, row.differs
    rows, caches = (1 + (name in row.tensors) for name in ("rows_k[1]", "k_caches[1]"))
    assert rows == caches  # every layer's tensors are counted


def test_a_second_read_of_the_rows_would_show() -> None:
    (case,) = (t for t in TRAFFIC if t.case.name == "alone")
    inputs = case.case.make(torch.Generator().manual_seed(7))
    assert COMMIT.floor_bytes(*inputs) == case.kernels["commit_kv_kernel"](*inputs)  # type: ignore[misc]
    (row,) = tool.measure(case, lambda *given: [tool.run_op("commit_kv")(*given) for _ in range(2)])
    assert row.launches == 2 and not row.within
