"""The whole recipe, resumable: the stages, and the checkpoints with their records."""

from __future__ import annotations

import io
import math
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import load_checkpoint, save_checkpoint, write_atomically
from dmtp_kernels.training.budget import BUDGETS, Budget
from dmtp_kernels.training.data import Corpus, standard_library
from dmtp_kernels.training.optim import Optimizer
from dmtp_kernels.training.stages import DRAFTED, FILES, STAGES, Trio, enter, losses, new_trio

CURVE_POINTS = 50
THREADS = 2
"""Fixed for a run, since the order of a threaded sum depends on it."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line. The last saved state is intact."""


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


class _Run:
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
        self.out, self.seed, self.budget, self.methods, self.corpus, self.log = out, seed, budget, methods, corpus, log
        self.threads = threads
        self.bar = progress and sys.stderr.isatty()
        self.curves: dict[str, dict[str, list[float]]] = {
            stage.name: {} for stage, steps in zip(STAGES, budget.steps, strict=True) if steps
        }
        self.sums: dict[str, float] = {}
        self.elapsed = 0.0
        self.key = {"seed": seed, "budget": asdict(budget), "data": corpus.digest}
        if methods != tuple(DRAFTED):
            self.key["methods"] = list(methods)
        if threads != THREADS:
            self.key["threads"] = threads

    def run(self, resume: bool) -> Path:
        self.out.mkdir(parents=True, exist_ok=True)
        saved = self._load() if resume else None
        first, begun = (saved["stage"], saved["step"]) if saved else (0, 0)
        if saved:
            self.curves, self.sums, self.elapsed = saved["curves"], saved["sums"], saved["elapsed"]
            self.log(f"resuming in stage {STAGES[first].name} at step {begun}")
        torch.manual_seed(self.seed)
        trio = new_trio()
        for index in range(len(STAGES)):
            if not self.budget.steps[index]:
                continue
            torch.manual_seed(self.seed + index)
            modules = enter(trio, index, self.methods)
            if index < first:
                continue
            if saved and index == first:
                for prefix, module in trio.checkpoint().modules().items():
                    module.load_state_dict(saved["weights"][prefix])
            optimizer = Optimizer(modules)
            if saved and index == first:
                optimizer.restore(saved["optimizer"])
            self._stage(trio, index, optimizer, begun if index == first else 0)
            if index in FILES:
                self._export(trio, self.out / FILES[index])
        return self.out / FILES[2]

    def _stage(self, trio: Trio, index: int, optimizer: Optimizer, begun: int) -> None:
        stage, steps = STAGES[index], self.budget.steps[index]
        every = max(1, steps // CURVE_POINTS)
        curves = self.curves[stage.name]
        before, started = self.elapsed, time.perf_counter()
        with self._progress(stage.name, begun, steps) as advance:
            for step in range(begun, steps):
                for name, loss in losses(trio, index, step, corpus=self.corpus, budget=self.budget, seed=self.seed):
                    if loss.requires_grad:
                        loss.backward()
                    self.sums[name] = self.sums.get(name, 0.0) + loss.item()
                if not all(map(math.isfinite, self.sums.values())):
                    raise TrainingError(f"training: the loss of stage {stage.name} is not finite at step {step}")
                optimizer.step(stage.scale(step, steps))
                self.elapsed = before + time.perf_counter() - started
                if (step + 1) % every == 0:
                    for name, total in self.sums.items():
                        curves.setdefault(name, []).append(round(total / every, 4))
                    self.sums = {}
                    advance(step + 1, " ".join(f"{name} {values[-1]:.3f}" for name, values in curves.items()))
                if (step + 1) % self.budget.save_every == 0 or step + 1 == steps:
                    self._save(trio, index, step + 1, optimizer)
        self.sums = {}

    @contextmanager
    def _progress(self, stage: str, begun: int, steps: int) -> Iterator[Callable[[int, str], None]]:
        if not self.bar:
            yield lambda step, line: self.log(f"{stage} {step}/{steps} {self.elapsed:.0f} s {line}")
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[line]}")) as bars:
            task = bars.add_task(stage, total=steps, completed=begun, line="")
            yield lambda step, line: bars.update(task, completed=step, line=line[:60])

    def _save(self, trio: Trio, stage: int, step: int, optimizer: Optimizer) -> None:
        state = {
            "key": self.key,
            "stage": stage,
            "step": step,
            "weights": {prefix: module.state_dict() for prefix, module in trio.checkpoint().modules().items()},
            "optimizer": optimizer.state(),
            "curves": self.curves,
            "sums": self.sums,
            "elapsed": self.elapsed,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self.out / "state.pt", buffer.getvalue())

    def _load(self) -> dict[str, Any] | None:
        path = self.out / "state.pt"
        if not path.is_file():
            return None
        try:
            saved = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise TrainingError(f"training: {path} cannot be read ({str(error).splitlines()[0]})") from error
        if saved["key"] != self.key:
            raise TrainingError(
                f"training: {path} belongs to another seed, budget, corpus or set of methods; choose another directory"
            )
        return saved

    def _export(self, trio: Trio, path: Path) -> None:
        from dmtp_kernels.training.evaluate import evaluate

        checkpoint = trio.checkpoint().freeze()
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
