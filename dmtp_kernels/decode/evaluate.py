"""Decode a set of prompts with several methods and measure acceptance, agreement, identity and speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels.decode.agreement import teacher_forced_agreement
from dmtp_kernels.decode.check import compare_outputs
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.memory import check_fits
from dmtp_kernels.decode.method import METHODS, VERIFY_SHAPED, Method
from dmtp_kernels.decode.metrics import AcceptanceStats, bootstrap_interval
from dmtp_kernels.decode.request import Completion, Request
from dmtp_kernels.decode.stack import get_method
from dmtp_kernels.models.checkpoint import Checkpoint, write_atomically

BASELINE = "autoregressive"


@dataclass(frozen=True)
class Run:
    """Completions of one method over all prompts, with what they cost."""

    method: Method
    completions: list[Completion]
    seconds: float
    target_forwards: int

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance figures over all requests."""
        return AcceptanceStats(
            tuple(tuple(c.histogram) for c in self.completions),
            tuple(len(c.tokens) for c in self.completions),
            tuple(c.rounds for c in self.completions),
        )


def make_requests(
    prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float, seed: int, stop_ids: tuple[int, ...]
) -> list[Request]:
    """One request per prompt; prompt i draws with seed `seed + i`."""
    return [
        Request(tuple(prompt), max_new_tokens, temperature=temperature, seed=seed + i, stop_ids=stop_ids)
        for i, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def run_method(
    checkpoint: Checkpoint,
    method: Method,
    requests: Sequence[Request],
    batch: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Decode all requests with one method, `batch` rows at a time.

    Raises:
        ValueError: the caches of so many rows do not fit into the memory that is free.
    """
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    check_fits("batch", batch, checkpoint, [method], longest)
    engine = Engine(checkpoint, method, max_batch=batch, max_tokens=longest)
    ids = [engine.submit(request) for request in requests]
    done = 0
    start = time.perf_counter()
    while engine.busy:
        events = engine.step()
        done += sum(event.finish_reason is not None for event in events)
        if on_progress is not None:
            on_progress(done, len(ids))
    seconds = time.perf_counter() - start
    return Run(method, [engine.completions[i] for i in ids], seconds, engine.rounds)


@torch.no_grad()
def compare(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.6,
    batch: int = 8,
    seed: int = 0,
    stop_ids: tuple[int, ...] = (),
    check: bool = False,
    agreement: bool = True,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Table of methods over the same prompts, token ids or bytes, and seeds, ready for JSON.

    `identical` is present with `check`; an interval is a 95 % percentile bootstrap over prompts. `tokens_per_second`
    is this machine's, eager, and includes prefill.
    """
    if not prompts:
        raise ValueError("prompts: there are none")
    methods = [get_method(name) for name in names]
    requests = make_requests(
        prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop_ids=stop_ids
    )

    def run(method: Method) -> Run:
        report = None if on_progress is None else lambda done, total: on_progress(method.name, done, total)
        return run_method(checkpoint, method, requests, batch, report)

    baseline = run(METHODS[BASELINE]) if check or agreement else None
    shaped = run(VERIFY_SHAPED) if check else None
    rows: dict[str, Any] = {}
    for method in methods:
        result = baseline if baseline is not None and method.name == BASELINE else run(method)
        rows[method.name] = summarise(result)
        if check and baseline is not None and shaped is not None:
            verdict = compare_outputs(checkpoint, result.completions, baseline.completions, shaped.completions)
            rows[method.name] |= {
                "identical": verdict.identical,
                "exact": verdict.exact,
                "ties": verdict.ties,
                "mismatches": [list(m) for m in verdict.mismatches],
            }
        if agreement and baseline is not None and method.num_candidates:
            rows[method.name]["teacher_forced"] = teacher_forced_agreement(checkpoint, method, baseline.completions)
    return {
        "temperature": temperature,
        "prompts": len(prompts),
        "batch": batch,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "methods": rows,
    }


def summarise(run: Run) -> dict[str, Any]:
    """Figures of one method; acceptance ones are None for a method without candidates."""
    stats = run.stats
    emitted = sum(len(c.tokens) for c in run.completions)
    rounds = sum(c.rounds for c in run.completions)
    after_prefill = emitted - len(run.completions)
    figures: dict[str, Any] = {
        "prompts": len(run.completions),
        "tokens": emitted,
        "rounds": rounds,
        "target_forwards_per_token": rounds / after_prefill if after_prefill else None,
        "tokens_per_second": emitted / run.seconds,
        "batched_forwards": run.target_forwards,
    }
    if run.method.num_candidates == 0:
        return figures
    # per prompt: (rounds whose first candidate was accepted, rounds) and (accepted candidates + rounds, rounds)
    first = [(c.rounds - c.histogram[0], c.rounds) for c in run.completions]
    length = [(sum((k + 1) * n for k, n in enumerate(c.histogram)), c.rounds) for c in run.completions]
    return figures | {
        "t1_acceptance": stats.t1_acceptance,
        "t1_acceptance_interval": bootstrap_interval(first),
        "per_verify_length": stats.per_verify_length,
        "per_verify_length_interval": bootstrap_interval(length),
        "per_request_length": stats.per_request_length,
        "cumulative": stats.cumulative,
        "conditional": stats.conditional,
        "histogram": stats.histogram,
    }


def read_record(checkpoint: Path) -> dict[str, Any]:
    """The training record beside `checkpoint`.

    Raises:
        ValueError: there is none, or it is not a record.
    """
    path = checkpoint.with_suffix(".json")
    if not path.is_file():
        raise ValueError(f"record: {path} does not exist")
    record = json.loads(path.read_text())
    kept = record.get("compare", []) if isinstance(record, dict) else None
    if not isinstance(kept, list) or not all(isinstance(r, dict) and "temperature" in r for r in kept):
        raise ValueError(f"record: {path} is not a training record")
    return record


def add_to_record(checkpoint: Path, result: dict[str, Any]) -> None:
    """Put a comparison in the training record beside `checkpoint`, in place of an earlier one at its temperature.

    Raises:
        ValueError: as `read_record`.
    """
    record = read_record(checkpoint)
    others = [r for r in record.get("compare", []) if r["temperature"] != result["temperature"]]
    record["compare"] = sorted([*others, result], key=lambda r: r["temperature"])
    write_atomically(checkpoint.with_suffix(".json"), (json.dumps(record, indent=1) + "\n").encode())
