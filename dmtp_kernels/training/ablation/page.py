"""The results page: tables, figures, and the command that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dmtp_kernels.models.checkpoint import write_atomically
from dmtp_kernels.training.ablation.figures import draw
from dmtp_kernels.training.ablation.plan import ALIKE, SERVED
from dmtp_kernels.training.ablation.tables import (
    Figures,
    agreement_table,
    claim_table,
    method_table,
    methods_table,
    position_table,
    throughput_table,
)

_HELD_OUT = ("target_nats_per_byte", "mtp_nats_per_byte", "mtp_agreement")


def write_page(result: dict[str, Any], directory: Path, command: str) -> Path:
    """Write `README.md`, `ablation.json` and the figures to `directory`; returns the page.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    images = draw(result, directory)
    write_atomically(directory / "ablation.json", (json.dumps(result) + "\n").encode())
    page = directory / "README.md"
    write_atomically(page, _text(result, command, [image.name for image in images]).encode())
    return page


def _text(result: dict[str, Any], command: str, images: list[str]) -> str:
    figures = Figures(result)
    trained = result["training"]
    budget = trained[0]["budget"]
    steps, windows = budget["drafter_steps"] + budget["finetune_steps"], budget["drafter_rows"] or budget["rows"]
    same, checked = figures.identical
    seeds = ", ".join(str(seed) for seed in result["seeds"])
    speed = result["throughput"]
    minutes = [round(t["wall_seconds"] / 60) for t in trained]
    held_out = {key: " and ".join(f"{t[key]:.3f}" for t in trained) for key in _HELD_OUT}
    machine = result["machine"]
    parts = [
        "# Every method of the source on the same data and budget",
        "Made whole by this command; nothing in this file is written by hand:",
        f"```bash\n{command}\n```",
        f"Seeds {seeds}, each with its own target and MTP module: {budget['target_steps']} steps of {budget['rows']} "
        f"windows. Every drafter then has {steps} steps of {windows * budget['anchors']} blocks on the same batches, "
        f"either {budget['drafter_steps']} as DFlash and {budget['finetune_steps']} from its weights with new parts "
        "that change nothing at first (*continued*), or all from fresh weights (*scratch*). "
        f"{result['prompts']} held-out prompts of {result['max_new_tokens']} tokens, batch 32. A value is the mean "
        "over the seeds ± half the range between them.",
        f"Held out, by seed: target {held_out['target_nats_per_byte']} nats a byte, MTP "
        f"{held_out['mtp_nats_per_byte']}; MTP's argmax is the target's at {held_out['mtp_agreement']} of the "
        "positions.",
        f"Wall time: training {' and '.join(map(str, minutes))} minutes (the seeds beside each other, one thread "
        f"each), measuring {result['wall_seconds'] / 60:.0f} minutes, on {machine['cores']} cores "
        f"({machine['processor']}, torch {machine['torch']}).",
        f"Outputs identical to autoregressive decoding: {same} of {checked} comparisons of a method.",
        '*The source* is the description of the method, "DMTP: A Better First Token for Block Drafting via MTP"; where '
        "it gives no figure, it says so *in words*. *T1* is the share of rounds whose first candidate the target took, "
        "*length* the tokens that a verification emits, the correction or bonus included, `-` what was not trained or "
        "does not exist.",
        _markdown(methods_table(figures)),
        "`dspark` and `domino` predict another token in each slot than the weights they continue from, their constants "
        "are untuned, and they were not trained from scratch: below `dflash` says that the steps do not suffice.",
        "## Continued from DFlash's weights",
        _markdown(method_table(figures, "continued")),
        "## From scratch",
        _markdown(method_table(figures, "scratch")),
        f"![T1 acceptance and length]({images[0]})",
        "## What the source says, and what is seen here",
        "Per-verify length of the first method over the second, in percent. *yes* and *no*: every seed and both "
        "temperatures agree; *mixed*: they do not, so this scale does not tell. Alike, *yes*: the mean over seeds and "
        f"temperatures is within {ALIKE:g} %.",
        _markdown(claim_table(figures)),
        "## The first token alone",
        "Share of positions of the same autoregressive text (temperature 1) at which a method's T1 is the target's "
        "argmax, in percent: T1 acceptance itself also depends on where a method's rounds start.",
        _markdown(agreement_table(figures)),
        "## By position",
        "Cumulative acceptance in percent and, in brackets, conditional on all before; temperature 1, continued.",
        _markdown(position_table(figures, SERVED, 1.0)),
        f"![Acceptance by position]({images[1]})",
        "## Throughput",
        f"Tokens per second, temperature 1, seed {result['seeds'][0]}, continued; prefill included, {speed['threads']} "
        f"threads, load average {speed['load']} before it began. A toy on a CPU: what a round costs here says nothing "
        "of a GPU, and no speed-up is claimed.",
        _markdown(throughput_table(figures)),
        f"![Throughput]({images[2]})",
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(table: list[list[str]]) -> str:
    head, *lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
