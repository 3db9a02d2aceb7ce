"""What each head format leaves over on a real head: `python -m profiling.head_report [--json]`.

Takes any head and hidden states (safetensors files); by default SmolLM2-135M and states it visits while it answers
prompts. Factors and deflated directions come from the first half of the states, everything is measured on the other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dmtp_kernels.models.smollm2 import load_smollm2
from dmtp_kernels.ops.lm_head import HeadReport, LMHead, lm_head_report, pack_lm_head
from dmtp_kernels.ops.lm_head.formats import FORMATS
from profiling.command import Parser, command

QUANTILES = (0.5, 0.9, 0.99, 1.0)


def heads(weight: torch.Tensor, calibration: torch.Tensor) -> Iterator[tuple[str, LMHead]]:
    """Every format worth comparing, under the name the table gives it."""
    width = weight.shape[1]
    for name in ("dense", "int8", "int8_g64", "int6_g64"):
        yield name, pack_lm_head(weight, format=name)
    for share in (16, 8, 4):
        packed = pack_lm_head(weight, format="deflated", calibration=calibration, rank=max(1, width // share))
        yield f"deflated H/{share}", packed
    int4 = pack_lm_head(weight, format="int4_g32")
    for capacity in (16, 32, 64, 512):
        yield f"int4_g32, {capacity} rows", dataclasses.replace(int4, capacity=capacity)
    for share in (8, 4):
        for up_format in ("same", "int8"):
            options: dict[str, Any] = {"rank": max(1, width // share), "up_format": up_format}
            packed = pack_lm_head(weight, format="low_rank", calibration=calibration, **options)
            for capacity in (64, 512, 2048):
                label = f"low_rank H/{share}{'' if up_format == 'same' else ' int8'}, {capacity} rows"
                yield label, dataclasses.replace(packed, capacity=capacity)


def table(reports: list[tuple[str, HeadReport]]) -> str:
    """Markdown."""
    certified = [(n, r) for n, r in reports if FORMATS[r.format].certified]
    lines = ["| certified | bytes/row | median | p90 | p99 | max | full scans |", "|---|---|---|---|---|---|---|"]
    for name, report in certified:
        counts = " | ".join(str(report.survivors[q]) for q in QUANTILES)
        lines.append(f"| {name} | {report.bytes_per_row:.0f} | {counts} | {report.overflow:.2%} |")
    lines += ["", "| uncertified, shortlist | bytes/row | recall | kept |", "|---|---|---|---|"]
    for name, report in reports:
        if (name, report) not in certified:
            lines.append(f"| {name} | {report.bytes_per_row:.0f} | {report.recall:.2%} | {report.kept:.2%} |")
    return "\n".join(lines)


def read_head(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight [V, H]` and `states [m, H]` of a safetensors file.

    Raises:
        ValueError: no such file, or it holds something else.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--head: cannot read {path}: {error}") from error
    for name, rows in (("weight", 1), ("states", 2)):
        if name not in tensors:
            raise ValueError(f"--head: {path} has no tensor {name!r}")
        found = tensors[name]
        if found.dim() != 2 or not found.is_floating_point() or found.shape[0] < rows or found.shape[1] < 1:
            raise ValueError(
                f"--head: {name} of {path} is {list(found.shape)} {found.dtype}, must be at least {rows} rows of floats"
            )
    weight, states = tensors["weight"], tensors["states"]
    if weight.shape[1] != states.shape[1]:
        raise ValueError(f"--head: states of {path} are {states.shape[1]} wide, weight is {weight.shape[1]}")
    return weight, states


@command("profiling.head_report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with a message for a file that holds no head."""
    parser = Parser(prog="python -m profiling.head_report", description=__doc__.split("\n")[0])
    parser.add_argument("--head", type=Path, help="safetensors file with `weight` [V, H] and `states` [m, H]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    if options.head:
        weight, states = read_head(options.head)
    else:
        model = load_smollm2()
        weight, states = model.head, model.states(new_tokens=232).to(torch.bfloat16)
    calibration, rest = states.tensor_split(2)
    reports = [(name, lm_head_report(head, rest, QUANTILES)) for name, head in heads(weight, calibration)]
    if options.json:
        print(json.dumps([{"name": name, **dataclasses.asdict(report)} for name, report in reports]))
        return 0
    print(f"{weight.shape[0]} rows x {weight.shape[1]}, {weight.dtype}; {rest.shape[0]} states, {rest.dtype}\n")
    print(table(reports))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
