"""The stages: what each trains, from which weights, and with which learning-rate schedule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import nn

from dmtp_kernels.decode.method import METHODS, SHIPPED, Method
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.config import DrafterConfig
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.presets import TARGET, TINY_MTP, drafter_config
from dmtp_kernels.models.target import Target
from dmtp_kernels.training.budget import Budget
from dmtp_kernels.training.data import Corpus, batch, seeded
from dmtp_kernels.training.losses import block_loss, frozen_forward, sample_anchors, target_and_mtp
from dmtp_kernels.training.runner import Losses, Stage

MTP_LOSS_WEIGHT = 0.2
DRAFTED = {name: METHODS[name] for name in SHIPPED if METHODS[name].drafter}
"""Methods that the recipe trains unless others are asked for."""
STAGES = (
    Stage("target", 1.0, 0.5, 0.0),
    Stage("dflash", 1.0, 0.5, 0.1),
    Stage("methods", 0.5, 1.0, 0.0),
    Stage("scratch", 1.0, 0.5, 0.0),
)
AS_CONTINUATIONS = {"markov", "recurrent"}
"""Parts whose methods are not trained from scratch: DSpark and Domino, which the source names but does not compare."""
FILES = {2: "tiny.safetensors", 3: "scratch.safetensors"}
"""What a stage's end is kept as."""


@dataclass
class Trio:
    """The models while they train, in bf16."""

    target: Target
    mtp: MTP
    drafters: dict[str, Drafter] = field(default_factory=dict)
    fusions: dict[str, FusionModule] = field(default_factory=dict)

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.target, self.mtp, self.drafters, self.fusions)


def new_trio() -> Trio:
    """Fresh target and MTP from torch's global generator."""
    target, mtp = Target(TARGET), MTP(TINY_MTP)
    nn.init.normal_(target.embed_tokens.weight, std=0.02)
    for module in (target, mtp):
        _silence_branches(module)
    return Trio(target.bfloat16(), mtp.bfloat16())


def enter(trio: Trio, stage: int, methods: Collection[str] = tuple(DRAFTED)) -> dict[str, nn.Module]:
    """Build the modules a stage adds, from what the previous stage left, and return those it trains; the third stage
    trains `methods` from DFlash's weights, the fourth trains them from fresh ones."""
    if stage == 0:
        return {"target": trio.target, "mtp": trio.mtp}
    for frozen in (trio.target, trio.mtp):
        frozen.requires_grad_(False)
    if stage == 1:
        trio.drafters["dflash"] = _fresh(METHODS["dflash"])
        return {"drafters.dflash": trio.drafters["dflash"]}
    dflash = trio.drafters.get("dflash")
    trio.drafters, trio.fusions = {}, {}
    for name in methods:
        method = METHODS[name]
        if stage == 3 and AS_CONTINUATIONS.intersection(method.parts):
            continue
        if stage == 2:
            assert dflash is not None
            trio.drafters[name] = _continued(dflash, method)
        else:
            trio.drafters[name] = _fresh(method)
        if method.fusion != "none":
            trio.fusions[name] = _new_fusion(method, trio.target)
    checkpoint = trio.checkpoint()
    return {key: module for key, module in checkpoint.modules().items() if key not in ("target", "mtp")}


def losses(trio: Trio, stage: int, step: int, *, corpus: Corpus, budget: Budget, seed: int) -> Losses:
    """The losses of one step; the batch is a function of seed, stage and step."""
    if stage == 0:
        ids = batch(corpus.train, budget.windows(stage), budget.length + 2, seed, stage, step)
        target, mtp = target_and_mtp(trio.target, trio.mtp, ids)
        yield "joint", target + MTP_LOSS_WEIGHT * mtp
        yield "target", target.detach()
        yield "mtp", mtp.detach()
        return
    rows = budget.windows(stage)
    ids = batch(corpus.train, rows, budget.length + 1, seed, stage, step)
    layers = next(iter(trio.drafters.values())).config.target_layers
    seen = frozen_forward(trio.target, trio.mtp, ids, layers, with_mtp=stage >= 2)
    anchors = sample_anchors(rows, budget.anchors, budget.length, seeded(seed, stage, step, 1))
    for name, drafter in trio.drafters.items():
        yield name, block_loss(METHODS[name], drafter, trio.fusions.get(name), trio.target, seen, anchors)


def _silence_branches(module: Target | MTP | Drafter) -> None:
    """Every layer starts as the identity."""
    for layer in module.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(layer.mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]


def _fresh(method: Method) -> Drafter:
    drafter = Drafter(_shapes(method))
    _silence_branches(drafter)
    # the tied head is large: a small start keeps the first losses near uniform
    nn.init.constant_(drafter.norm.weight, 0.1)
    return drafter.bfloat16()


def _shapes(method: Method) -> DrafterConfig:
    return drafter_config(method.context, method.parts, method.block)


def _continued(dflash: Drafter, method: Method) -> Drafter:
    drafter = Drafter(_shapes(method)).bfloat16()
    state = {name: tensor.clone() for name, tensor in dflash.state_dict().items()}
    width = dflash.config.layer.hidden_size
    fc = state["fc.weight"]
    if method.context == ("target", "mtp"):
        state["fc.weight"] = torch.cat([fc, torch.zeros_like(fc[:, :width])], dim=1)
    elif method.context == ("mtp",):
        # the MTP output is closest to the target's last layer
        state["fc.weight"] = fc[:, -width:].contiguous()
    # what DFlash does not have keeps its start, with which it changes nothing
    drafter.load_state_dict({**drafter.state_dict(), **state})
    return drafter


def _new_fusion(method: Method, target: Target) -> FusionModule:
    width, eps = target.config.layer.hidden_size, target.config.layer.rms_norm_eps
    fusion = FusionModule(method.fusion, width, eps)
    if method.fusion == "replace":
        # starts at E(T1) up to its length
        size = target.embed_tokens.weight[: target.config.num_valid].float().square().mean().sqrt()
        with torch.no_grad():
            fusion.proj.weight[:, :width] = torch.eye(width) * size
    return fusion.bfloat16()
