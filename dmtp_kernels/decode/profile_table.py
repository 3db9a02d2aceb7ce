"""A profile as the source's overhead table lays it out."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.profile import added_stages
from dmtp_kernels.decode.round import STAGES


def beside(found: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """A profile with that of another method under `against`, and what it takes more under `difference_ms`."""
    if other is None:
        return found
    stages = {name: row["ms"] - other["stages"][name]["ms"] for name, row in found["stages"].items()}
    difference = {"round": found["round_ms"] - other["round_ms"], "stages": stages}
    return found | {"against": other, "difference_ms": difference}


def overhead_table(found: dict[str, Any]) -> Table:
    """ms/round by stage, the drafter's first, then what the method adds to it; the other method, if any, on the
    left."""
    other = found.get("against")
    sampled = f"T = {found['temperature']}, " if "temperature" in found else ""
    requests = f"{found['batch']} request{'s' * (found['batch'] != 1)}"
    table = Table(
        title=f"{requests}, {sampled}{found['rounds']} rounds after {found['warmup']}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("stage (ms/round)")  # may wrap, figures may not
    columns = [other["method"], found["method"], "difference"] if other else [found["method"]]
    for column in (*columns, "share", "of it models"):
        table.add_column(column, justify="right", no_wrap=True)
    added = added_stages(METHODS[found["method"]]) if found["method"] in METHODS else ()
    order = ("draft", *added, *(name for name in STAGES if name not in ("draft", *added))) if added else STAGES
    for name in order:
        row = found["stages"][name]
        text = f"additional {row['label']}" if name in added else row["label"]
        cells = [_ms(other, name), _ms(found, name), f"{found['difference_ms']['stages'][name]:+.3f}"] if other else []
        models = "-" if row["models_ms"] is None else f"{row['models_ms']:.3f}"
        table.add_row(text, *(cells or [_ms(found, name)]), f"{100 * row['share']:.1f} %", models)
    table.add_section()
    cells = [f"{other['round_ms']:.3f}"] if other else []
    cells.append(f"{found['round_ms']:.3f}")
    cells += [f"{found['difference_ms']['round']:+.3f}"] if other else []
    models = "-" if found["own_ms"] is None else f"{found['round_ms'] - found['own_ms']:.3f}"
    table.add_row("whole round", *cells, "100 %", models, style="bold")
    return table


def own_share(found: dict[str, Any]) -> str:
    """What of a round is not the models', in words."""
    if found["own_ms"] is None:
        return f"{found['method']}: graphs hide the models' share"
    return (
        f"{found['method']}: outside the models {found['own_ms']:.2f} ms, {100 * found['own_share']:.1f} %; "
        f"half of the rounds took {found['round_quartiles_ms'][0]:.2f} to {found['round_quartiles_ms'][1]:.2f} ms"
    )


def conditions(found: dict[str, Any]) -> str:
    """What else the machine did, in words: times of a machine that others use move with it."""
    before, after = found["load"]
    return f"torch threads: {found['threads']}; load of the machine before and after: {before:.1f}, {after:.1f}"


def _ms(found: dict[str, Any], name: str) -> str:
    method = METHODS.get(found["method"])
    if name == "mtp" and method is not None and not method.uses_mtp:
        return "-"
    return f"{found['stages'][name]['ms']:.3f}"
