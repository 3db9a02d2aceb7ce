"""Acceptance and throughput of what the ablation trained."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels.decode.evaluate import compare, make_requests, read_record, run_method
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.training.ablation.plan import BATCHES, DRAFTED, SEEDS, SERVED, STARTS, TEMPERATURES
from dmtp_kernels.training.ablation.processes import run_beside
from dmtp_kernels.training.data import held_out_prompts

UNTRAINED = tuple(name for name, method in METHODS.items() if method.drafter is None)
"""Methods that no start tells apart; they are measured with the continued drafters."""


def measure_all(
    runs: Path,
    *,
    seeds: Sequence[int] = SEEDS,
    prompts: int = 64,
    max_new_tokens: int = 128,
    batches: Sequence[int] = BATCHES,
    repeats: int = 3,
) -> dict[str, Any]:
    """Figures of every seed's checkpoints in `runs`, as `train_all` left them, ready for JSON.

    `comparisons` are `decode.evaluate.compare`'s, each with its seed and start; identity with autoregressive decoding
    is checked in all of them. `throughput` maps methods to tokens per second by batch, at temperature 1 on the first
    seed, prefill included: the median of `repeats` turns, which the methods take in rotation.

    Raises:
        ValueError: a checkpoint is missing or damaged, or `prompts` are more than there are.
    """
    began = time.perf_counter()
    texts = [p["text"].encode() for p in held_out_prompts()]
    if not 1 <= prompts <= len(texts):
        raise ValueError(f"prompts: is {prompts}, must be between 1 and {len(texts)}")
    for seed in seeds:
        for name in STARTS.values():
            if not (runs / f"seed{seed}" / name).is_file():
                raise ValueError(f"runs: {runs / f'seed{seed}' / name} is missing; `dmtp train --all` writes it")
    texts = texts[:prompts]
    compared = run_beside(_compare_seed, {s: (runs / f"seed{s}", s, texts, max_new_tokens) for s in seeds})
    first = load_checkpoint(runs / f"seed{seeds[0]}" / STARTS["continued"])
    load = os.getloadavg()[0]
    speeds = _throughput(first, texts, max(1, max_new_tokens // 2), batches, repeats)
    return {
        "seeds": list(seeds),
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "comparisons": [c for seed in seeds for c in compared[seed]],
        "throughput": {"threads": torch.get_num_threads(), "load": round(load, 1), "tokens_per_second": speeds},
        "training": [_trained(runs / f"seed{seed}") for seed in seeds],
        "wall_seconds": round(time.perf_counter() - began),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
    }


def _compare_seed(directory: Path, seed: int, texts: list[bytes], max_new_tokens: int) -> list[dict[str, Any]]:
    results = []
    for start, file in STARTS.items():
        models = load_checkpoint(directory / file)
        trained = [name for name in DRAFTED if name in models.drafters]
        names = [*UNTRAINED, *trained] if start == "continued" else trained
        for temperature in TEMPERATURES:
            print(f"seed {seed}: {start}, temperature {temperature}", file=sys.stderr, flush=True)
            result = compare(
                models, texts, names, max_new_tokens=max_new_tokens, temperature=temperature, batch=32, check=True
            )
            results.append(result | {"seed": seed, "start": start})
    return results


@torch.no_grad()
def _throughput(
    models: Checkpoint, texts: list[bytes], max_new_tokens: int, batches: Sequence[int], repeats: int
) -> dict[str, dict[str, float]]:
    served = [name for name in SERVED if METHODS[name].drafter in (None, *models.drafters)]
    turns: dict[str, dict[str, list[float]]] = {name: {str(b): [] for b in batches} for name in served}
    for batch in batches:
        count = max(8, batch)
        asked = (texts * -(-count // len(texts)))[:count]
        requests = make_requests(asked, max_new_tokens=max_new_tokens, temperature=1.0, seed=0, stop_ids=())
        for _ in range(repeats):
            for name in served:
                run = run_method(models, METHODS[name], requests, batch)
                emitted = sum(len(c.tokens) for c in run.completions)
                turns[name][str(batch)].append(emitted / run.seconds)
    return {name: {b: round(statistics.median(v), 1) for b, v in by.items()} for name, by in turns.items()}


def _trained(directory: Path) -> dict[str, Any]:
    record = read_record(directory / STARTS["scratch"])
    kept = {k: record[k] for k in ("seed", "budget", "data", "wall_seconds", "versions", "machine")}
    held_out = ("target_nats_per_byte", "mtp_nats_per_byte", "mtp_agreement")
    return kept | {k: record["held_out"][k] for k in held_out}
