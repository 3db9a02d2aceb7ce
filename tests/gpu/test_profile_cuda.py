"""Profiles by CUDA events: eager stages, and stages as graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.profile import profile_methods
from dmtp_kernels.decode.profile_files import trace_rounds
from dmtp_kernels.decode.ranges import label
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from dmtp_kernels.testing.models import tiny_checkpoint

pytestmark = pytest.mark.gpu
REQUESTS = [Request((1 + i, 2, 3), 60, temperature=1.0, seed=i) for i in range(3)]


def _engine(method: str) -> Engine:
    checkpoint = tiny_checkpoint(7)
    for module in checkpoint.modules().values():
        module.to("cuda")
    return Engine(checkpoint, method, max_batch=3, max_tokens=96, page_size=8, prefill_chunk=16)


@pytest.mark.parametrize("graphs", [False, True])
def test_stages_add_up_to_the_round(graphs: bool) -> None:
    results = profile_methods([_engine("dmtp"), _engine("dflash")], REQUESTS, rounds=6, warmup=2, graphs=graphs)
    for found in results:
        assert found["timer"] == "cuda events" and found["rounds"] == 6
        assert sum(row["ms"] for row in found["stages"].values()) == pytest.approx(found["round_ms"], rel=0.03)
        assert all(row["ms"] >= 0 for row in found["stages"].values())
        # replayed graphs hide the models' calls
        assert (found["own_ms"] is None) == graphs


def test_a_delay_on_the_device_shows_in_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, original = [_engine("dmtp"), _engine("dmtp")], rounds.accept

    def slow(stack: object, state: object) -> None:
        if stack is engines[0].stack:
            torch.cuda._sleep(20_000_000)
        original(stack, state)  # type: ignore[arg-type]

    monkeypatch.setattr(rounds, "accept", slow)
    found, plain = profile_methods(engines, REQUESTS, rounds=8, warmup=2)
    more = {name: found["stages"][name]["ms"] - plain["stages"][name]["ms"] for name in STAGES}
    assert max(more, key=lambda name: more[name]) == "accept" and more["accept"] > 2


def test_a_trace_has_the_stages_over_their_kernels(tmp_path: Path) -> None:
    trace_rounds(_engine("dmtp"), REQUESTS, tmp_path / "trace.json", rounds=2, warmup=4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    assert names >= {label(name) for name in STAGES} | {"round"}
