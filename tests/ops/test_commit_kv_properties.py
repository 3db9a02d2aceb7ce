"""commit_kv over many rounds against dictionaries of history, pending and scratch, whatever hypothesis thinks of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.commit_kv import BAD_COUNT, commit_kv
from tests.ops.commit_kv_oracle import model, same
from tests.ops.conftest import INTERPRETED

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

KERNEL_OPS = ("commit_kv",)
R, HKV, D, H = 4, 2, 3, 5
EXTREMES = [-(2**63), -(2**31), -1, 2**31 - 1, 2**63 - 1]
PATTERN = torch.arange(HKV * D).view(HKV, D) / 64
bounded = hypothesis.settings(
    max_examples=12 if INTERPRETED else 200, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


class Sequence:
    """One request as its owner sees it: which number is at each position, and where its slots are."""

    def __init__(self, first: int) -> None:
        self.history_slots = range(first, first + 12)
        self.pending_slot = first + 12
        self.scratch_slots = range(first + 13, first + 13 + R)
        self.history: dict[int, float] = {}
        self.pending: float | None = None
        self.scratch: dict[int, float] = {}
        self.length = 0
        self.hidden: float = -1.0

    def commit(self, numbers: list[float], count: int) -> None:
        """Rows 0..count-1 are true, the last of them stays pending."""
        count = min(max(count, 0), R)
        if count == 0:
            return
        if self.pending is not None:
            self.history[self.length - 1] = self.pending
        for j, number in enumerate(numbers[: count - 1]):
            self.history[self.length + j] = number
        self.pending = numbers[count - 1]
        self.scratch |= dict(enumerate(numbers[count:], start=count))
        self.length += count
        self.hidden = numbers[count - 1]

    def slots(self) -> dict[int, float]:
        found = {self.history_slots[position]: number for position, number in self.history.items()}
        found |= {self.scratch_slots[j]: number for j, number in self.scratch.items()}
        return found if self.pending is None else found | {self.pending_slot: self.pending}


@st.composite
def rounds(draw: Any) -> list[list[tuple[int, bool]]]:
    """Rounds of (count, live) for each of 1 to 3 requests; histories have room for three rounds."""
    batch = draw(st.integers(1, 3))
    count = st.integers(0, R) | st.sampled_from([*EXTREMES, R + 1])
    return draw(st.lists(st.lists(st.tuples(count, st.booleans()), min_size=batch, max_size=batch), max_size=3))


@hypothesis.given(rounds(), st.booleans())
@bounded
def test_history_pending_and_scratch_over_rounds(plan: list[list[tuple[int, bool]]], scratch: bool) -> None:
    batch = len(plan[0]) if plan else 1
    requests = [Sequence(20 * b) for b in range(batch)]
    caches = [torch.full((20 * batch, HKV, D), float("nan")) for _ in range(4)]
    lengths = torch.zeros(batch, dtype=torch.int32)
    next_hidden = torch.full((batch, H), -1.0)
    number = 1.0
    for turn in plan:
        numbers = [[number + b * R + j for j in range(R)] for b in range(batch)]
        number += batch * R
        rows = torch.tensor(numbers)[:, :, None, None] + PATTERN
        dst = [[(r.history_slots[min(r.length + j, 11)]) for j in range(R)] for r in requests]
        promote = [r.history_slots[r.length - 1] if r.length else -1 for r in requests]
        error = commit_kv(
            [rows, rows + 0.25],
            [-rows, 2 * rows],
            caches[:2],
            caches[2:],
            torch.tensor([count for count, _ in turn]),
            torch.tensor(dst),
            pending_slot=torch.tensor([r.pending_slot for r in requests]),
            promote_dst=torch.tensor(promote),
            scratch_dst=torch.tensor([list(r.scratch_slots) for r in requests]) if scratch else None,
            hidden=torch.tensor(numbers)[:, :, None] + torch.zeros(H),
            next_hidden=next_hidden,
            lengths=lengths,
            live=torch.tensor([alive for _, alive in turn]),
        )
        assert error.tolist() == [BAD_COUNT if alive and not 0 <= n <= R else 0 for n, alive in turn]
        for request, own, (count, alive) in zip(requests, numbers, turn, strict=True):
            request.commit(own, count if alive else 0)
            if not scratch:
                request.scratch.clear()
    assert lengths.tolist() == [r.length for r in requests]
    assert torch.equal(next_hidden, torch.tensor([[r.hidden] * H for r in requests]))
    want = {slot: value for r in requests for slot, value in r.slots().items()}
    for cache, of in zip(caches, (lambda n: n, lambda n: n + 0.25, lambda n: -n, lambda n: 2 * n), strict=True):
        for slot in range(20 * batch):
            assert torch.equal(cache[slot], of(want[slot] + PATTERN)) if slot in want else cache[slot].isnan().all()


@st.composite
def anything(draw: Any) -> dict[str, Any]:
    """One call whose slots are nobody's in particular: shared, skipped, beyond the cache, extreme."""
    batch, width, slots = draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 8))
    slot = st.integers(-1, slots) | st.sampled_from(EXTREMES)

    def vector(element: Any, size: int = 1) -> Any:
        drawn = draw(st.lists(element, min_size=batch * size, max_size=batch * size))
        return torch.tensor(drawn, dtype=torch.int64).view((batch, size) if size > 1 or size == width else (batch,))

    call: dict[str, Any] = {"valid": vector(st.integers(-1, width + 1) | st.sampled_from(EXTREMES)), "slots": slots}
    call["dst"] = vector(slot, width).view(batch, width)
    if draw(st.booleans()):
        call["pending_slot"], call["promote_dst"] = vector(slot).view(batch), vector(slot).view(batch)
    if draw(st.booleans()):
        call["scratch_dst"] = vector(slot, width).view(batch, width)
    if draw(st.booleans()):
        call["live"] = vector(st.integers(0, 1)).view(batch).bool()
    call["first_slot"] = draw(st.integers(0, 3))
    return call


@hypothesis.given(anything())
@bounded
def test_any_call_equals_the_dictionary_model(call: dict[str, Any]) -> None:
    valid, dst, slots = call.pop("valid").view(-1), call.pop("dst"), call.pop("slots")
    batch, width = dst.shape
    rows = torch.arange(batch * width * 2, dtype=torch.float32).view(batch, width, 1, 2)
    before = -1 - torch.arange(slots * 2, dtype=torch.float32).view(slots, 1, 2)
    caches = before.clone(), before * 2
    named = {"pending_slot": "pending", "promote_dst": "promote", "scratch_dst": "scratch", "live": "live"}
    given: dict[str, Any] = {
        named[name]: value.tolist() if value.dim() == 1 else value
        for name, value in call.items()
        if isinstance(value, torch.Tensor)
    }
    want = [
        model(rows, cache, valid.tolist(), dst, first_slot=call["first_slot"], **given)
        for cache in (before, before * 2)
    ]
    error = commit_kv([rows], [rows], [caches[0]], [caches[1]], valid, dst, **call)
    for cache, (after, errors) in zip(caches, want, strict=True):
        assert same(cache, after)
        assert error.tolist() == errors
