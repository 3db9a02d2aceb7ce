"""The ablation's figures as images."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.training.ablation.plan import SERVED, STARTS
from dmtp_kernels.training.ablation.tables import Figures

COLOURS = {"continued": "tab:blue", "scratch": "tab:orange"}


def draw(result: dict[str, Any], directory: Path, temperature: float = 1.0) -> list[Path]:
    """Write `ablation_methods.png`, `ablation_positions.png` and `ablation_throughput.png` to `directory`.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = Figures(result)
    drawn = []
    for name, paint in (("methods", _methods), ("positions", _positions), ("throughput", _throughput)):
        figure = paint(pyplot, figures, temperature)
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        path = directory / f"ablation_{name}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        drawn.append(path)
    return drawn


def check_matplotlib() -> None:
    """Raises ValueError: matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; install the extra dmtp_kernels[plot]")


def _methods(pyplot: Any, figures: Figures, temperature: float) -> Any:
    """T1 acceptance and length of every method, a bar a start, a dot a seed."""
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6.5), sharey=True)
    names = figures.names("continued")
    keys = (("t1_acceptance", 100, "T1 acceptance, %"), ("per_verify_length", 1, "tokens per verification"))
    for axis, (key, scale, label) in zip(axes, keys, strict=True):
        for shift, start in zip((-0.2, 0.2), STARTS, strict=True):
            for place, name in enumerate(names):
                drafter = METHODS[name].drafter
                values = [scale * v for v in figures.values(name, start, temperature, key)]
                if not values or (drafter is None and start != "continued"):
                    continue
                at = place + (shift if drafter else 0)
                axis.barh(at, sum(values) / len(values), 0.38, color=COLOURS[start], alpha=0.6)
                axis.plot(values, [at] * len(values), "k.", markersize=4)
        axis.set_xlabel(f"{label}, temperature {temperature:g}")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[1].set_xlim(left=1)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[start], alpha=0.6) for start in STARTS]
    figure.legend(handles, ("continued from DFlash's weights", "from scratch"), loc="upper center", ncols=2)
    return figure


def _positions(pyplot: Any, figures: Figures, temperature: float) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharex=True)
    for axis, key in zip(axes, ("cumulative", "conditional"), strict=True):
        for name in SERVED:
            by_seed = figures.values(name, "continued", temperature, key)
            if not by_seed:
                continue
            columns = list(zip(*by_seed, strict=True))
            known = [[100 * v for v in column if v is not None] for column in columns]
            ranks = [k + 1 for k, column in enumerate(known) if column]
            known = [column for column in known if column]
            (line,) = axis.plot(ranks, [sum(c) / len(c) for c in known], marker="o", label=name)
            axis.fill_between(
                ranks, [min(c) for c in known], [max(c) for c in known], alpha=0.15, color=line.get_color()
            )
        axis.set_title(f"{key} acceptance, temperature {temperature:g}, continued; bands span the seeds")
        axis.set_xlabel("candidate position")
        axis.set_ylabel("%")
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def _throughput(pyplot: Any, figures: Figures, _: float) -> Any:
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name, by_batch in figures.result["throughput"]["tokens_per_second"].items():
        axis.plot([int(b) for b in by_batch], list(by_batch.values()), marker="o", label=name)
    axis.set_xscale("log", base=2)
    batches = [int(b) for b in next(iter(figures.result["throughput"]["tokens_per_second"].values()))]
    axis.set_xticks(batches, [str(b) for b in batches])
    axis.set_xlabel("batch")
    axis.set_ylabel("tokens/s on this CPU, temperature 1")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    return figure
