"""Every method from both starts, all seeds beside each other."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from dmtp_kernels.training.ablation.plan import DRAFTED, SEEDS
from dmtp_kernels.training.ablation.processes import run_beside
from dmtp_kernels.training.budget import Budget
from dmtp_kernels.training.run import train


def train_all(
    out: Path,
    *,
    seeds: Sequence[int] = SEEDS,
    budget: str | Budget = "ablation",
    methods: Collection[str] = DRAFTED,
    resume: bool = True,
) -> list[Path]:
    """Train every method from both starts and return the directories of the seeds, `out`/seed0 and so on.

    A killed run continues to the same bits when `resume`. Progress goes to stderr. Raises TrainingError where one of
    the seeds cannot go on, after the others were stopped.
    """
    directories = {seed: out / f"seed{seed}" for seed in seeds}
    run_beside(_one_seed, {seed: (path, seed, budget, methods, resume) for seed, path in directories.items()})
    return list(directories.values())


def _one_seed(out: Path, seed: int, budget: str | Budget, methods: Collection[str], resume: bool) -> None:
    def log(line: str) -> None:
        print(f"seed {seed}: {line}", file=sys.stderr, flush=True)

    train(out, seed=seed, budget=budget, methods=methods, resume=resume, progress=False, threads=1, log=log)
