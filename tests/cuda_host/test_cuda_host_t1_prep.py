"""The cooperative kernel of T1 preparation, and its phases as kernels of their own, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels.ops.lm_head import pack_lm_head
from dmtp_kernels.ops.t1_prep import cuda
from dmtp_kernels.ops.t1_prep.spec import SPECS
from tests.cuda_host import host
from tests.cuda_host.prep_cases import BF16, CASES, FP32, LAUNCHES, OP, Prepared, prep_case, prepared

SCHEDULES = 100
DRAWS = 2  # of a case's inputs: the schedules are dealt among them
PHASED = 8  # schedules of the kernels that are launched one after another
FEW = 18  # schedules of which one shows that a barrier is missing


@pytest.fixture(autouse=True)
def on_fibers() -> Iterator[None]:
    with host.emulated(OP):
        yield


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_under_every_schedule(name: str) -> None:
    for draw in range(DRAWS):
        one = Prepared(prep_case(**CASES[name], draw=draw))
        for seed in range(draw, SCHEDULES, DRAWS):
            assert one.differs(seed) is None, (draw, seed)
            assert host.launches() == LAUNCHES.get(name, 1)


@pytest.mark.parametrize("name", CASES)
def test_the_phases_as_kernels_give_the_same_bits(name: str) -> None:
    one = Prepared(prep_case(**CASES[name]))
    assert one.differs(4) is None
    for seed in range(PHASED):
        assert one.differs(seed, cuda.fused_t1_prep_in_phases) is None, seed
    assert host.launches() > LAUNCHES.get(name, 1)


@pytest.mark.parametrize("case", SPECS[0].cases, ids=lambda case: str(case.name))
def test_the_cases_of_the_spec(case: Any) -> None:
    one = Prepared(case.make(torch.Generator().manual_seed(1)))
    for seed in range(SCHEDULES):
        assert one.differs(seed) is None, seed


def test_without_any_barrier_or_wait_some_schedule_differs() -> None:
    every = list(prepared())
    host.barriers()
    assert all(one.differs(seed) is None for _, one in every for seed in (0, 4))
    found = host.barriers()
    kinds = {"grid.cuh": 2, "t1_prep.cu": 4, "t1_stream.cuh": 2, "t1_norms.cuh": 1, "t1_block.cuh": 1}
    assert {file: sum(b.startswith(file) for b in found) for file in kinds} == kinds and len(found) == 10
    for barrier in found:
        with host.without(barrier):
            assert any(one.differs(seed) for seed in range(FEW) for _, one in every), barrier
    assert all(one.differs(1) is None for _, one in every)


def test_requests_alone_and_together_have_the_same_bits() -> None:
    inputs = prep_case(**CASES["int8"])
    whole = Prepared(inputs)
    assert whole.differs(3) is None
    assert whole._first is not None
    for b in (0, 4, 8):
        anchor, h = inputs[0][b : b + 1], inputs[1][b : b + 1]
        one = Prepared((anchor, h, *inputs[2:]))
        assert one.differs(3) is None
        assert one._first is not None and torch.equal(one._first[0], whole._first[b])


def test_heads_without_a_screen_here_select_by_their_own_op() -> None:
    for format in ("int8_g64", "int4_g32"):
        one = Prepared(prep_case(2, 8, 64, format=format, mode="none"))
        assert one.differs(2) is None


def test_a_state_that_reaches_every_row_is_scanned() -> None:
    inputs = list(prep_case(3, 8, 40, 200, mode="none"))
    inputs[0] = torch.tensor([1, 2, 3])
    inputs[1][0], inputs[1][1, 7] = 0, float("nan")
    one = Prepared(tuple(inputs))
    for seed in range(6):
        assert one.differs(seed) is None


@pytest.mark.parametrize(("format", "dtype"), [("int8", BF16), ("dense", BF16), ("dense", FP32)], ids=str)
def test_rows_that_a_screen_takes_for_each_other(format: str, dtype: torch.dtype) -> None:
    # apart by less than codes, or sums in another order, can tell
    generator = torch.Generator().manual_seed(7)
    batch, rows, hidden = 8, 60, 72
    weight = 1 + 2.0**-6 * torch.randint(0, 2, (rows, hidden), generator=generator) / 2
    states = torch.randn(batch, hidden, generator=generator)
    weight[:, ::9], states[:, ::9] = 1.0, 2.0**18 * torch.tensor([1, -1] * 4)
    inputs = list(prep_case(batch, 8, hidden, rows, dtype=dtype, mode="none"))
    head = pack_lm_head(weight.to(dtype), format=format)
    inputs[0], inputs[1] = torch.arange(batch), states.to(dtype)
    inputs[7:14] = head.tensors()
    inputs[19:25] = head.scalars().values()
    one = Prepared(tuple(inputs))
    for seed in range(4):
        assert one.differs(seed) is None
