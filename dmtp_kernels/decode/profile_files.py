"""What a profile leaves on disk: a trace for Perfetto, a figure of stacked bars."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels._files import check_file, replacing
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.profile import WARMUP
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES

TRACE_SUFFIXES = (".json", ".json.gz")
COLORS = {
    "t1": "#d62728",
    "draft": "#1f77b4",
    "verify": "#8c564b",
    "accept": "#2ca02c",
    "mtp": "#ff7f0e",
    "commit": "#9467bd",
    "advance": "#17becf",
}
"""Colour of a stage's bars."""


def check_trace(option: str, path: Path) -> None:
    """See that a trace of that name can be written, before anything is measured.

    Raises:
        ValueError: `check_file` refuses, or the profiler cannot take the directory's name; names the option.
    """
    check_file(option, path, TRACE_SUFFIXES)
    try:
        str(path.resolve().parent).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{option}: is {path}, its directory must have a name in UTF-8") from None


@torch.no_grad()
def trace_rounds(engine: Engine, requests: list[Request], path: Path, *, rounds: int = 8, warmup: int = WARMUP) -> None:
    """Write rounds that decode `requests` as a Chrome trace, which Perfetto reads: each round a range, in it its
    stages, in these the operators, and with CUDA the same ranges over the kernels they launched.

    Raises:
        ValueError: the file cannot be written.
    """
    for request in requests:
        engine.submit(request)
    engine.admit()
    for _ in range(warmup):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if engine.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            engine.step()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
    with replacing("trace", path) as temporary:
        plain = temporary.with_name("trace.json")
        try:
            profile.export_chrome_trace(str(plain))
            text = plain.read_bytes()
            json.loads(text)
        except (RuntimeError, ValueError, FileNotFoundError) as error:
            # the profiler says nothing where the disk took a part only
            raise OSError("the profiler wrote no whole trace; is the disk full?") from error
        temporary.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)


def plot_stages(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one stacked bar per method, ms of a round by stage, as a PNG.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    figure_type = figure_class()
    figure = figure_type(figsize=(3.5 + 2 * len(results), 6.5), layout="constrained")
    axis = figure.add_subplot()
    names = [found["method"] for found in results]
    bottoms = [0.0] * len(results)
    for stage in STAGES:
        rows = [found["stages"][stage] for found in results]
        text = " / ".join(dict.fromkeys(row["label"] for row in reversed(rows)))
        bars = axis.bar(
            names, [row["ms"] for row in rows], bottom=bottoms, width=0.55, color=COLORS[stage], label=text, linewidth=0
        )
        shown = [f"{row['ms']:.2f}" if row["share"] > 0.03 else "" for row in rows]
        axis.bar_label(bars, shown, label_type="center", color="white", fontsize=8)
        bottoms = [bottom + row["ms"] for bottom, row in zip(bottoms, rows, strict=True)]
    for index, found in enumerate(results):
        axis.text(index, bottoms[index], f"{found['round_ms']:.2f} ms", ha="center", va="bottom")
    found = results[0]
    axis.set_title(f"{found['batch']} request{'s' * (found['batch'] != 1)}, {found['rounds']} rounds each", fontsize=10)
    axis.set_ylabel("ms/round")
    axis.margins(y=0.06)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
    with replacing("plot", path) as temporary:
        figure.savefig(temporary, dpi=120)


def figure_class() -> Any:
    """matplotlib's `Figure`.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plot: matplotlib is not installed; install the extra dmtp_kernels[plot]") from None
    return Figure
