"""Small checkpoints in every public format, and edits of their files."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dmtp_kernels.models import MTP, Drafter, DrafterConfig, MTPConfig, TargetConfig
from dmtp_kernels.models.checkpoint import CheckpointError
from dmtp_kernels.models.config import ExpertsConfig, LayerConfig, MaskRule
from dmtp_kernels.models.formats import (
    DFlash2,
    DFlash2Config,
    read_dflash,
    read_dmtp,
    read_mtp,
    read_qwen3,
    save_drafter,
    save_mtp,
    save_qwen3,
)
from dmtp_kernels.models.formats.dflash2 import shapes
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.models.public_cases import randomise

LAYER = LayerConfig(16, 24, 4, 2, 8, rope_theta=1e6)
GATED = LayerConfig(16, 24, 4, 2, 16, rotary_dim=4, gated=True, gemma_norm=True)
ROUTED = replace(GATED, experts=ExpertsConfig(count=5, top_k=2, intermediate_size=12))
TARGET = TargetConfig(LAYER, 6, vocab_size=20, num_valid=20, max_positions=64)
DRAFTER = DrafterConfig(LAYER, 2, (1, 3), 8, None, mask_token_id=19)
SLIDING = (MaskRule(5, "query", True), MaskRule(None))
EXTRA = DFlash2Config(conv_taps=2, conv_group=4, selector_rank=3, selector_top_k=4, output_multiplier=0.5)

READERS: dict[str, Callable[..., Any]] = {
    "dflash": read_dflash,
    "dflash2": read_dflash,
    "dmtp": read_dmtp,
    "qwen3": read_qwen3,
    "mtp": read_mtp,
    "mtp of experts": read_mtp,
    "mtp of single experts": read_mtp,
}


def drafter(masks: tuple[MaskRule, ...] = (), window: int | None = None) -> Drafter:
    """A random drafter."""
    module = Drafter(DrafterConfig(LAYER, 2, (1, 3), 8, window, 19, layer_masks=masks))
    randomise(module, 1)
    return module


def dflash2() -> DFlash2:
    """Random tensors of DFlash2."""
    generator = torch.Generator().manual_seed(2)
    wanted = shapes(EXTRA, DRAFTER, TARGET.vocab_size)
    return DFlash2(EXTRA, {name: torch.randn(shape, generator=generator) for name, shape in wanted.items()})


def write(directory: Path, kind: str) -> Path:
    """A checkpoint of the kind."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, raw in _written(kind).items():
        (directory / name).write_bytes(raw)
    return directory


@functools.cache
def _written(kind: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        return {path.name: path.read_bytes() for path in _save(Path(place), kind).iterdir()}


def _save(directory: Path, kind: str) -> Path:
    trio = tiny_checkpoint(5, num_layers=4, target_layers=(1, 2))
    if kind == "dflash":
        return save_drafter(directory, drafter(SLIDING), TARGET)
    if kind == "dflash2":
        return save_drafter(directory, drafter(), TARGET, dflash2=dflash2())
    if kind == "dmtp":
        return save_drafter(
            directory, trio.drafters["dmtp"], trio.target.config, method="dmtp", fusion=trio.fusions["dmtp"]
        )
    if kind == "qwen3":
        return save_qwen3(directory, trio.target)
    module = MTP(MTPConfig(GATED if kind == "mtp" else ROUTED))
    randomise(module, 3)
    return save_mtp(directory, module, TARGET, stacked=kind != "mtp of single experts")


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change `config.json` in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file."""
    with safe_open(path, framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change `model.safetensors` in place."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in tensors_of(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Split `model.safetensors` into shards with an index; returns the index's map."""
    path = directory / "model.safetensors"
    tensors = tensors_of(path)
    names = sorted(tensors)
    places: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name].clone() for name in names[i::count]}
        save_file(part, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    path.unlink()
    write_index(directory, places)
    return places


def write_index(directory: Path, places: dict[str, str]) -> None:
    """The index of shards."""
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(directory: Path, kind: str, *words: str) -> str:
    """The one line with which the reader refuses the directory."""
    with pytest.raises(CheckpointError) as caught:
        READERS[kind](directory)
    message = str(caught.value)
    assert "\n" not in message and str(directory) in message and len(message) < 1000
    for word in words:
        assert word in message, message
    return message


def each_kind(test: Any) -> Any:
    """Parametrise a test with every format."""
    return pytest.mark.parametrize("kind", READERS)(test)
