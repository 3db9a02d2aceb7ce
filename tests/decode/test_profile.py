"""Times of a round's stages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.cli import app
from dmtp_kernels.decode import profile
from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.profile import profile_methods, profile_rounds
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from tests.decode.engine_cases import engine_of, prompt
from tests.decode.test_ranges import DMTP


def requests_of(tokens: int = 60) -> list[Request]:
    return [Request(prompt(4 + i, i), tokens, temperature=1.0, seed=i) for i in range(3)]


def profiled(**options: Any) -> dict[str, Any]:
    return profile_rounds(engine_of("dmtp"), requests_of(), **{"rounds": 8, "warmup": 2} | options)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, delay: Any) -> None:
    """Call `delay(stack)` at the start of a stage."""
    original = getattr(rounds, name)

    def slow(stack: Any, state: Any) -> None:
        delay(stack)
        original(stack, state)

    monkeypatch.setattr(rounds, name, slow)


def record_steps(monkeypatch: pytest.MonkeyPatch, what: Callable[[Engine], Any]) -> list[Any]:
    """`what(engine)` of every engine that steps from now on, at its step."""
    seen: list[Any] = []
    step = Engine.step

    def recorded(engine: Engine) -> Any:
        seen.append(what(engine))
        return step(engine)

    monkeypatch.setattr(Engine, "step", recorded)
    return seen


class FakeTime:
    """A clock that only planted delays move: on a busy machine any stage can take longer than a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    def pass_ms(self, ms: float) -> None:
        self.seconds += ms / 1e3


@pytest.mark.parametrize("graphs", [False, True])
def test_stages_add_up_to_the_round_and_hold_the_models(graphs: bool) -> None:
    found = profiled(graphs=graphs)
    stages = found["stages"]
    assert tuple(stages) == STAGES and tuple(row["label"] for row in stages.values()) == DMTP
    assert found["batch"] == 3 and found["rounds"] == 8 and found["warmup"] == 2 and found["timer"] == "perf_counter"
    assert sum(row["ms"] for row in stages.values()) == pytest.approx(found["round_ms"], rel=0.03)
    assert sum(row["share"] for row in stages.values()) == pytest.approx(1, rel=0.03)
    assert all(0 <= row["models_ms"] <= row["ms"] for row in stages.values())
    assert {name for name, row in stages.items() if row["models_ms"] > 0} == {"draft", "verify", "mtp", "commit"}
    assert 0 < found["own_share"] < 1
    assert found["threads"] == torch.get_num_threads() and len(found["load"]) == 2 and min(found["load"]) >= 0
    low, high = found["round_quartiles_ms"]
    assert low <= found["round_ms"] <= high


def test_added_stages_are_those_the_source_adds_to_dflash() -> None:
    found = profiled()
    assert found["added"] == {name: {k: found["stages"][name][k] for k in ("label", "ms")} for name in ("mtp", "t1")}
    for method in ("dflash", "mtp3", "autoregressive"):
        assert profile_rounds(engine_of(method), requests_of(), rounds=2, warmup=1)["added"] == {}


@pytest.mark.parametrize("name", STAGES)
def test_a_planted_delay_shows_in_its_stage_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    plant(monkeypatch, name, lambda stack: clock.pass_ms(2))
    found = profiled()
    assert {stage: row["ms"] for stage, row in found["stages"].items()} == {
        stage: pytest.approx(2.0 if stage == name else 0.0) for stage in STAGES
    }
    assert found["round_ms"] == found["own_ms"] == pytest.approx(2.0)


@pytest.mark.parametrize("name", STAGES)
def test_a_real_delay_shows_in_its_stage_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the time that this thread ran: other processes take seconds on end from a busy machine
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=time.thread_time))
    engines: list[Engine] = []

    def delay(stack: Any) -> None:
        if stack is engines[0].stack:
            until = time.thread_time() + 0.002
            while time.thread_time() < until:
                pass

    plant(monkeypatch, name, delay)
    # one run in some fifty on a busy machine has a stage half a millisecond off
    for _ in range(3):
        engines[:] = [engine_of("dmtp", max_tokens=128), engine_of("dmtp", max_tokens=128)]
        slow, plain = profile_methods(engines, requests_of(100), rounds=24, warmup=2)
        more = {stage: slow["stages"][stage]["ms"] - plain["stages"][stage]["ms"] for stage in STAGES}
        wanted = {stage: pytest.approx(2.0 if stage == name else 0.0, abs=0.6) for stage in STAGES}
        if more == wanted:
            break
    assert more == wanted


def test_warm_up_rounds_are_left_out_and_outliers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = FakeTime(monkeypatch), 0

    def delay(stack: Any) -> None:
        nonlocal calls
        calls += 1
        clock.pass_ms(100 if calls <= 3 or calls == 7 else 1)

    plant(monkeypatch, "verify", delay)
    found = profiled(warmup=3)
    assert calls == 11 and found["round_ms"] == found["stages"]["verify"]["ms"] == pytest.approx(1)
    assert found["scale"] == pytest.approx(1)


def test_stages_add_up_where_every_round_stalls_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = FakeTime(monkeypatch), dict.fromkeys(STAGES, 0)
    for index, name in enumerate(("draft", "verify", "mtp")):

        def delay(stack: Any, index: int = index, name: str = name) -> None:
            clock.pass_ms(3 if done[name] % 3 == index else 1)
            done[name] += 1

        plant(monkeypatch, name, delay)
    found = profiled(rounds=9)
    assert found["round_ms"] == pytest.approx(5) and found["scale"] == pytest.approx(5 / 3)
    assert {name for name, row in found["stages"].items() if row["ms"] == pytest.approx(5 / 3)} == set(done) - {
        *("t1", "accept", "commit", "advance")
    }


def test_only_rounds_of_the_whole_batch_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(prompt(4, 1), 60), Request(prompt(5, 2), 10), Request(prompt(6, 3), 60)]
    engine = engine_of("dmtp")
    sizes = record_steps(monkeypatch, lambda stepping: len(stepping.seats))
    found = profile_rounds(engine, requests, rounds=1000, warmup=0)
    assert {2, 3} < set(sizes) and found["rounds"] == sizes.count(3) < 12


def test_two_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = record_steps(monkeypatch, lambda stepping: stepping.method.name)
    found, other = profile_methods([engine_of("dmtp"), engine_of("dflash")], requests_of(), rounds=4, warmup=2)
    assert order == ["dmtp", "dflash", "dflash", "dmtp"] * 3
    assert (found["method"], other["method"]) == ("dmtp", "dflash") and found["rounds"] == other["rounds"] == 4
    # the two share the target: its calls count once
    assert all(row["models_ms"] <= row["ms"] for row in other["stages"].values())


def test_the_clock_is_real() -> None:
    clock = profile._Clock(torch.device("cpu"))
    start = clock.now()
    time.sleep(0.01)
    assert clock.ms((start, clock.now())) >= 10


def test_too_few_tokens_and_too_many_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="requests: ended before 17 rounds with all 2 of them"):
        profile_rounds(engine_of("dmtp"), [Request(prompt(4, 1), 8), Request(prompt(4, 2), 8)])
    with pytest.raises(ValueError, match="requests: are 5, the engine has 4 rows"):
        profile_rounds(engine_of("dmtp"), [Request(prompt(4, 1), 8)] * 5)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", "--batch", "2", "--warmup", "1", *arguments])


def test_a_warm_up_longer_than_any_request_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmtp_kernels.cli_profile.profile_methods", lambda *_, **__: pytest.fail("ran"))
    result = CliRunner().invoke(app, ["profile", "--warmup", "2040"])
    assert result.exit_code == 2 and "error: warmup: is 2040, must be below" in result.stderr


def test_command_prints_json() -> None:
    result = command("--rounds", "3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    other, difference = found["against"], found["difference_ms"]
    assert found["method"] == "dmtp" and found["rounds"] == 3 and found["added"]["t1"]["label"] == DMTP[0]
    assert other["method"] == "dflash" and tuple(other["stages"]) == tuple(found["stages"]) == STAGES
    assert difference["round"] == pytest.approx(found["round_ms"] - other["round_ms"])
    for name in STAGES:
        more = found["stages"][name]["ms"] - other["stages"][name]["ms"]
        assert difference["stages"][name] == pytest.approx(more)
    found = json.loads(command("--rounds", "2", "--json", "--against", "none").output)
    assert "against" not in found and "difference_ms" not in found


def test_command_prints_the_overhead_table() -> None:
    lines = command("--rounds", "2").output.splitlines()
    rows = {text: line.split() for line in lines for text in ("DFlash", "whole round", "stage") if text in line[:20]}
    assert rows["stage"][2:5] == ["dflash", "dmtp", "difference"]
    dflash, dmtp, more = (float(cell) for cell in rows["whole round"][2:5])
    assert dmtp - dflash == pytest.approx(more, abs=0.002) and dflash > 0
    added = [line.split()[-6:] for line in lines if line.lstrip().startswith("additional")]
    # MTP has no figure in the other's column, T1 that of its embedding
    assert len(added) == 2 and added[0][0] == "-" and min(map(float, added[1][:2])) > 0
    result = command("--rounds", "2", "--method", "mtp3", "--against", "none")
    assert "MTP chain" in result.output and "DFlash" not in result.output and "outside the models" in result.output
    assert "load of the machine before and after" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "rounds: is 0"),
        (["--warmup", "-1"], "warmup: is -1"),
        (["--against", "eagle"], "against: no method 'eagle', must be none or one of"),
        (["--device", "tpu"], "device: is 'tpu', must be cpu or cuda"),
        (["--method", "eagle"], "method: no method 'eagle'"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2 and message in result.stderr
