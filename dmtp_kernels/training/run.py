"""The whole recipe, resumable: the stages, and the checkpoints with their records."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import load_checkpoint, save_checkpoint
from dmtp_kernels.training.budget import BUDGETS, Budget
from dmtp_kernels.training.data import Corpus, standard_library
from dmtp_kernels.training.runner import Losses, Runner, TrainingError
from dmtp_kernels.training.stages import DRAFTED, FILES, STAGES, enter, losses, new_trio

THREADS = 2
"""Fixed for a run, since the order of a threaded sum depends on it."""


def train(
    out_dir: str | Path,
    *,
    seed: int = 0,
    budget: str | Budget = "full",
    methods: Collection[str] | None = None,
    resume: bool = True,
    progress: bool = True,
    threads: int = THREADS,
    log: Callable[[str], None] = print,
) -> Path:
    """Train the trio from scratch and return the path of `tiny.safetensors`, with `tiny.json` beside it; where the
    budget says `scratch`, `scratch.safetensors` holds the drafters that were not continued from DFlash's weights.

    `out_dir` also keeps `state.pt`, from which a killed run continues to the same bits when `resume`. The same seed,
    interpreter, torch build, processor and number of threads give the same weights. The stages after DFlash's train
    `methods`, by default those that ship. Raises TrainingError when the directory cannot be written or holds the state
    of another run.
    """
    out = Path(out_dir)
    if isinstance(budget, str) and budget not in BUDGETS:
        raise TrainingError(f"training: budget is {budget!r}, must be one of {', '.join(BUDGETS)}")
    if not 0 <= seed < 2**31:
        raise TrainingError(f"training: seed is {seed}, must be between 0 and {2**31 - 1}")
    chosen = tuple(DRAFTED) if methods is None else tuple(methods)
    for name in chosen:
        if name not in METHODS or METHODS[name].drafter is None:
            raise TrainingError(f"training: {name!r} is not a method with a drafter")
    if not chosen:
        raise TrainingError("training: methods names none")
    plan = BUDGETS[budget] if isinstance(budget, str) else budget
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            return _Run(out, seed, plan, chosen, standard_library(), progress, threads, log).run(resume)
    except OSError as error:
        raise TrainingError(f"training: cannot write {error.filename or out}: {error.strerror or error}") from error
    finally:
        torch.set_num_threads(before)


class _Run(Runner):
    def __init__(
        self,
        out: Path,
        seed: int,
        budget: Budget,
        methods: tuple[str, ...],
        corpus: Corpus,
        progress: bool,
        threads: int,
        log: Callable[[str], None],
    ) -> None:
        key: dict[str, Any] = {"seed": seed, "budget": asdict(budget), "data": corpus.digest}
        if methods != tuple(DRAFTED):
            key["methods"] = list(methods)
        if threads != THREADS:
            key["threads"] = threads
        bar = progress and sys.stderr.isatty()
        super().__init__(out, key, STAGES, budget.steps, budget.save_every, log, bar=bar)
        self.seed, self.budget, self.methods, self.corpus, self.threads = seed, budget, methods, corpus, threads

    def run(self, resume: bool) -> Path:
        self.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(self.seed)
        self.trio = new_trio()
        self.run_stages(self.seed, resume)
        return self.out / FILES[2]

    def modules(self) -> dict[str, nn.Module]:
        return self.trio.checkpoint().modules()

    def enter(self, stage: int) -> dict[str, nn.Module]:
        return enter(self.trio, stage, self.methods)

    def losses(self, stage: int, step: int) -> Losses:
        return losses(self.trio, stage, step, corpus=self.corpus, budget=self.budget, seed=self.seed)

    def leave(self, stage: int) -> None:
        if stage in FILES:
            self._export(self.out / FILES[stage])

    def _export(self, path: Path) -> None:
        from dmtp_kernels.training.evaluate import evaluate

        checkpoint = self.trio.checkpoint().freeze()
        save_checkpoint(path, checkpoint)
        started = time.perf_counter()
        # what ships is measured: the file as it reads back
        held_out = evaluate(load_checkpoint(path), self.corpus.held_out, rows=self.budget.eval_rows)
        self.elapsed += time.perf_counter() - started
        checkpoint.record = {
            "data": {"sha256": self.corpus.digest, "files": len(self.corpus.files), "bytes": self.corpus.train.numel()},
            "seed": self.seed,
            "budget": asdict(self.budget),
            "losses": self.curves,
            "held_out": held_out,
            "wall_seconds": round(self.elapsed),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": self.threads},
        }
        save_checkpoint(path, checkpoint)
