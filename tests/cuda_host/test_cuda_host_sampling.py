"""Sampling and the sampled rules where rows are cut into parts: bits, barriers, their own scratch between fences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels.ops import _workspace
from dmtp_kernels.ops.accept import cuda as accept_cuda
from dmtp_kernels.ops.accept.spec import BLOCK
from dmtp_kernels.ops.sample import cuda as sample_cuda
from tests.cuda_host import host
from tests.cuda_host.cases import Compared
from tests.cuda_host.fence import Fence

OPS = ("sample_rows", "accept_rejection", "accept_block")
SCHEDULES = 6  # of a case: rows of several parts take many threads
FEW = 8
VOCAB = 2 * 2048 + 37
NAN, INF = float("nan"), float("inf")
FP32, BF16, HALF, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
# block verification needs q
ROUNDS = [(op, draft) for op in OPS[1:] for draft in ("dense", "listed", "one_hot")][:-1]


class Scratch:
    """Exactly what calls ask for, poisoned, against pages without access."""

    def __init__(self) -> None:
        self.fences: list[Fence] = []
        self.counted: list[torch.Tensor] = []

    def workspace(self, key: str, device: torch.device, nbytes: int) -> torch.Tensor:
        self.fences.append(Fence(nbytes, len(self.fences) % 4 < 2))
        return self.fences[-1].inside.fill_(255)

    def counters(self, key: str, device: torch.device, count: int) -> torch.Tensor:
        self.counted.append(self.workspace(key, device, 4 * count).zero_().view(torch.int32))
        return self.counted[-1]

    def check(self) -> None:
        for fence in self.fences:
            fence.check()
        assert self.counted and not any(counted.any() for counted in self.counted)
        self.fences.clear()
        self.counted.clear()


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scratch]:
    made = Scratch()
    for module in (sample_cuda, accept_cuda):
        monkeypatch.setattr(module, "workspace", made.workspace)
        monkeypatch.setattr(module, "counters", made.counters)
    with host.emulated(*OPS):
        yield made


def rows(dtype: torch.dtype, filtered: bool) -> tuple[Any, ...]:
    """Rows of three parts with every fault, ties across parts, and filters that end among them."""
    n = 10
    logits = (3 * torch.randn(n, VOCAB + 5, generator=torch.Generator().manual_seed(3))).to(dtype)
    logits[:, VOCAB:] = INF
    logits[0, 4000], logits[1], logits[2, [4096, 4100]], logits[3, :4100] = NAN, NAN, INF, -INF
    logits[4] = 0.0
    temperature = torch.tensor([1.0, 1.0, 0.7, 1.0, 1.0, 0.0, 1e-6, 1e-30, 3.0, -1.0])
    top_k = torch.tensor([40, 3, 3, 20, 3000, 5, 0, 7, VOCAB - 1, 2])
    top_p = torch.tensor([0.9, 0.5, 0.5, 1.0, 0.9, NAN, 0.99, 0.0, 0.7, 0.5])
    keyed = (temperature, torch.arange(n) - 4, torch.arange(n) << 31)
    return (logits, *keyed, *((top_k, top_p) if filtered else (None, None)), VOCAB, 0)


def round_of(draft: str, filtered: bool, dtype: torch.dtype = FP32, vocab: int = VOCAB) -> tuple[Any, ...]:
    """Requests that keep from none to all of three candidates, a greedy one, and one whose rows are faulty."""
    batch, width, generator = 6, 4, torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(batch, width, vocab, generator=generator)
    logits[3, :, :3000] = 4.0  # ties across parts, where filters end
    q = torch.softmax(logits[:, :-1] + 0.3 * torch.randn(batch, width - 1, vocab, generator=generator), dim=2)
    ids = q.topk(70, dim=2).indices
    if draft == "one_hot":
        drafts = logits[:, :-1].argmax(dim=2)
    elif draft == "listed":
        picked = torch.randint(0, 70, (batch, width - 1, 1), generator=generator)
        drafts = ids.gather(2, picked)[:, :, 0]
    else:
        drafts = torch.multinomial(q.view(-1, vocab), 1, generator=generator).view(batch, width - 1)
    drafts[0] = logits[0, :-1].argmax(dim=1)
    candidates = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), drafts), dim=1)
    logits[5, 2, vocab // 2] = NAN
    given = {"dense": q.to(dtype), "listed": q.gather(2, ids).to(dtype), "one_hot": None}[draft]
    return (
        candidates, logits.to(dtype), torch.tensor([0.0, 1.0, 0.6, 1.0, 1.0, 1.0]), torch.arange(batch) + 5,
        torch.arange(batch) * 3, torch.tensor([7, 8]), torch.tensor([9, 9, 2, 9, 9, 9]), given,
        torch.tensor([3, 3, 3, 3, 2, 3]), torch.tensor([0, 50, 0, 900, 5, 0]) if filtered else None,
        torch.tensor([1.0, 0.9, 0.5, 0.8, 1.0, 1.0]) if filtered else None, ids if draft == "listed" else None,
    )  # fmt: skip


def short_of_three(draw: int) -> tuple[Any, ...]:
    """Requests some of which keep no candidate, by sums over rows that more warps than the deciding one have made."""
    made = list(BLOCK.cases[0].make(torch.Generator().manual_seed(draw)))
    made[:3] = made[0][:, :4], made[1][:, :4], torch.ones_like(made[2])
    made[7] = made[7][:, :3]
    return tuple(made)


def same_under(schedules: range, op: str, inputs: tuple[Any, ...], scratch: Scratch) -> None:
    compared = Compared(op, inputs)
    for seed in schedules:
        assert compared.differs(seed) is None, seed
        scratch.check()


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, HALF, FP64], ids=str)
def test_rows_in_parts_give_the_references_tokens(dtype: torch.dtype, filtered: bool, scratch: Scratch) -> None:
    same_under(range(SCHEDULES), "sample_rows", rows(dtype, filtered), scratch)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("op", "draft"), ROUNDS)
def test_rounds_in_parts_give_the_references_tokens(op: str, draft: str, filtered: bool, scratch: Scratch) -> None:
    same_under(range(2 + 2 * filtered), op, round_of(draft, filtered), scratch)


@pytest.mark.parametrize("dtype", [BF16, HALF, FP64], ids=str)
def test_rounds_of_other_dtypes(dtype: torch.dtype, scratch: Scratch) -> None:
    for op in OPS[1:]:
        same_under(range(3, 5), op, round_of("dense", True, dtype), scratch)


def test_without_any_barrier_some_schedule_differs() -> None:
    few = tuple(x[[4, 8]] if isinstance(x, torch.Tensor) else x for x in rows(BF16, True))
    calls = [("sample_rows", few), *((op, round_of("dense", True, vocab=700)) for op in OPS[1:])]
    calls += [("accept_block", short_of_three(draw)) for draw in (10, 20, 21, 22)]
    every = [Compared(op, inputs) for op, inputs in calls]
    host.barriers()
    assert all(one.differs(0) is None for one in every)
    barriers = host.barriers()
    assert len(barriers) == 11, barriers
    for barrier in barriers:
        with host.without(barrier):
            assert any(one.differs(seed) for seed in range(FEW) for one in every), barrier
    assert all(one.differs(1) is None for one in every)


@pytest.mark.parametrize(("op", "launches"), [("sample_rows", 1), ("accept_rejection", 2), ("accept_block", 3)])
def test_launches(op: str, launches: int) -> None:
    for filtered in (False, True):
        inputs = rows(FP32, filtered) if op == "sample_rows" else round_of("dense", filtered)
        assert Compared(op, inputs).differs(2) is None
        assert host.launches() == launches + filtered


def test_too_little_scratch_is_refused(scratch: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"sample_rows": rows(FP32, True), "accept_block": round_of("dense", True)}
    for module, op in ((sample_cuda, "sample_rows"), (accept_cuda, "accept_block")):
        monkeypatch.setattr(module, "workspace", lambda key, device, nbytes: scratch.workspace(key, device, nbytes - 8))
        refused = Compared(op, calls[op]).differs(0)
        assert refused is not None and "too little memory was given" in refused


def test_the_counters_of_a_device_are_kept_and_start_from_0() -> None:
    device = torch.device("cpu")
    first = _workspace.counters("test", device, 3)
    assert first.dtype == torch.int32 and not first.any()
    assert _workspace.counters("test", device, 2).data_ptr() == first.data_ptr()
    assert not _workspace.counters("test", device, first.numel() + 1).any()
