"""`profiling.compare`: a planted slowdown is told from noise, and nothing is said where nothing can be."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiling import compare, pair, results
from tests.profiling.damaged_results import GARBAGE, damaged

OPS = ("accept_prefix", "draft_page_table", "fused_t1_prep")


def run_of(seed: int, slower: dict[str, float] | None = None, *, noise: float = 0.03, seatings: int = 20) -> Any:
    """A made-up run: per seating a speed of the machine that all share, and noise that only ever adds time."""
    draw = np.random.default_rng(seed)
    shared = np.random.default_rng(99).uniform(1.0, 1.5, seatings)

    def samples(ms: float) -> list[list[float]]:
        return [list(ms * speed * (1 + draw.exponential(noise, 10))) for speed in shared]

    cases = [
        {
            "op": op,
            "case": case,
            "shape": {"B": 1},
            "agrees": True,
            "disagreement": None,
            "entries": {"op": {"samples": samples((1 + (slower or {}).get(op, 0.0)) * 2.0)}},
            "control": {"is": "sums", "samples": samples(1.0)},
        }
        for op in OPS
        for case in ("b1", "b8")
    ]
    where = {key: 1 for key in compare._ENVIRONMENT} | {"commit": "abc"}
    result = {"kind": results.KIND, "environment": where, "tests": None, "session": "s", "seatings": seatings}
    return result | {"cases": cases}


def written(tmp_path: Path, *runs: Any) -> list[str]:
    names = [str(tmp_path / f"{i}.json") for i in range(len(runs))]
    for name, run in zip(names, runs, strict=True):
        Path(name).write_text(json.dumps(run))
    return names


def test_a_slowdown_is_found_and_nothing_else() -> None:
    for seed in range(10):
        old, same = run_of(2 * seed), run_of(2 * seed + 1)
        new = run_of(2 * seed + 1, {"accept_prefix": 0.1})
        assert {c.verdict for c in compare.changes([old], [same])} == {"same"}
        verdicts = {(c.op, c.case): c.verdict for c in compare.changes([old], [new])}
        assert verdicts == {(op, b): "slower" if op == OPS[0] else "same" for op in OPS for b in ("b1", "b8")}
        assert {c.verdict for c in compare.changes([new], [old]) if c.op == OPS[0]} == {"faster"}


def test_the_gate_and_the_threshold() -> None:
    old, new = run_of(0), run_of(1, {"accept_prefix": 0.07})
    assert compare.changes([old], [new], 5.0)[0].verdict == "slower"
    assert compare.changes([old], [new], 10.0)[0].verdict == "same"
    # noise so large that the interval reaches below 2 %
    loud = compare.changes([run_of(0, noise=2.0)], [run_of(1, {"accept_prefix": 0.07}, noise=2.0)])
    assert loud[0].verdict == "undecided" and loud[0].low < 2 < loud[0].high
    # of so few seatings all could lie on one side by chance
    few = compare.changes([run_of(0, seatings=7)], [run_of(1, {"accept_prefix": 0.5}, seatings=7)])
    assert few[0].verdict == "undecided" and few[0].percent > 30
    enough = compare.changes([run_of(0, seatings=8)], [run_of(1, {"accept_prefix": 0.5}, seatings=8)])
    assert enough[0].verdict == "slower"


def test_separate_runs_need_a_larger_change() -> None:
    old = run_of(0)
    for share, verdict in ((0.1, "undecided"), (0.5, "slower")):
        new = run_of(1, {"accept_prefix": share}) | {"session": None}
        assert compare.changes([old], [new])[0].verdict == verdict
    more = compare.changes([run_of(0), run_of(2)], [run_of(1) | {"session": "t"}, run_of(3) | {"session": "u"}])
    few = compare.changes([run_of(0)], [run_of(1) | {"session": "t"}])
    assert more[0].high - more[0].low < few[0].high - few[0].low


def test_the_interval_of_a_median() -> None:
    # of 11 values all lie on one side with probability 2^-11
    values = np.arange(11.0)
    assert compare.median_interval(values, 2**-11) == (5.0, 0.0, 10.0)
    assert compare.median_interval(values, 2**-12) == (5.0, -np.inf, np.inf)
    assert compare.median_interval(values, 12 * 2**-11) == (5.0, 1.0, 9.0)
    draw = np.random.default_rng(3)
    outside = 0
    for _ in range(2000):
        _, low, high = compare.median_interval(draw.standard_cauchy(20), 0.025)
        outside += not low <= 0 <= high
    assert outside <= 2000 * 0.05


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda r: r["cases"][0].update(agrees=False, disagreement="output 0"),
            "accept_prefix b1: wrong at commit abc",
        ),
        (lambda r: r.update(tests={"passed": False, "summary": "1 failed"}), "the tests of commit abc fail: 1 failed"),
        (lambda r: r["environment"].update(threads=2), "threads: the runs differ, 1 and 2"),
        (lambda r: r["environment"].update(device="other"), "device: the runs differ"),
        (lambda r: r["cases"][2].update(shape={"B": 2}), "draft_page_table b1: the runs differ"),
        (lambda r: r["cases"].pop(), "fused_t1_prep b8: the runs differ"),
        (lambda r: r.update(kind="x"), "is not a file of"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, why: str, side: int) -> None:
    runs = [run_of(0), run_of(1, {"accept_prefix": 0.5})]
    runs[side] = copy.deepcopy(runs[side])
    change(runs[side])
    assert compare.main(written(tmp_path, *runs)) == 2
    captured = capsys.readouterr()
    found = "threads: the runs differ, 2 and 1" if side == 0 and why.startswith("threads") else why
    assert found in captured.err and "slower" not in captured.out


def test_exit_codes_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, same, new = written(tmp_path, run_of(0), run_of(1), run_of(1, {"fused_t1_prep": 0.2}))
    assert compare.main([old, same]) == 0
    assert "0 slower, 0 faster, 6 same, 0 undecided; gate 5 %" in capsys.readouterr().out
    assert compare.main([old, new, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (
        found["slower"] == 2 and [c["op"] for c in found["cases"] if c["verdict"] == "slower"] == ["fused_t1_prep"] * 2
    )
    assert compare.main([old, str(tmp_path / "none.json")]) == 2
    assert compare.main([f"{old},{old}", f"{new},{new}"]) == 1
    for gate in ("1", "nan", "inf"):
        assert compare.main([old, new, "--gate", gate]) == 2
        assert f"--gate: is {float(gate)}, must be at least 2" in capsys.readouterr().err


def test_what_is_printed_as_json_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, huge = (run_of(0, seatings=s) for s in (3, 3))
    for run, factor in ((tiny, 1e-200), (huge, 1e200)):
        case = run["cases"][0]["entries"]["op"]
        case["samples"] = [[factor * ms for ms in turn] for turn in case["samples"]]

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert compare.main([*written(tmp_path, tiny, huge), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)["cases"]
    assert [c["percent"] for c in found].count(None) == 1 and {c["high"] for c in found} == {None}


FINE = {"commit": GARBAGE, "disagreement": ("x",), "tests": (None,), "session": (None, "x"), "summary": ("x",)}
"""What need not be as it was."""


def test_whatever_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = run_of(0, seatings=2)
    good["cases"] = good["cases"][:2]
    good["tests"] = {"passed": True, "summary": "3 passed"}
    old = written(tmp_path, good)[0]
    new = tmp_path / "new.json"
    for keys, garbage, run in damaged(good):
        new.write_text(json.dumps(run))
        code, said = compare.main([old, str(new)]), capsys.readouterr()
        where = f"{keys} = {garbage!r}: {code}, {said.err}"
        assert code == (0 if garbage in FINE.get(keys[-1], ()) else 2), where
        if code == 2:
            assert said.out == "" and said.err.count("\n") == 1, where
            assert said.err.startswith("compare: no verdict: "), where


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ("{", "Expecting property name"),
        ("[]", "is not a file of"),
        ('{"kind": "dmtp bench ops"}', "environment is missing"),
        (b"\xff", "can't decode byte"),
        (None, "No such file"),
    ],
)
def test_what_is_no_result_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes | None, why: str
) -> None:
    old, new = written(tmp_path, run_of(0))[0], tmp_path / "new.json"
    if text is not None:
        new.write_bytes(text.encode() if isinstance(text, str) else text)
    for names in ([old, str(new)], [str(new), old]):
        assert compare.main(names) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"compare: no verdict: {new}: ") and why in said and said.count("\n") == 1
    assert compare.main([f"{old},", old]) == 2
    assert "a name of a file is empty" in capsys.readouterr().err


def test_the_place_of_a_wrong_sample_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(1)
    run["cases"][2]["control"]["samples"][3][1] = float("nan")
    names = written(tmp_path, run_of(0), run)
    assert compare.main(names) == 2
    place = "cases[2] (draft_page_table b1).control.samples[3][1]"
    assert f"{names[1]}: {place} must be a finite number above 0" in capsys.readouterr().err
    run = run_of(1)
    run["cases"].append(run["cases"][0])
    assert compare.main(written(tmp_path, run_of(0), run)) == 2
    assert "cases[6] is accept_prefix b1 once more" in capsys.readouterr().err
    for seatings in (10, 7):
        assert compare.main(written(tmp_path, run_of(0), run_of(1) | {"seatings": seatings})) == 2
        why = {10: "are 20 and 10, must be as many", 7: "has 20 turns and 20 of its control"}[seatings]
        assert why in capsys.readouterr().err


PLANTED = """
import time
from dmtp_kernels.bench.worker import serve

def plant(op, seconds):
    end = time.process_time() + 0.1 * seconds * (op == "accept_prefix")
    while time.process_time() < end:
        pass

serve(plant)
"""


def test_a_tenth_more_is_told_on_this_machine(tmp_path: Path) -> None:
    command = (sys.executable, *pair.WORKER)
    names = ["accept_prefix", "advance_round"]
    for other, slower in ((command, set()), ((sys.executable, "-c", PLANTED), {"accept_prefix"})):
        files = pair.measure([command, other], tmp_path, names=names, processes=2, seatings=20, same=True)
        old, new = (compare.read(names) for names in files)
        compare.check(old, new)
        assert compare.paired(old, new) and len(old) == 2
        found = compare.changes(old, new)
        assert {c.op for c in found if c.verdict == "slower"} == slower, found


def test_a_side_that_ends_is_no_verdict(tmp_path: Path) -> None:
    ends = (sys.executable, "-c", "pass")
    with pytest.raises(compare.Refused, match="ended"):
        pair.measure([ends, ends], tmp_path, names=["accept_prefix"])


def test_every_pair_of_processes_must_show_the_change() -> None:
    share = {"accept_prefix": 0.1}
    sides = [[run_of(0), run_of(2) | {"session": "t"}], [run_of(1, share), run_of(3) | {"session": "t"}]]
    assert compare.changes(sides[0], sides[1])[0].verdict == "undecided"
    sides[1][1] = run_of(3, share) | {"session": "t"}
    assert compare.changes(sides[0], sides[1])[0].verdict == "slower"
