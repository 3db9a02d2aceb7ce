"""Times of a round's stages."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.cli import app
from dmtp_kernels.decode import profile
from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.profile import profile_rounds
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from tests.decode.engine_cases import engine_of, prompt


def profiled(**options: Any) -> dict[str, Any]:
    requests = [Request(prompt(4 + i, i), 60, temperature=1.0, seed=i) for i in range(3)]
    return profile_rounds(engine_of("dmtp"), requests, rounds=8, warmup=2, **options)


def test_stages_add_up_to_the_round_and_hold_the_models() -> None:
    found = profiled()
    stages = found["stages"]
    assert tuple(stages) == STAGES and found["batch"] == 3 and found["rounds"] == 8
    assert sum(row["ms"] for row in stages.values()) == pytest.approx(found["round_ms"], rel=0.03)
    assert all(0 <= row["models_ms"] <= row["ms"] for row in stages.values())
    assert {name for name, row in stages.items() if row["models_ms"] > 0} == {"draft", "verify", "mtp", "commit"}
    assert 0 < found["own_share"] < 1


def test_a_planted_delay_shows_in_its_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # a clock that only the delay moves: on a busy machine any stage can take longer than a real one
    seconds = 0.0
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: seconds))
    original = rounds.accept

    def slow(*arguments: Any) -> None:
        nonlocal seconds
        seconds += 0.002
        original(*arguments)

    monkeypatch.setattr(rounds, "accept", slow)
    found = profiled()
    assert {name: row["ms"] for name, row in found["stages"].items()} == {
        name: pytest.approx(2.0 if name == "accept" else 0.0) for name in STAGES
    }
    assert found["round_ms"] == found["own_ms"] == pytest.approx(2.0)


def test_the_clock_is_real() -> None:
    clock = profile._Clock(torch.device("cpu"))
    start = clock.now()
    time.sleep(0.01)
    assert clock.ms(start, clock.now()) >= 10


def test_too_few_tokens_and_too_many_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="requests: ended before 11 rounds with all 2 of them"):
        profile_rounds(engine_of("dmtp"), [Request(prompt(4, 1), 8), Request(prompt(4, 2), 8)])
    with pytest.raises(ValueError, match="requests: are 5, the engine has 4 rows"):
        profile_rounds(engine_of("dmtp"), [Request(prompt(4, 1), 8)] * 5)


def test_command_prints_json_or_a_table() -> None:
    result = CliRunner().invoke(app, ["profile", "--batch", "2", "--rounds", "3", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["method"] == "dmtp" and tuple(found["stages"]) == STAGES and found["rounds"] == 3
    result = CliRunner().invoke(app, ["profile", "--batch", "1", "--rounds", "2", "--method", "mtp3"])
    assert "outside the models" in result.output and result.exit_code == 0
    assert CliRunner().invoke(app, ["profile", "--rounds", "0"]).exit_code == 2
