"""`dmtp bench`: what is timed is what it says, and the figures follow from the times."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.backends import choose, unavailable
from dmtp_kernels.bench.attention import Problem, Shape, bench_attention
from dmtp_kernels.bench.measure import medians, readers
from dmtp_kernels.bench.t1 import Stage, bench_t1, runs
from dmtp_kernels.cli import app

CPU = torch.device("cpu")


def test_rounds_are_interleaved_and_the_middle_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]
    cost = {"a": iter([0.5, 1.0, 9.0, 2.0]), "b": iter([0.5, 4.0, 4.0, 4.0])}

    def entry(name: str) -> None:
        order.append(name)
        clock[0] += next(cost[name])

    monkeypatch.setattr("dmtp_kernels.bench.measure.time.perf_counter", lambda: clock[0])
    found = medians({"a": lambda: entry("a"), "b": lambda: entry("b")}, 3, CPU)
    assert found == {"a": 2000.0, "b": 4000.0}
    assert order == ["a", "b"] + ["a", "b"] * 3  # the first pair warms up
    with pytest.raises(ValueError, match="rounds: is 0"):
        medians({}, 0, CPU)


def test_every_entry_computes_the_same_stage() -> None:
    # a benchmark of two different computations compares nothing
    stage = Stage(600, 64, 64, CPU, ["dense", "int8", "int4", "low_rank"])
    skipped: dict[str, str] = {}
    state = stage.generator.get_state()
    results = {}
    for entry in ("eager", "dense", "int8", "int4", "low_rank"):
        stage.generator.set_state(state)
        outputs = runs(stage, 5, [entry], skipped)[entry]()
        assert isinstance(outputs, tuple)
        results[entry] = outputs
    assert not skipped
    for entry, outputs in results.items():
        for got, want in zip(outputs[:3], results["eager"], strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=6e-2, msg=entry)


def test_report_in_json() -> None:
    command = ["bench", "t1", "--vocab", "700", "--hidden", "64", "--rank", "8", "--rounds", "3", "--batch", "1,3"]
    result = CliRunner().invoke(app, [*command, "--entries", "int8,int4,dense", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(c["shape"]["B"], c["entry"]) for c in report["cases"]] == [
        (b, e) for b in (1, 3) for e in ("int8", "int4", "dense", "eager")
    ]
    for case in report["cases"]:
        eager = next(c for c in report["cases"] if c["entry"] == "eager" and c["shape"] == case["shape"])
        assert case["op"] == "fused_t1_prep" and case["shape"]["V"] == 700 and case["ms"] > 0
        assert case["ratio_to_eager"] == pytest.approx(eager["ms"] / case["ms"])
        speed = report["bandwidth_gb_s"][0 if case["shape"]["B"] == 1 else 1]
        assert case["share_of_bandwidth"] == pytest.approx(case["bytes"] / case["ms"] / 1e6 / speed)
    # int8 codes, scales and bounds against bf16 rows and bounds
    moved = {c["entry"]: c["bytes"] for c in report["cases"] if c["shape"]["B"] == 1}
    assert moved["dense"] - moved["int8"] == 700 * (2 * 64 - 64 - 4)
    assert CliRunner().invoke(app, [*command, "--entries", "int8"]).stdout.count("int8") == 2


@pytest.mark.parametrize("window", [None, 0, 20, 300])
def test_attention_entries_compute_the_same(window: int | None) -> None:
    problem = Problem(Shape(B=3, history=77, S=5, Hq=6, Hkv=2, D=32, P=4, window=window), CPU)
    torch.testing.assert_close(problem.op(), problem.eager(), rtol=2e-2, atol=2e-2)
    rows = 77 if window is None else min(window, 77)
    keys_and_values = 3 * (rows + 5) * 2 * 32 * 2 * 2
    assert keys_and_values < problem.bytes() < keys_and_values + 3 * 5 * 6 * (2 * 32 * 2 + 4) + 3 * 4 * 30


def test_attention_report_in_json() -> None:
    command = ["bench", "block_attention", "--batch", "2", "--history", "40,90", "--heads", "4,2", "--dim", "16"]
    # rows carry the names that --entries takes
    named = [e for e in ("reference", "cpu") if unavailable("block_attention", e, CPU) is None]
    command += ["--rounds", "2", "--json"]
    result = CliRunner().invoke(app, [*command, "--entries", ",".join((*named, "cuda"))])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["skipped"]) == ["cuda"]
    assert [(c["shape"]["history"], c["entry"]) for c in report["cases"]] == [
        (h, e) for h in (40, 90) for e in (*named, "eager")
    ]
    assert all(c["op"] == "block_attention" and c["ms"] > 0 and c["share_of_bandwidth"] > 0 for c in report["cases"])
    for arguments, message in (
        (["--heads", "4"], "heads: is '4'"),
        (["--heads", "5,2"], "Hq: is 5"),
        (["--history", "0"], "history: is 0"),
        (["--window", "-1"], "window: is -1"),
        (["--entries", "fast"], "entries: has 'fast'"),
    ):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code != 0 and message in result.output


def test_attention_without_entries_times_what_the_op_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmtp_kernels.bench.attention.compiled", lambda _: (None, "no compiler"))
    report = bench_attention([Shape(B=1, history=9, Hq=2, Hkv=1, D=8)], rounds=1)
    assert [c["entry"] for c in report["cases"]] == [choose("block_attention", CPU), "eager"]
    assert report["skipped"] == {"compiled": "no compiler"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--entries", "int9"], "entries: has 'int9'"),
        (["--batch", "0"], "batch: is 0"),
        (["--batch", "x"], "batch: is 'x'"),
        (["--vocab", "0"], "vocab: is 0"),
        (["--threads", "-1"], "threads: is -1"),
        (["--device", "tpu"], "device: is 'tpu'"),
        (["--device", "cpu:1"], "device: is 'cpu:1'"),
        (["--device", "cuda:99"], "device: is 'cuda:99'"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "t1", *arguments])
    assert result.exit_code == 2 and message in result.stderr


def test_the_reader_reads_what_it_says() -> None:
    passes, size = readers(CPU)
    assert int(passes["sum"]()) == size // 8  # type: ignore[call-overload]
    assert int(passes["amax"]()) == 1  # type: ignore[call-overload]
    assert passes["mv"]().numel() == size // 4 // (1 << 12)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="batch: is 0"):
        bench_t1(batches=())
