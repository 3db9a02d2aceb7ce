"""A round is its stages: the same launches whatever the rows hold, one commit per cache, one bookkeeping launch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Request
from tests.decode.engine_cases import REQUESTS, engine_of, prompt

VIEWS = ("aten::slice.Tensor", "aten::alias", "aten::unsqueeze")


class Recorder(TorchDispatchMode):
    """Names of the ops called, in order, with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.name(), tuple(result.shape) if isinstance(result, torch.Tensor) else None))
        return result


def ops_of(function: Any, *args: Any) -> list[tuple[str, Any]]:
    with Recorder() as recorder:
        function(*args)
    return recorder.calls


def seated(requests: list[Request], method: str = "dmtp", **options: Any) -> Engine:
    engine = engine_of(method, max_tokens=64, **options)
    for request in requests:
        engine.submit(request)
    engine.step()
    return engine


@torch.no_grad()
@pytest.mark.parametrize("verification", ["target", "rejection"])
@pytest.mark.parametrize("method", METHODS)
def test_rows_134_141_no_launch_depends_on_what_the_rows_hold(method: str, verification: str) -> None:
    """vllm#49027, TensorRT-LLM#17110: short and long contexts, rows at the length limit and without budget, greedy and
    sampled: every round makes the same calls on the same shapes, so ranks cannot part and a capture holds for all."""
    short = seated([Request(prompt(1 + i, i), 30, seed=i) for i in range(3)], method, verification=verification)
    long = seated([Request(prompt(54 + i, i), 6 + i, 1.0, seed=i) for i in range(3)], method, verification=verification)
    long.state.budget[1] = 0
    rounds.refresh(long.stack, long.state.rows(0, 3))
    made = [ops_of(rounds.decode_round, e.stack, e.state.rows(0, 3)) for e in (short, long) for _ in range(3)]
    assert len(made[0]) > 30
    assert all(calls == made[0] for calls in made)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_launches_of_a_steady_round(method: str) -> None:
    """One bookkeeping, one acceptance, one commit, one draft table; stages t1 to advance add up to it all."""
    engine = seated(REQUESTS[:2], method)
    view = engine.state.rows(0, 2)
    stages = {name: Counter(c[0] for c in ops_of(rounds.stage(name), engine.stack, view)) for name in rounds.STAGES}
    chosen = METHODS[method]
    drafts = chosen.drafter is not None
    assert stages["advance"] == {"dmtp::advance_round_out": 1}
    assert stages["accept"] == {"dmtp::accept_prefix": 1}
    assert {n: c for n, c in stages["commit"].items() if n.startswith("dmtp::")} == {"dmtp::commit_round": 1}
    assert stages["draft"]["dmtp::draft_page_table"] == int(drafts)
    assert stages["t1"]["dmtp::fused_t1_prep"] == int(drafts and chosen.first == "mtp")
    if drafts and chosen.first == "mtp":
        assert stages["t1"].keys() <= {"dmtp::fused_t1_prep", *VIEWS}
    # nothing indexes a page table but the bookkeeping
    assert not any(name in ("aten::gather", "aten::div.Tensor_mode") for s in stages.values() for name in s)


@torch.no_grad()
def test_stages_one_by_one_are_the_round() -> None:
    whole, parts = seated(REQUESTS[:3]), seated(REQUESTS[:3])
    for _ in range(3):
        accepted = rounds.decode_round(whole.stack, whole.state.rows(0, 3)).accepted
        view = parts.state.rows(0, 3)
        for name in rounds.STAGES:
            rounds.stage(name)(parts.stack, view)
        assert view.work.accepted is not None
        for a, b in zip(accepted, view.work.accepted, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(whole.state.index, parts.state.index, strict=True):
        assert torch.equal(a, b)
