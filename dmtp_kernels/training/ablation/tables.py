"""The ablation's figures by method, start and temperature, and what they say of the source's claims."""

from __future__ import annotations

import statistics
from typing import Any

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.training.ablation.plan import ALIKE, CLAIMS, STARTS, TEMPERATURES, Claim


class Figures:
    """`result` of `measure_all`, by method, start and temperature."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        self._rows: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
        for comparison in result["comparisons"]:
            for name, row in comparison["methods"].items():
                key = name, comparison["start"], comparison["temperature"]
                self._rows.setdefault(key, []).append(row)

    def names(self, start: str) -> list[str]:
        """Methods with candidates measured from `start`, in the order of `METHODS`."""
        return [name for name in METHODS if self.values(name, start, TEMPERATURES[0], "t1_acceptance")]

    def values(self, name: str, start: str, temperature: float, key: str) -> list[Any]:
        """One value a seed; none where the method was not measured. A method without a drafter has one start only."""
        own = start if METHODS[name].drafter else "continued"
        return [row[key] for row in self._rows.get((name, own, temperature), ()) if row.get(key) is not None]

    def differences(self, better: str, worse: str, start: str, temperature: float) -> list[float]:
        """Per-verify length of `better` over that of `worse`, in percent, one value a seed."""
        pairs = zip(
            self.values(better, start, temperature, "per_verify_length"),
            self.values(worse, start, temperature, "per_verify_length"),
            strict=False,
        )
        return [100 * (b / w - 1) for b, w in pairs]

    def verdict(self, claim: Claim, start: str) -> str:
        """`yes` or `no` where every seed and temperature agrees, else `mixed`; alike: their mean is below `ALIKE`."""
        found = [d for t in TEMPERATURES for d in self.differences(claim.better, claim.worse, start, t)]
        if not found:
            return "-"
        if claim.equal:
            return "yes" if abs(statistics.mean(found)) < ALIKE else "no"
        return "yes" if min(found) > 0 else "no" if max(found) < 0 else "mixed"

    @property
    def identical(self) -> tuple[int, int]:
        """Comparisons of a method's outputs with autoregressive decoding that found no difference, and all of them."""
        checked = [
            row["identical"]
            for rows in self._rows.values()
            for row in rows
            if {"identical", "t1_acceptance"} <= row.keys()
        ]
        return sum(checked), len(checked)


def spread(values: list[float], digits: int = 2, sign: bool = False) -> str:
    """Mean and half the range: `2.46 ± 0.03`."""
    if not values:
        return "-"
    shown = f"{statistics.mean(values):{'+' if sign else ''}.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ± {(max(values) - min(values)) / 2:.{digits}f}"


def methods_table(figures: Figures) -> list[list[str]]:
    """Every method that was measured, and what it is."""
    return [["method", "block and fusion"]] + [[f"`{n}`", METHODS[n].summary] for n in figures.names("continued")]


def method_table(figures: Figures, start: str) -> list[list[str]]:
    """A line per method: T1 acceptance and length at both temperatures, and the length against DFlash's."""
    head = ["method"]
    for temperature in TEMPERATURES:
        head += [f"T1 %, T={temperature:g}", f"length, T={temperature:g}", f"over DFlash %, T={temperature:g}"]
    table = [head]
    for name in figures.names(start):
        row = [f"`{name}`"]
        for temperature in TEMPERATURES:
            first = [100 * v for v in figures.values(name, start, temperature, "t1_acceptance")]
            length = figures.values(name, start, temperature, "per_verify_length")
            gain = figures.differences(name, "dflash", start, temperature)
            row += [spread(first, 1), spread(length), "" if name == "dflash" else spread(gain, 1, sign=True)]
        table.append(row)
    return table


def agreement_table(figures: Figures) -> list[list[str]]:
    """T1 agreement with the target's argmax on the same text, which does not depend on where rounds start."""
    table = [["method", *(f"{start}, T=1 text" for start in STARTS)]]
    for name in figures.names("continued"):
        row = [f"`{name}`"]
        for start in STARTS:
            own = figures.values(name, start, 1.0, "teacher_forced")
            row.append(spread([100 * v[0] for v in own if v], 1))
        table.append(row)
    return table


def claim_table(figures: Figures) -> list[list[str]]:
    """What the source says of two methods' lengths, and what is seen here."""
    table = [["claim", "methods", "source %", *(f"{s}, T={t:g} %" for s in STARTS for t in TEMPERATURES), *STARTS]]
    for claim in CLAIMS:
        methods = f"`{claim.better}` {'like' if claim.equal else 'over'} `{claim.worse}`"
        row = [claim.text, methods, "in words" if claim.source is None else f"{claim.source:+.2f}"]
        for start in STARTS:
            for t in TEMPERATURES:
                row.append(spread(figures.differences(claim.better, claim.worse, start, t), 1, sign=True))
        table.append([*row, *(figures.verdict(claim, start) for start in STARTS)])
    return table


def position_table(figures: Figures, names: tuple[str, ...], temperature: float) -> list[list[str]]:
    """Cumulative and conditional acceptance by position, means over the seeds, continued drafters."""
    table = [["method", *(f"T{k}" for k in range(1, 8))]]
    for name in names:
        cells = [
            [_mean(column) for column in zip(*figures.values(name, "continued", temperature, key), strict=True)]
            for key in ("cumulative", "conditional")
        ]
        if cells[0]:
            shown = [f"{a} ({b})" for a, b in zip(*cells, strict=True)]
            table.append([f"`{name}`", *shown, *["-"] * (7 - len(shown))])
    return table


def throughput_table(figures: Figures) -> list[list[str]]:
    """Tokens per second by batch."""
    speeds = figures.result["throughput"]["tokens_per_second"]
    batches = list(next(iter(speeds.values())))
    lines = [[f"`{name}`", *(f"{by[b]:.0f}" for b in batches)] for name, by in speeds.items()]
    return [["method", *(f"batch {b}" for b in batches)], *lines]


def _mean(column: tuple[float | None, ...]) -> str:
    known = [100 * v for v in column if v is not None]
    return f"{statistics.mean(known):.0f}" if known else "-"
