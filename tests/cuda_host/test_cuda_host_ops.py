"""Every CUDA kernel against its op's reference, bit for bit, on the CPU: random schedules, fences, missing barriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels.ops._spec import Case
from tests.cuda_host import host
from tests.cuda_host.cases import Compared, cuda_ops, spec_cases

SCHEDULES = 100
DRAWS = 4  # of a case's inputs: the schedules are dealt among them
LAUNCHES = {"accept_rejection": 2, "accept_block": 3}  # of the others: one
FEW = 12  # schedules of which one shows that a barrier is missing
CASES = list(spec_cases())
OPS = sorted({op for op, _ in CASES})


@pytest.fixture(autouse=True)
def on_fibers() -> Iterator[None]:
    with host.emulated(*cuda_ops()):
        yield


def crowded(op: str, inputs: tuple[Any, ...], draw: int) -> tuple[Any, ...]:
    """Slots and grants from so few that several writes go to each, some of them outside; blocks of three candidates."""
    generator = torch.Generator().manual_seed(draw)
    made = list(inputs)

    def few(like: Any) -> Any:
        if isinstance(like, list):
            return [few(t) for t in like]
        if like is None:
            return None
        slots = torch.randint(-1, 12, like.shape, generator=generator)
        return torch.where(slots == 11, 10**6, slots).to(like.dtype)

    slots = {"commit_kv": range(5, 9), "commit_round": (5, 7, 8, 9)}
    for i in slots.get(op, ()):
        made[i] = few(made[i])
    if op == "advance_round" and made[10] is not None:
        made[10] = made[10].repeat(1, 6, 1)
        made[10][:, :, 1] = made[10][:, :, 1] % 2 + 1
        made[10][:, :, 0] = made[10][:, :, 0] % 2
    if op == "accept_block":
        # of which often none is kept, by sums that more warps than the deciding one have made
        made[0], made[1], made[2] = made[0][:, :4], made[1][:, :4], torch.ones_like(made[2])
        made[7], made[11] = (None if t is None else t[:, :3] for t in (made[7], made[11]))
    return tuple(made)


def compared(op: str, case: Case) -> Iterator[Compared]:
    for draw in range(DRAWS):
        inputs = case.make(torch.Generator().manual_seed(draw))
        yield Compared(op, inputs if draw % 2 == 0 else crowded(op, inputs, draw))


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}-{case.name}" for op, case in CASES])
def test_equals_the_reference_under_every_schedule(op: str, case: Case) -> None:
    for draw, one in enumerate(compared(op, case)):
        for seed in range(draw, SCHEDULES, DRAWS):
            # the order of the threads and its reverse come with every draw of the inputs
            assert one.differs(seed if seed >= 2 * DRAWS else seed // DRAWS) is None, (draw, seed)


# sampling's barriers: test_cuda_host_sampling.py, whose rows are long enough for all of them
@pytest.mark.parametrize("op", sorted({*OPS} - {"sample_rows", "accept_rejection", "accept_block"}))
def test_without_any_barrier_some_schedule_differs(op: str) -> None:
    every = [one for name, case in CASES if name == op for one in compared(op, case)]
    host.barriers()
    assert all(one.differs(0) is None for one in every)
    for barrier in host.barriers():
        with host.without(barrier):
            assert any(one.differs(seed) for seed in range(FEW) for one in every), barrier
    assert all(one.differs(1) is None for one in every)


@pytest.mark.parametrize("op", OPS)
def test_as_few_launches_as_said(op: str) -> None:
    case = next(case for name, case in CASES if name == op)
    assert Compared(op, case.make(torch.Generator().manual_seed(0))).differs(5) is None
    assert host.launches() == LAUNCHES.get(op, 1)
