"""Accesses outside the tensors of a launch and dependence on program order are caught, right kernels pass."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from dmtp_kernels.testing import interpreter
from dmtp_kernels.testing.capture import CaptureError, capture_safe
from dmtp_kernels.testing.watch import Access, OutOfBounds, bounds_checked, outside, shuffled_programs, watch
from tests.testing import kernels

interpreter.install()
BF16 = torch.bfloat16


def test_a_right_kernel_passes_on_strided_views() -> None:
    around = torch.full((9, 70), float("nan"), dtype=BF16)
    w, h, y = around[1:8, 2:68].copy_(torch.ones(7, 66)), torch.ones(66, dtype=BF16), torch.zeros(7)
    with bounds_checked():
        kernels.row_sum_kernel[(2,)](w, h, y, 7, w.stride(0), H=66, ROWS=4, BLOCK=16)
    assert y.eq(66).all()


def test_an_over_read_that_changes_no_result_is_caught() -> None:
    w, y = torch.ones(4, 24), torch.zeros(4)
    kernels.over_read_kernel[(3,)](w, y, 4, 24, H=24, BLOCK=32)  # reads the next row: the answer is right
    assert y[:3].eq(24).all()
    message = r"over_read_kernel, program \(3, 0, 0\): load .* at 8 of 32 .* outside w "
    with pytest.raises(OutOfBounds, match=message), bounds_checked():
        kernels.over_read_kernel[(4,)](w, y, 4, 24, H=24, BLOCK=32)


def test_a_read_of_a_row_gap_is_caught() -> None:
    w, y = torch.ones(4, 32)[:, :24], torch.zeros(4)
    message = r"program \(0, 0, 0\).* 8 of 32 .* strides \[32, 1\]\), first at byte 96"
    with pytest.raises(OutOfBounds, match=message), bounds_checked():
        kernels.over_read_kernel[(1,)](w, y, 4, 32, H=24, BLOCK=32)


def test_another_argument_is_no_excuse() -> None:
    # one allocation: the over-read of w lands in y
    both = torch.zeros(64)
    w, y = both[:24].reshape(1, 24), both[24:]
    with pytest.raises(OutOfBounds, match="outside w"), bounds_checked():
        kernels.over_read_kernel[(1,)](w, y, 1, 24, H=24, BLOCK=32)


def test_an_offset_that_wraps_at_32_bits_is_caught_before_the_read() -> None:
    # 14 GiB of addresses, a few pages of memory
    sparse = mmap.mmap(-1, 7 * 2**31 + 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    x, y = torch.frombuffer(sparse, dtype=torch.float32).as_strided((8,), (2**29,)), torch.zeros(8)
    with bounds_checked():
        kernels.narrow_offset_kernel[(1,)](x, y, 2**29, N=4)
        with pytest.raises(OutOfBounds, match="at 4 of 8 addresses outside x"):
            kernels.narrow_offset_kernel[(1,)](x, y, 2**29, N=8)


def test_stores_and_atomics_are_checked() -> None:
    x, y = torch.zeros(64, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(OutOfBounds, match=r"atomic of 4 bytes .* outside greatest"), bounds_checked():
        kernels.atomic_kernel[(4,)](x, y, torch.zeros(4, dtype=torch.int32), N=16)
    with pytest.raises(OutOfBounds, match=r"store of 4 bytes .* outside y"), bounds_checked():
        kernels.convert_kernel[(1,)](torch.zeros(8), torch.zeros(7), 8, B=8)


def test_masked_off_lanes_touch_nothing() -> None:
    with bounds_checked():
        kernels.masked_kernel[(1,)](torch.zeros(1), torch.zeros(8), 1, N=8)


def test_pointers_read_from_memory_must_lie_in_a_known_tensor() -> None:
    rows = [torch.full((8,), float(i), dtype=BF16) for i in range(3)]
    table, y = torch.tensor([r.data_ptr() for r in rows]), torch.zeros(24)
    with bounds_checked(*rows):
        kernels.table_kernel[(3,)](table, y, N=8)
    assert y.reshape(3, 8)[2].eq(2).all()
    with pytest.raises(OutOfBounds, match="outside every argument"), bounds_checked(*rows[:2]):
        kernels.table_kernel[(3,)](table, y, N=8)


def test_the_fault_is_not_carried_out() -> None:
    memory = torch.zeros(16)
    with pytest.raises(OutOfBounds), bounds_checked():
        kernels.convert_kernel[(1,)](torch.ones(8), memory[:7], 8, B=8)
    assert memory.eq(0).all()
    kernels.convert_kernel[(1,)](torch.ones(8), memory[:8], 8, B=8)  # nobody watches any more
    assert memory[:8].eq(1).all()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 4), (4, 1, 5)])
def test_outside_is_the_elements_of_the_view(shape: tuple[int, ...]) -> None:
    base = torch.zeros(400, dtype=torch.int32)
    for view in (
        base[: torch.Size(shape).numel()].reshape(shape),
        torch.as_strided(base, shape, (90, 27, 3)[3 - len(shape) :], 7),
        torch.as_strided(base, shape, tuple(reversed(torch.empty(shape[::-1]).stride())), 5),
    ):
        inside = {base.data_ptr() + 4 * int(i) for i in _elements(view)}
        every = np.arange(base.data_ptr() - 8, base.data_ptr() + 1700, 4).astype(np.uint64)
        assert {int(a) for a in every[~outside(every, 4, view)]} == inside
        assert outside(every + np.uint64(2), 4, view)[~np.isin(every + 4, list(inside))].all()


def _elements(view: torch.Tensor) -> list[int]:
    index = torch.arange(400, dtype=torch.int32)
    return torch.as_strided(index, view.shape, view.stride(), view.storage_offset()).flatten().tolist()


def test_accesses_name_their_argument_and_their_bytes() -> None:
    seen: list[Access] = []
    w, h, y = torch.ones(6, 32, dtype=BF16), torch.ones(32, dtype=BF16), torch.zeros(6)
    with watch(seen.append):
        kernels.row_sum_kernel[(2,)](w, h, y, 6, 32, H=32, ROWS=4, BLOCK=16)
    moved = {
        name: sum(a.addresses.size * a.size for a in seen if a.owner() == name and a.kind == kind)
        for name, kind in (("w", "load"), ("h", "load"), ("y", "store"))
    }
    assert moved == {"w": w.nbytes, "h": 2 * h.nbytes, "y": y.nbytes}
    assert {a.launch.kernel for a in seen} == {"row_sum_kernel"} and len({id(a.launch) for a in seen}) == 1
    assert {a.launch.program for a in seen} <= {(0, 0, 0), (1, 0, 0)}


def test_a_kernel_that_needs_an_order_of_its_programs_is_caught() -> None:
    def run() -> list[float]:
        x = torch.zeros(17)
        kernels.ordered_kernel[(16,)](x)
        return x.tolist()

    right = [float(i) for i in range(17)]
    assert run() == right  # the interpreter's own order hides the fault
    with shuffled_programs(0):
        assert run() != right
    assert run() == right


def test_shuffled_programs_each_run_once() -> None:
    w, h, y = torch.rand(50, 24), torch.rand(24), torch.zeros(50)
    for seed in range(3):
        with shuffled_programs(seed):
            kernels.row_sum_kernel[(13,)](w, h, y.zero_(), 50, 24, H=24, ROWS=4, BLOCK=8)
        torch.testing.assert_close(y, w @ h)


def test_an_interpreted_launch_is_a_launch_for_capture_safety() -> None:
    x, y = torch.rand(8), torch.zeros(8)
    with capture_safe(allocations=False):
        kernels.convert_kernel[(1,)](x, y, 8, B=8)
        with pytest.raises(CaptureError):
            y.tolist()
    assert torch.equal(x, y)
