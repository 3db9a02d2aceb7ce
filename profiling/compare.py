"""Whether ops became slower between two runs of `dmtp bench ops`: `python -m profiling.compare OLD NEW [--gate 5]`.

Each side is a JSON file, or several joined by commas. Files that `profiling.pair` made took turns: their seatings are
compared one with one. Those of separate runs are compared by the median over seatings of the op's time over that of a
fixed workload of the same character, with a wider threshold: two runs of the same code at other times differ by up to
20 % on a machine that others use. Times are low quantiles, of samples that little disturbed. A case is

- `slower` when the change is above the gate and the whole interval above the threshold, `faster` likewise; the interval
  is widened to the change that each pair of processes shows by itself;
- `same` when the interval lies within the gate;
- `undecided` otherwise, which is no failure: longer runs narrow the interval.

Intervals are those of a median from order statistics, whatever the noise is like, and hold for all cases together.

Exit code 1: a case is slower. 2, and no verdict: an op's outputs were wrong or its tests failed, the runs are of other
machines, threads or shapes, or a file is not what it must be.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from profiling.command import Parser, check_range, command
from profiling.results import Place, Refused, cases, check_verdict, is_result, load
from profiling.table import table

PAIRED, APART = 2.0, 20.0
"""Percent that the whole interval must exceed."""
CONFIDENCE = 0.95
_QUIET = 0.25
_ALIKE = 0.1  # controls of a pair of seatings; where they differ by more, something else met one side alone
_UNBOUNDED = 700.0  # the exponential of more is no float
_ENVIRONMENT = ("device", "device_type", "threads", "clock", "scale", "capability", "versions")

Case = tuple[str, str]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """Of one case, in percent of the old time; positive is slower."""

    op: str
    case: str
    old_ms: float
    new_ms: float
    percent: float
    low: float
    high: float
    verdict: str


def read(names: str) -> list[dict[str, Any]]:
    """The runs of one side.

    Raises:
        Refused: a file that cannot be read, holds something else, or samples that are no times.
    """
    return [_read(name) for name in names.split(",")]


def _read(name: str) -> dict[str, Any]:
    if not name:
        raise Refused("a name of a file is empty; files are joined by commas")
    run = load(name)
    if not is_result(run):
        raise Refused(f"{name}: is not a file of `dmtp bench ops --output`")
    for key in (*_ENVIRONMENT, "commit"):
        _ = run["environment"][key]
    if run["tests"].value is not None:
        run["tests"]["passed"].flag()
        run["tests"]["summary"].text()
    if run["session"].value is not None:
        run["session"].text()
    seatings = run["seatings"].count()
    for case in cases(run):
        check_verdict(case)
        case["shape"].object()
        case["control"]["is"].text()
        turns = [_turns(side["samples"]) for side in (case["entries"]["op"], case["control"])]
        if turns[0] != turns[1] or turns[0] % seatings:
            raise case.refuse(f"has {turns[0]} turns and {turns[1]} of its control, must be so many for each seating")
    found: dict[str, Any] = run.value
    return found


def _turns(samples: Place) -> int:
    turns = samples.entries(least=1)
    for turn in turns:
        for ms in turn.entries(least=1):
            ms.positive()
    return len(turns)


def check(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> None:
    """Raise `Refused` unless the runs are right and of the same machine, settings and shapes."""
    for run in (*old, *new):
        for reason in _red(run):
            raise Refused(reason)
    first = old[0]
    for run in (*old[1:], *new):
        for key in _ENVIRONMENT:
            here, there = first["environment"][key], run["environment"][key]
            if here != there:
                raise Refused(f"{key}: the runs differ, {here!r} and {there!r}")
        for case in sorted(set(_shapes(first)) ^ set(_shapes(run))):
            raise Refused(f"{case[0]} {case[1]}: the runs differ in its shape or its control, or one has no such case")

    if paired(old, new):
        for one, other in zip(old, new, strict=True):
            if one["seatings"] != other["seatings"]:
                counts = f"{one['seatings']} and {other['seatings']}"
                raise Refused(f"seatings: of one session are {counts}, must be as many on either side")


def _red(run: dict[str, Any]) -> Iterator[str]:
    commit = run["environment"].get("commit")
    if run["tests"] is not None and not run["tests"]["passed"]:
        yield f"the tests of commit {commit} fail: {run['tests']['summary']}"
    for case in run["cases"]:
        if case["agrees"] is not True:
            yield f"{case['op']} {case['case']}: wrong at commit {commit}: {case['disagreement']}"


def _shapes(run: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(c["op"], c["case"], json.dumps(c["shape"]), c["control"]["is"]) for c in run["cases"]]


def paired(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> bool:
    """Whether the two sides took turns with each other."""
    sessions = [[run.get("session") for run in side] for side in (old, new)]
    return None not in sessions[0] and sessions[0] == sessions[1]


def changes(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], gate: float = 5.0) -> list[Change]:
    """The change of every case, in the order of the files."""
    together = paired(old, new)
    rows = []
    tail = (1 - CONFIDENCE) / len(old[0]["cases"]) / 2
    for case in old[0]["cases"]:
        a, b = (_seatings(side, case) for side in (old, new))
        centres: list[float] = []
        if together:
            alike = np.abs(b.controls - a.controls) < _ALIKE
            centre, low, high = median_interval((b.ops - a.ops)[alike], tail)
            files = np.repeat(np.arange(len(old)), [run["seatings"] for run in old])
            centres = [_median((b.ops - a.ops)[alike & (files == i)]) for i in range(len(old))]
        else:
            (old_centre, old_low, old_high), (new_centre, new_low, new_high) = (
                median_interval(side.ops - side.controls, tail / 2) for side in (a, b)
            )
            centre, low, high = new_centre - old_centre, new_low - old_high, new_high - old_low
        # one pair of processes that shows no change says that the others' may be where they lie in memory
        low, high = min([low, *centres]), max([high, *centres])
        percent, least, most = _percent(centre), _percent(low), _percent(high)
        verdict = _verdict(percent, least, most, gate, PAIRED if together else APART)
        old_ms, new_ms = (float(np.exp(np.median(side.ops))) for side in (a, b))
        rows.append(Change(case["op"], case["case"], old_ms, new_ms, percent, least, most, verdict))
    return rows


@dataclass(frozen=True)
class Seatings:
    """Log of the milliseconds that the op and its control take in each seating when little disturbs them."""

    ops: Floats
    controls: Floats


def _seatings(side: Sequence[dict[str, Any]], case: dict[str, Any]) -> Seatings:
    ops, controls = [], []
    for run in side:
        row = next(c for c in run["cases"] if (c["op"], c["case"]) == (case["op"], case["case"]))
        ops += [_low(seating) for seating in _split(row["entries"]["op"]["samples"], run["seatings"])]
        controls += [_low(seating) for seating in _split(row["control"]["samples"], run["seatings"])]
    return Seatings(np.array(ops), np.array(controls))


def _split(turns: list[list[float]], seatings: int) -> list[Floats]:
    each = len(turns) // seatings
    return [np.concatenate(turns[i * each : (i + 1) * each]) for i in range(seatings)]


def _low(samples: Floats) -> float:
    return float(np.log(np.quantile(samples, _QUIET)))


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else 0.0


def median_interval(values: Floats, tail: float) -> tuple[float, float, float]:
    """The median and the interval that it leaves on either side with probability `tail` at most; too few: infinite."""
    ordered, n = np.sort(values), len(values)
    if n == 0:
        return 0.0, -math.inf, math.inf
    below, rank = 0.0, 0
    while rank < n and (below := below + math.comb(n, rank) / 2**n) <= tail:
        rank += 1
    if rank == 0:
        return float(np.median(values)), -math.inf, math.inf
    return float(np.median(values)), float(ordered[rank - 1]), float(ordered[n - rank])


def _percent(log: float) -> float:
    return math.copysign(math.inf, log) if abs(log) > _UNBOUNDED else 100 * math.expm1(log)


def _interval(change: Change) -> str:
    return "too few seatings" if math.isinf(change.high) else f"{change.low:+.1f} .. {change.high:+.1f}"


def _verdict(percent: float, low: float, high: float, gate: float, threshold: float) -> str:
    if percent > gate and low > threshold:
        return "slower"
    if percent < -gate and high < -threshold:
        return "faster"
    return "same" if -gate < low and high < gate else "undecided"


def _as_json(change: Change) -> dict[str, Any]:
    """JSON has no infinity: null."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in asdict(change).items()}


@command("compare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: see the module."""
    parser = Parser(prog="python -m profiling.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="JSON of `dmtp bench ops`, or several joined by commas")
    parser.add_argument("new")
    parser.add_argument("--gate", type=float, default=5.0, help="percent")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args(arguments)
    check_range("--gate", options.gate, PAIRED)
    try:
        old, new = read(options.old), read(options.new)
        check(old, new)
        found = changes(old, new, options.gate)
    except Refused as reason:
        print(f"compare: no verdict: {reason}", file=sys.stderr)
        return 2
    slower = [c for c in found if c.verdict == "slower"]
    if options.json:
        print(
            json.dumps(
                {"gate": options.gate, "slower": len(slower), "cases": [_as_json(c) for c in found]}, allow_nan=False
            )
        )
        return bool(slower)
    rows = [(c.op, c.case, c.old_ms, c.new_ms, f"{c.percent:+.1f} %", _interval(c), c.verdict) for c in found]
    print(table(("op", "case", "old, ms", "new, ms", "change", f"{CONFIDENCE:.0%}, all together", "verdict"), rows))
    if not paired(old, new):
        print(
            f"separate runs: only changes of more than {APART:g} % are told; profiling.pair lets two commits take turns"
        )
    untested = [r["environment"]["commit"] for r in (*old, *new) if r["tests"] is None]
    if untested:
        print("tests: not run; the ops agreed with their references in both runs")
    counts = ", ".join(f"{sum(c.verdict == v for c in found)} {v}" for v in ("slower", "faster", "same", "undecided"))
    print(f"{counts}; gate {options.gate:g} %")
    return bool(slower)


if __name__ == "__main__":
    sys.exit(main())
