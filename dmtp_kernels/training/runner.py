"""A training run in stages that a kill does not spoil: steps, loss curves, and the state from which it goes on."""

from __future__ import annotations

import io
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmtp_kernels.models.checkpoint import write_atomically
from dmtp_kernels.training.optim import Optimizer

Losses = Iterator[tuple[str, torch.Tensor]]
"""Name and loss; the runner goes backward on those that need it before asking for the next."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line. The last saved state is intact."""


@dataclass(frozen=True)
class Stage:
    """`peak` multiplies both learning rates; they fall linearly to `floor` over the last `decay` of the steps."""

    name: str
    peak: float
    decay: float
    floor: float

    def scale(self, step: int, steps: int) -> float:
        warmup = min(1.0, (step + 1) / 20)
        left = (steps - step) / (self.decay * steps)
        return self.peak * warmup * min(1.0, self.floor + (1 - self.floor) * left)


class Runner(ABC):
    """`stages` of `steps` each (0: skipped), saved to `out`/state.pt every `save_every` steps and at a stage's end.

    A state belongs to its `key`; it holds the weights of `modules()`. A subclass says what is trained and on what.
    """

    adam_lr = 3e-3
    curve_points = 50

    def __init__(
        self,
        out: Path,
        key: dict[str, Any],
        stages: Sequence[Stage],
        steps: Sequence[int],
        save_every: int,
        log: Callable[[str], None],
        *,
        bar: bool = False,
    ) -> None:
        self.out, self.key, self.stages, self.steps, self.save_every = out, key, stages, steps, save_every
        self.log, self.bar = log, bar
        self.curves: dict[str, dict[str, list[float]]] = {
            stage.name: {} for stage, count in zip(stages, steps, strict=True) if count
        }
        self.sums: dict[str, float] = {}
        self.elapsed = 0.0

    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """Everything that exists by now and that a state holds, by name."""

    @abstractmethod
    def enter(self, stage: int) -> dict[str, nn.Module]:
        """Build what a stage adds, from what the one before left, and return what it trains. Torch's generator was
        seeded for the stage."""

    @abstractmethod
    def losses(self, stage: int, step: int) -> Losses:
        """The losses of one step, a function of the seed, the stage and the step."""

    @abstractmethod
    def leave(self, stage: int) -> None:
        """Called after a stage's last step."""

    def run_stages(self, seed: int, resume: bool) -> None:
        """All stages, or what is left of them when `resume`. Raises TrainingError, OSError when the disk refuses."""
        saved = self._load() if resume else None
        first, begun = (saved["stage"], saved["step"]) if saved else (0, 0)
        if saved:
            self.curves, self.sums, self.elapsed = saved["curves"], saved["sums"], saved["elapsed"]
            self.log(f"resuming in stage {self.stages[first].name} at step {begun}")
        for index, steps in enumerate(self.steps):
            if not steps:
                continue
            torch.manual_seed(seed + index)
            trained = self.enter(index)
            if index < first:
                continue
            if saved and index == first:
                self._restore(partial(self._load_weights, saved["weights"]))
            optimizer = Optimizer(trained, adam_lr=self.adam_lr)
            if saved and index == first:
                self._restore(partial(optimizer.restore, saved["optimizer"]))
            self._stage(index, optimizer, begun if index == first else 0)
            self.leave(index)

    def _stage(self, index: int, optimizer: Optimizer, begun: int) -> None:
        stage, steps = self.stages[index], self.steps[index]
        every = max(1, steps // self.curve_points)
        curves = self.curves[stage.name]
        before, started = self.elapsed, time.perf_counter()
        with self._progress(stage.name, begun, steps) as advance:
            for step in range(begun, steps):
                for name, loss in self.losses(index, step):
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
                if (step + 1) % self.save_every == 0 or step + 1 == steps:
                    self._save(index, step + 1, optimizer)
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

    def _save(self, stage: int, step: int, optimizer: Optimizer) -> None:
        state = {
            "key": self.key,
            "stage": stage,
            "step": step,
            "weights": {prefix: module.state_dict() for prefix, module in self.modules().items()},
            "optimizer": optimizer.state(),
            "curves": self.curves,
            "sums": self.sums,
            "elapsed": self.elapsed,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self.out / "state.pt", buffer.getvalue())

    def _load_weights(self, weights: dict[str, dict[str, torch.Tensor]]) -> None:
        for prefix, module in self.modules().items():
            module.load_state_dict(weights[prefix])

    def _restore(self, load: Callable[[], None]) -> None:
        try:
            load()
        except Exception as error:
            raise _damaged(self.out / "state.pt", error) from error

    def _load(self) -> dict[str, Any] | None:
        path = self.out / "state.pt"
        if not path.exists():
            return None
        try:
            saved = torch.load(path, weights_only=True)
            key, stage, step = saved["key"], saved["stage"], saved["step"]
            missing = {"weights", "optimizer", "curves", "sums", "elapsed"} - saved.keys()
            whole = not missing and 0 <= stage < len(self.steps) and 0 < step <= self.steps[stage]
        except Exception as error:  # damage shows as anything
            raise _damaged(path, error) from error
        if key != self.key:
            raise TrainingError(
                f"training: {path} belongs to another seed, budget, corpus or set of methods; choose another directory"
            )
        if not whole:
            raise _damaged(path, "a part is missing, or its step is none of the run's")
        return dict(saved)


def _damaged(path: Path, reason: Exception | str) -> TrainingError:
    told = (str(reason).splitlines() or [""])[0] or type(reason).__name__
    return TrainingError(f"training: {path} cannot be read ({told}); remove it to begin again")
