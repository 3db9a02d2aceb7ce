"""The byte counts of `profiling.traffic` equal counts by hand, and each kind of waste exceeds the limit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from dmtp_kernels.ops._spec import Case, Traffic
from dmtp_kernels.ops._variant import Variant
from dmtp_kernels.testing import interpreter
from profiling import traffic as tool
from tests.testing import kernels

interpreter.install()
BF16 = torch.bfloat16
V, H = 40, 256
FULL = 248_320


def inputs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    memory = torch.zeros(V * H + V + H, dtype=BF16)  # rows start at sectors
    return memory[: V * H].reshape(V, H), torch.ones(H, dtype=BF16), torch.zeros(V)


def floor(w: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> int:
    return w.nbytes + h.nbytes + y.nbytes


def of(kernel: str, scale: float = FULL / V, **options: Any) -> Traffic:
    return Traffic("gemv", Case("decode", "scaled down in V", inputs), {kernel: floor}, scale, **options)


def gemv(w: torch.Tensor, h: torch.Tensor, y: torch.Tensor, *, rows: int = 4) -> None:
    kernels.row_sum_kernel[(-(-V // rows),)](w, h, y, V, w.stride(0), H=H, ROWS=rows, BLOCK=64)


def test_a_single_pass_moves_what_it_must() -> None:
    (row,) = tool.measure(of("row_sum_kernel"), gemv)
    # the vector is read by all ten programs and comes from the cache nine times
    assert row.moved == V * H * 2 + 10 * H * 2 + V * 4
    assert row.tensors == {"w": V * H * 2, "h": H * 2, "y": V * 4}
    assert row.bytes == row.floor == V * H * 2 + H * 2 + V * 4
    assert row.ratio == 1.0 and row.within and row.launches == 1


def test_a_second_read_of_a_large_tensor_counts_and_of_a_small_one_does_not() -> None:
    def run(w: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> None:
        kernels.two_pass_kernel[(V,)](w, y, V, w.stride(0), H=H, BLOCK=64)

    (large,) = tool.measure(of("two_pass_kernel"), run)
    assert large.tensors["w"] == 2 * V * H * 2 and not large.within
    (small,) = tool.measure(of("two_pass_kernel", scale=1.0), run)
    assert small.tensors["w"] == V * H * 2 and small.moved == large.moved
    # what grows with the vocabulary is said per argument
    (named,) = tool.measure(of("two_pass_kernel", unscaled=("w",)), run)
    assert named.tensors["w"] == V * H * 2


def test_a_few_bytes_of_each_sector_count_as_sectors() -> None:
    def run(w: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> None:
        kernels.column_kernel[(V,)](w, y, w.stride(0), V, ROWS=64)

    (row,) = tool.measure(of("column_kernel"), run)
    assert row.moved == V * V * 2 + V * 4
    assert row.tensors["w"] == V * V * 32 and not row.within


def test_masked_lanes_move_nothing_and_partial_sectors_count_whole() -> None:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return torch.zeros(13), torch.zeros(13)

    case = Traffic("copy", Case("odd", "13 of 16 lanes", make), {"convert_kernel": lambda x, y: 104})
    (row,) = tool.measure(case, lambda x, y: kernels.convert_kernel[(1,)](x, y, 13, B=16))
    assert row.moved == 104
    assert all(n in (64, 96) for n in row.tensors.values())  # 52 bytes are two or three sectors


def test_atomics_read_and_write() -> None:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return torch.zeros(64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)

    def run(x: torch.Tensor, greatest: torch.Tensor, total: torch.Tensor) -> None:
        kernels.atomic_kernel[(4,)](x, greatest[:4], total[:4], N=16)

    (row,) = tool.measure(Traffic("atomic", Case("a", "b", make), {"atomic_kernel": None}), run)
    assert row.tensors["x"] == 256 and row.tensors["greatest"] in (64, 128)
    assert row.moved == 256 + 2 * 256 + 2 * 4 * 12 * 4 and row.floor is None and row.ratio is None and row.within


def test_launches_of_one_kernel_add_up() -> None:
    def run(*tensors: torch.Tensor) -> None:
        gemv(*tensors)
        gemv(*tensors, rows=8)

    (row,) = tool.measure(of("row_sum_kernel"), run)
    assert row.launches == 2 and row.ratio == 2.0


def test_a_kernel_nobody_listed_is_an_error() -> None:
    case = Traffic("gemv", Case("decode", "", inputs), {})
    with pytest.raises(ValueError, match=r"launches \['row_sum_kernel'\], its Traffic lists \[\]"):
        tool.measure(case, gemv)


def test_launches_are_planned_for_a_gpu() -> None:
    from dmtp_kernels.ops._device import processors

    seen = []

    def run(*tensors: torch.Tensor) -> None:
        seen.append(processors(tensors[0].device))
        gemv(*tensors)

    tool.measure(of("row_sum_kernel"), run)
    assert seen == [tool.PROCESSORS] and processors(torch.device("cpu")) == 0


GEMV = Variant(
    name="row_sum_kernel/bf16",
    kernel="tests.testing.kernels:row_sum_kernel",
    signature={"w": "*bf16", "h": "*bf16", "y": "*fp32", "rows": "i32", "stride": "i32"},
    constants={"H": H, "ROWS": 4, "BLOCK": 64},
    aligned=("w", "h", "y", "stride"),
)


def test_a_launch_is_found_among_the_compiled_variants() -> None:
    (row,) = tool.measure(of("row_sum_kernel"), gemv, [replace(GEMV, num_warps=8), GEMV])
    assert row.variant == "row_sum_kernel/bf16" and row.differs == []
    (row,) = tool.measure(of("row_sum_kernel"), gemv, [replace(GEMV, kernel="x:other_kernel")])
    assert row.variant is None and row.differs == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_warps": 8}, "num_warps is 4"),
        ({"options": {"maxnreg": 64}}, "maxnreg is None"),
        ({"constants": {"H": H, "ROWS": 8, "BLOCK": 64}}, "ROWS is 4"),
        ({"signature": {**GEMV.signature, "w": "*fp16"}}, "w is *bf16"),
        ({"aligned": (*GEMV.aligned, "rows")}, "rows is not divisible by 16"),
    ],
)
def test_a_launch_that_was_not_compiled_shows(
    change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tool.measure(of("row_sum_kernel"), gemv, [replace(GEMV, **change)])
    assert rows[0].variant is None and rows[0].differs == [message]
    assert tool.report(rows, as_json=False) == 0
    assert f"not as profiling.resources compiles it: {message}" in capsys.readouterr().out


def test_report_says_the_rule_and_fails_beyond_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tool.measure(of("row_sum_kernel"), gemv)
    assert tool.report(rows, as_json=False) == 0
    text = capsys.readouterr().out
    assert "16 MiB" in text and "row_sum_kernel" in text and "EXCEEDED" not in text
    assert tool.report(tool.measure(of("row_sum_kernel", limit=0.99), gemv), as_json=False) == 1
    assert "EXCEEDED" in capsys.readouterr().out
    assert tool.report(rows, as_json=True) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert {"op", "kernel", "case", "bytes", "floor", "ratio", "moved"} <= set(entry)
    assert entry["ratio"] == 1.0 and entry["op"] == "gemv"
