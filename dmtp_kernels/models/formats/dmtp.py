"""A DMTP drafter: a DFlash checkpoint, the tensors of the fusion under `dmtp_fusion.`, and `dmtp_config` that says what
it is. A plain DFlash reader passes over both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dmtp_kernels.models.config import DrafterConfig
from dmtp_kernels.models.formats.dflash import DMTP_CONFIG, DMTP_PREFIX, DFlashCheckpoint, load, open_dflash, parse
from dmtp_kernels.models.formats.fields import Fields, read_json
from dmtp_kernels.models.formats.files import TensorFiles
from dmtp_kernels.models.fusion import MODES, FusionModule

VERSION = 1


@dataclass(frozen=True)
class DMTPCheckpoint:
    """The drafter, the name of the method that it was trained for, and that method's fusion, if it has one."""

    dflash: DFlashCheckpoint
    method: str
    fusion: FusionModule | None


def read_dmtp(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> DMTPCheckpoint:
    """Read a drafter directory that `save_drafter` wrote with a method.

    Raises:
        CheckpointError: as `read_dflash`, and where the directory holds a plain DFlash drafter.
    """
    directory = Path(directory)
    with open_dflash(directory) as files:
        config = Fields(directory / "config.json", read_json(directory / "config.json"))
        if not config.given(DMTP_CONFIG):
            config.fail(f"{DMTP_CONFIG} is missing: a plain DFlash drafter, for read_dflash")
        ours = config.section(DMTP_CONFIG)
        ours.known(("version", "method", "window", "window_ref", "fusion"))
        ours.integer("version", VERSION, VERSION)
        drafter_config, extra, vocab_size = parse(config, None)
        drafter_config = _windowed(ours, drafter_config)
        method = ours.values.get("method")
        if not isinstance(method, str) or not method.isidentifier():
            ours.wrong("method", "the name of a method")
        drafter, found = load(files, drafter_config, extra, vocab_size, dtype)
        fusion = _fusion(files, ours, drafter_config.layer.hidden_size)
        if fusion is not None:
            files.fill(fusion, DMTP_PREFIX, dtype)
        files.finish()
    count = config.integer("num_target_layers")
    return DMTPCheckpoint(DFlashCheckpoint(drafter, vocab_size, count, found), method, fusion)


def _windowed(ours: Fields, config: DrafterConfig) -> DrafterConfig:
    """The drafter under the window that counts from the anchor, which DFlash's own keys cannot say."""
    if not ours.given("window"):
        return config
    ours.word("window_ref", ("anchor",))
    if any(rule.window is not None or rule.causal for rule in config.layer_masks):
        ours.fail(f"{ours.name('window')} is given beside sliding or causal layers, must be null")
    return replace(config, window=ours.integer("window", least=0), layer_masks=())


def _fusion(files: TensorFiles, ours: Fields, width: int) -> FusionModule | None:
    if not ours.given("fusion"):
        return None
    fields = ours.section("fusion")
    fields.known(("mode", "eps", "rank"))
    mode, eps = fields.word("mode", MODES), fields.number("eps")
    rank = {"rank": fields.integer("rank")} if mode == "residual_low_rank" else {}
    return files.build(FusionModule, mode, width, eps, **rank)


def dmtp_fields(method: str, window: int | None, fusion: FusionModule | None) -> dict[str, object]:
    """The `dmtp_config` block."""
    described: dict[str, object] | None = None
    if fusion is not None:
        described = {"mode": fusion.mode, "eps": fusion.norm_m.eps}
        if fusion.mode == "residual_low_rank":
            described["rank"] = fusion.down.weight.shape[0]
    return {"version": VERSION, "method": method, "window": window, "window_ref": "anchor", "fusion": described}
