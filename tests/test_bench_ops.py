"""`dmtp bench ops`: every sample is kept, figures follow from them, a wrong op fails the run."""

from __future__ import annotations

import io
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.bench import environment, ops, turns, worker
from dmtp_kernels.bench.cases import Problem
from dmtp_kernels.bench.ops import Session, bench_ops
from dmtp_kernels.bench.progress import Progress
from dmtp_kernels.bench.turns import Timer
from dmtp_kernels.cli import app

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"scale": 256, "rounds": 3}


def test_report_in_json(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = ["bench", "ops", "--op", "accept_prefix", "--op", "block_attention", "--scale", "256", "--rounds", "3"]
    result = CliRunner().invoke(app, [*command, "--threads", "1", "--json", "--output", str(output)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert [(c["op"], c["case"]) for c in report["cases"]] == [
        *(("block_attention", f"{kind}_b{b}") for kind in ("mtp", "drafter") for b in (1, 8)),
        *(("accept_prefix", f"b{b}") for b in (1, 8)),
    ]
    where = report["environment"]
    assert where["threads"] == 1 and where["clock"] == "cpu" and where["scale"] == 256 and len(where["load"]) == 2
    assert where["versions"]["torch"] == torch.__version__ and where["device"]
    for case in report["cases"]:
        turns_of = case["entries"]["op"]["samples"]
        assert len(turns_of) == 3 == len(case["control"]["samples"]) and case["agrees"]
        assert [len(t) for t in turns_of] == [len(t) for t in case["control"]["samples"]]
        median = statistics.median(ms for turn in turns_of for ms in turn)
        assert case["entries"]["op"]["median"] == pytest.approx(median, rel=1e-3)
        share = case["floor_bytes"] / median / 1e6 / report["bandwidth_gb_s"]
        assert case["share_of_bandwidth"] == pytest.approx(share, rel=1e-2)
        assert len(case["entries"]["eager"]["samples"]) == 3 and case["speedup"]["eager"]["median"] > 0
        assert case["skipped"] == {"compiled": "not asked for"}
    # progress goes to stderr
    assert "block_attention" in result.stderr
    table = CliRunner().invoke(app, [*command, "--threads", "1"])
    assert "accept_prefix" in table.stdout and "medians and quartiles" in table.stdout


def test_turns_are_interleaved_and_seatings_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = ops.Session.turn

    def turn(self: Session, index: int) -> None:
        order.append(self._seated[index][1].case.name)
        original(self, index)

    monkeypatch.setattr(ops.Session, "turn", turn)
    session = Session(["accept_prefix"], 256)
    inputs = []
    for _ in range(2):
        count = session.seat()
        inputs.append(session._seated[0][1].inputs[0])
        for _ in range(2):
            for i in range(count):
                session.turn(i)
    assert order == ["b1", "b8"] * 4
    assert inputs[0] is not inputs[1] and session.report()["seatings"] == 2
    assert [len(c["entries"]["op"]["samples"]) for c in session.report()["cases"]] == [4, 4]


def test_short_calls_are_repeated_and_inputs_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    log: list[str] = []

    def run() -> None:
        log.append("run")
        clock[0] += 10e-6

    monkeypatch.setattr(turns.time, "process_time", lambda: clock[0])
    timer = Timer(run, "cpu", CPU, before=lambda: log.append("before"))
    assert timer.calls == 10 and timer.warm
    log.clear()
    assert timer.sample() == pytest.approx(0.01)
    assert log == ["before"] + ["run"] * 11  # the first is not timed
    slow = Timer(
        lambda: clock.__setitem__(0, clock[0] + 0.02), "cpu", CPU, plant=lambda s: clock.__setitem__(0, clock[0] + s)
    )
    assert slow.calls == 1 and not slow.warm and slow.sample() == pytest.approx(40.0)


def test_a_plant_is_timed_and_names_its_op() -> None:
    seen = set()

    def plant(op: str, seconds: float) -> None:
        seen.add(op)
        end = time.perf_counter() + 3 * seconds
        while time.perf_counter() < end:
            pass

    names = ["accept_prefix"]
    plain, slow = (bench_ops(names, entries=("op",), clock="wall", plant=p, **SMALL) for p in (None, plant))
    assert seen == {"accept_prefix"}
    low = [min(min(t) for t in r["cases"][1]["entries"]["op"]["samples"]) for r in (plain, slow)]
    assert low[1] > 2 * low[0]


def test_a_wrong_op_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Problem.fused
    monkeypatch.setattr(Problem, "fused", lambda self: lambda: (original(self)(), self.outputs[0].add_(1)))
    result = CliRunner().invoke(app, ["bench", "ops", "--op", "accept_prefix", "--quick", "--threads", "1"])
    assert result.exit_code == 1 and "WRONG accept_prefix b1: output 0" in result.stdout.replace("\n", " ")


def test_red_tests_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Done:
        returncode, stdout, stderr = 1, "..F\n1 failed in 3 s\n", ""

    def run(command: list[str], **_: Any) -> Done:
        commands.append(command)
        return Done()

    monkeypatch.setattr(environment.subprocess, "run", run)
    found = environment.run_tests(["accept_prefix", "commit_kv", "draft_page_table"])
    assert found["passed"] is False and found["summary"] == "1 failed in 3 s"
    assert commands[0][-2:] == ["-k", "accept or commit or draft_page"]
    monkeypatch.setattr("dmtp_kernels.bench.cli.run_tests", lambda _: found)
    result = CliRunner().invoke(app, ["bench", "ops", "--op", "accept_prefix", "--quick", "--threads", "1", "--tests"])
    assert result.exit_code == 1 and "1 failed in 3 s" in result.stdout


def test_a_worker_answers_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    red = {"passed": False, "summary": "1 failed"}
    monkeypatch.setattr(worker, "run_tests", lambda names: red | {"of": names})
    commands = [
        {"start": {"names": ["accept_prefix"], "scale": 256, "threads": 1, "device": "cpu", "clock": "wall"}},
        {"tests": ["accept_prefix"]},
        *({"seat": True}, {"turn": 1}, {"turn": 0}, {"seat": True}, {"turn": 0}, {"turn": 1}),
        {"report": str(output), "session": "s", "tests": red},
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(c) + "\n" for c in commands)))
    worker.serve()
    started, *answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert Path(started["package"]) == Path(ops.__file__).parents[1] and started.keys() == {"package", "commit"}
    assert answers == [red | {"of": ["accept_prefix"]}, 2, True, True, 2, True, True, True]
    report = json.loads(output.read_text())
    assert report["environment"]["clock"] == "wall"
    assert report["session"] == "s" and report["seatings"] == 2 and report["tests"] == red
    assert [len(c["entries"]["op"]["samples"]) for c in report["cases"]] == [2, 2]


def test_every_op_has_tests_by_the_word_that_picks_them() -> None:
    root = Path(__file__).parent / "ops"
    from dmtp_kernels._library import registered

    for op in registered():
        word = environment._test_word(op)
        assert any(word in path.stem for path in root.glob("test_*.py")), op


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "x"], "op: is 'x'"),
        (["--rounds", "0"], "rounds: is 0"),
        (["--scale", "0"], "scale: is 0"),
        (["--scale", "9999999999"], "scale: is 9999999999, must be between 1 and 4,096"),
        (["--seconds", "nan"], "seconds: is nan"),
        (["--seconds", "inf"], "seconds: is inf"),
        (["--seconds", "-1"], "seconds: is -1.0"),
        (["--threads", "99999999"], "threads: is 99999999, must be between 0 and"),
        (["--threads", "-1"], "threads: is -1, must be between 0 and"),
        (["--entries", "op,fast"], "entries: has 'fast'"),
        (["--clock", "sun"], "clock: is 'sun'"),
        (["--clock", "cpu", "--threads", "2"], "clock: is 'cpu', must be wall"),
        (["--device", "tpu"], "device: is 'tpu'"),
        (["--output", "/nowhere/x.json"], "output: is /nowhere/x.json"),
        (["--output", "/dev/full"], "output: is /dev/full, must be a regular file"),
        (["--output", "/"], "output: is /, must be a file"),
        (["--output", ""], "output: is ., must be a file"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "ops", *arguments])
    torch.set_num_threads(1)
    assert result.exit_code == 2 and message in result.stderr


def test_a_full_disk_leaves_the_old_output(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    output.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        command = ["bench", "ops", "--op", "accept_prefix", "--scale", "256", "--rounds", "2", "--output", str(output)]
        result = CliRunner().invoke(app, [*command, "--threads", "1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2 and f"output: cannot write {output}: File too large" in result.stderr
    assert output.read_text() == "old" and list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("command", ["t1", "block_attention", "ops"])
def test_threads_are_bounded(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--threads", "99999999"])
    assert result.exit_code == 2 and "threads: is 99999999, must be between 0 and" in result.stderr


def test_a_worker_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"names": ["accept_prefix"], "scale": 256, "threads": 1, "device": "cpu"}
    (tmp_path / "folder").mkdir()
    report = {"report": str(tmp_path / "folder"), "session": "s", "tests": None}
    for commands, message in (
        ([{"start": good | {"names": ["x"]}}, {"seat": True}], "op: is 'x'"),
        ([{"start": good | {"scale": 0}}], "scale: is 0"),
        ([{"start": good | {"threads": -1}}], "threads: is -1"),
        ([{"start": good | {"device": "x"}}], "device: is 'x'"),
        ([{"start": good}, {"seat": True}, {"turn": 0}, {"turn": 1}, report], "report: cannot write"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(c) + "\n" for c in commands)))
        assert worker.serve() == 2
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"].startswith(message)


def test_progress_is_a_line_at_most_in_five_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("dmtp_kernels.bench.progress.time.monotonic", lambda: clock[0])
    progress = Progress()
    for i in range(4):
        progress(f"step {i}")
        clock[0] += 2.0
    progress.done()
    assert capsys.readouterr().err.splitlines() == ["step 0", "step 3"]
