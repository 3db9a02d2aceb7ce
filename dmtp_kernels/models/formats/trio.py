"""A target, a drafter and an MTP module from their own directories, as the decode loop takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dmtp_kernels.models.checkpoint import Checkpoint, CheckpointError, check_parts
from dmtp_kernels.models.config import DrafterConfig
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.formats.dflash import DMTP_CONFIG, DFlashCheckpoint, check_layer_ids, read_dflash
from dmtp_kernels.models.formats.dflash2 import attach
from dmtp_kernels.models.formats.dmtp import read_dmtp
from dmtp_kernels.models.formats.export import save_drafter, save_mtp, save_qwen3
from dmtp_kernels.models.formats.fields import Fields, read_json
from dmtp_kernels.models.formats.qwen3 import read_qwen3
from dmtp_kernels.models.formats.qwen_mtp import read_mtp
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.target import Target

PLAIN, SECOND = "dflash", "dflash2"
"""The methods of drafters that say none of their own."""


@dataclass(frozen=True)
class Exported:
    """Where `export_trio` wrote."""

    target: Path
    mtp: Path | None
    drafter: Path


def read_trio(
    target: str | Path,
    drafter: str | Path | None = None,
    mtp: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
) -> Checkpoint:
    """Read a dense Qwen3 target, a DFlash or DMTP drafter and Qwen3.5's MTP module, and check that they fit.

    The drafter is keyed by the method that its `dmtp_config` names, without one `dflash` or `dflash2`. `block_size`
    runs one in blocks shorter than it was trained with.

    Raises:
        CheckpointError: one line that names the file, and the tensor or the sizes that do not fit.
        ValueError: `block_size` is longer than the drafter's.
    """
    return read_drafts(read_qwen3(target, dtype=dtype), drafter, mtp, dtype=dtype, block_size=block_size, place=target)


def read_drafts(
    model: Target,
    drafter: str | Path | None = None,
    mtp: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
    place: str | Path = "",
) -> Checkpoint:
    """As `read_trio`, for a target that is there already; `place` names it in errors."""
    drafters: dict[str, Drafter] = {}
    fusions: dict[str, FusionModule] = {}
    if drafter is not None:
        method, found, fusion = _drafter(Path(drafter), dtype)
        _check_target(Path(drafter), found, model.config.vocab_size, model.config.num_layers)
        drafters[method] = found.drafter if found.dflash2 is None else attach(found.drafter, found.dflash2)
        if block_size is not None:
            _shorten(drafters[method], block_size)
        if fusion is not None:
            fusions[method] = fusion
    module = None if mtp is None else read_mtp(mtp, dtype=dtype)
    checkpoint = Checkpoint(model, module, drafters, fusions)
    check_fit(checkpoint, place if drafter is None else drafter)
    return checkpoint.freeze()


def check_fit(checkpoint: Checkpoint, place: str | Path) -> None:
    """Whether the parts of a checkpoint fit one another. Raises CheckpointError that names `place`."""
    configs: dict[str, DrafterConfig] = {name: part.config for name, part in checkpoint.drafters.items()}
    parts = {
        "target": checkpoint.target.config,
        "mtp": None if checkpoint.mtp is None else checkpoint.mtp.config,
        "drafters": configs,
        "fusions": {name: {"width": part.norm_m.weight.numel()} for name, part in checkpoint.fusions.items()},
    }
    check_parts(Path(place), parts)


def export_trio(
    directory: str | Path, checkpoint: Checkpoint, method: str, *, dtype: torch.dtype = torch.float32
) -> Exported:
    """Write the target, the MTP module and one method's drafter to `target`, `mtp` and `drafter` in a directory.

    Raises:
        ValueError: there is no such drafter, or the formats cannot say what it does.
        OSError: the disk refuses.
    """
    directory = Path(directory)
    if method not in checkpoint.drafters:
        raise ValueError(f"method: no drafter {method!r}, has {', '.join(sorted(checkpoint.drafters)) or 'none'}")
    part, config = checkpoint.drafters[method], checkpoint.target.config
    plain = part.config.window is None and max(part.config.target_layers) < config.num_layers - 1
    named = None if method in (PLAIN, SECOND) and plain else method
    fusion = checkpoint.fusions.get(method)
    drafter = save_drafter(directory / "drafter", part, config, method=named, fusion=fusion, dtype=dtype)
    target = save_qwen3(directory / "target", checkpoint.target, dtype=dtype)
    mtp = None if checkpoint.mtp is None else save_mtp(directory / "mtp", checkpoint.mtp, config, dtype=dtype)
    return Exported(target, mtp, drafter)


def _shorten(drafter: Drafter, block_size: int) -> None:
    trained = drafter.config.block_size
    if not 2 <= block_size <= trained:
        raise ValueError(f"block_size: is {block_size}, must be between 2 and the drafter's {trained}")
    drafter.config = replace(drafter.config, block_size=block_size)


def _drafter(directory: Path, dtype: torch.dtype) -> tuple[str, DFlashCheckpoint, FusionModule | None]:
    if read_json(directory / "config.json").get(DMTP_CONFIG) is None:
        plain = read_dflash(directory, dtype=dtype)
        return PLAIN if plain.dflash2 is None else SECOND, plain, None
    read = read_dmtp(directory, dtype=dtype)
    return read.method, read.dflash, read.fusion


def _check_target(directory: Path, found: DFlashCheckpoint, vocab_size: int, num_layers: int) -> None:
    config = Fields(directory / "config.json", read_json(directory / "config.json"))
    check_layer_ids(config, found.drafter.config.target_layers, num_layers)
    if found.vocab_size != vocab_size:
        raise CheckpointError(f"checkpoint {directory}: vocab_size is {found.vocab_size}, the target's is {vocab_size}")
    if found.num_target_layers not in (None, num_layers):
        raise CheckpointError(
            f"checkpoint {directory}: num_target_layers is {found.num_target_layers}, the target has {num_layers}"
        )
