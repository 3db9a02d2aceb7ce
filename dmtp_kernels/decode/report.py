"""Tables and figures of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table


def comparison_tables(result: dict[str, Any]) -> list[Table]:
    """Two tables: one line of figures per method, and acceptance by position."""
    title = (
        f"temperature {result['temperature']}, batch {result['batch']}, {result['max_new_tokens']} tokens per prompt"
    )
    summary = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    checked = any("identical" in row for row in result["methods"].values())
    for column in ("method", "T1 %", "per verify", "per request", "forwards/token", "T1 agrees %", "tokens/s"):
        summary.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    if checked:
        summary.add_column("identical", justify="right")
    positions = Table(title="accepted at position k: cumulative % (conditional %)", box=box.SIMPLE_HEAD, pad_edge=False)
    positions.add_column("method", no_wrap=True)
    most = max((len(row.get("cumulative") or []) for row in result["methods"].values()), default=0)
    for k in range(most):
        positions.add_column(f"T{k + 1}", justify="right", no_wrap=True)
    for name, row in result["methods"].items():
        cells = [
            name,
            _percent(row.get("t1_acceptance")),
            _number(row.get("per_verify_length"), 2),
            _number(row.get("per_request_length"), 2),
            _number(row.get("target_forwards_per_token"), 3),
            _percent((row.get("teacher_forced") or [None])[0]),
            _number(row["tokens_per_second"], 0),
        ]
        if checked:
            cells.append(_identical(row))
        summary.add_row(*cells)
        if row.get("cumulative"):
            pairs = zip(row["cumulative"], row["conditional"], strict=True)
            cells = [f"{_percent(cumulative, 0)} ({_percent(conditional, 0)})" for cumulative, conditional in pairs]
            positions.add_row(name, *cells, *["-"] * (most - len(cells)))
    return [summary, positions] if most else [summary]


def plot_acceptance(result: dict[str, Any], path: Path) -> None:
    """Write cumulative and conditional acceptance by position, side by side, as an image.

    Raises:
        ValueError: matplotlib is not installed, or no method has candidates.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plot: matplotlib is not installed; install the extra dmtp_kernels[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in result["methods"].items() if row.get("cumulative")}
    if not rows:
        raise ValueError("plot: no method with candidates among those compared")
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharex=True)
    for axis, key in zip(axes, ("cumulative", "conditional"), strict=True):
        for name, row in rows.items():
            values = [float("nan") if v is None else 100 * v for v in row[key]]
            axis.plot(range(1, len(values) + 1), values, marker="o", label=name)
        axis.set_title(f"{key} acceptance, temperature {result['temperature']}")
        axis.set_xlabel("candidate position")
        axis.set_ylabel("%")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _identical(row: dict[str, Any]) -> str:
    if not row["identical"]:
        return f"NO ({len(row['mismatches'])} differ)"
    return f"yes ({row['ties']} ties)" if row["ties"] else "yes"
