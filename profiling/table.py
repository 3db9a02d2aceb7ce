"""Plain tables for the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right; None is printed as "-"."""
    cells = [[_text(value) for value in row] for row in rows]
    right = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(headers))]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in [list(headers), *cells]
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths).rstrip(), *lines[1:]])


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
