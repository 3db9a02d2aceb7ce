"""Writing targets, MTP modules and drafters in the public formats, one directory each."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from dmtp_kernels.models.checkpoint import write_atomically
from dmtp_kernels.models.config import DrafterConfig, TargetConfig
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.formats.dflash import DMTP_CONFIG, DMTP_PREFIX
from dmtp_kernels.models.formats.dflash2 import DFlash2, DFlash2Config
from dmtp_kernels.models.formats.dmtp import dmtp_fields
from dmtp_kernels.models.formats.experts import split_experts
from dmtp_kernels.models.formats.files import INDEX, save_tensors
from dmtp_kernels.models.formats.layer import layer_fields
from dmtp_kernels.models.formats.qwen3 import HEAD
from dmtp_kernels.models.formats.qwen_mtp import mtp_kind
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target


def save_drafter(
    directory: str | Path,
    drafter: Drafter,
    target: TargetConfig,
    *,
    method: str | None = None,
    fusion: FusionModule | None = None,
    dflash2: DFlash2 | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a DFlash checkpoint, with `method` a DMTP one, tensors in `dtype`; returns the directory.

    It is DFlash2's where the drafter has its convolution and selector, or where `dflash2` has their tensors.

    A window that counts from the anchor has no key in DFlash and is written in `dmtp_config`: a plain reader gives the
    block the whole context.

    Raises:
        ValueError: the formats cannot say what the drafter does.
        OSError: the disk refuses; each file is written whole or not at all.
    """
    directory, config = Path(directory), drafter.config
    if not config.use_target_features or config.use_mtp_features:
        raise ValueError("drafter: reads MTP features as context, which DFlash checkpoints cannot say")
    if config.layer.experts is not None:
        raise ValueError("drafter: routes to experts, which DFlash checkpoints cannot say")
    if method is None and (fusion is not None or config.window is not None):
        raise ValueError("method: is None, must be given for a fusion or a window that counts from the anchor")
    extra = _dflash2(drafter, dflash2)
    tensors = _state(drafter, "", dtype)
    if fusion is not None:
        tensors |= _state(fusion, DMTP_PREFIX, dtype)
    section: dict[str, object] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layers),
    }
    if dflash2 is not None:
        tensors |= {name: tensor.detach().to(dtype).contiguous() for name, tensor in dflash2.tensors.items()}
    if extra is not None:
        section |= {
            "conv_kernel_size": extra.conv_taps,
            "conv_group_size": extra.conv_group,
            "selector_rank": extra.selector_rank,
            "selector_top_k": extra.selector_top_k,
            "output_multiplier": extra.output_multiplier,
            "final_logit_softcapping": extra.softcap,
        }
    fields = {
        "architectures": ["DFlashDraftModel" if extra is None else "DFlash2DraftModel"],
        "model_type": "qwen3",
        **layer_fields(config.layer),
        **_mask_fields(config),
        "num_hidden_layers": config.num_layers,
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "dflash_config": section,
        "dtype": _name(dtype),
    }
    if method is not None:
        fields[DMTP_CONFIG] = dmtp_fields(method, config.window, fusion)
    return _write(directory, fields, tensors)


def save_qwen3(directory: str | Path, target: Target, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a dense Qwen3 checkpoint; returns the directory. Raises OSError when the disk refuses."""
    config = target.config
    layer = config.layer
    if layer.gated or layer.gemma_norm or layer.rotary_dim is not None or layer.experts is not None:
        raise ValueError("target: has layers of Qwen3.5, which dense Qwen3 checkpoints cannot say")
    tensors = _state(target, "model.", dtype)
    head = tensors.pop(f"model.{HEAD}")
    if not config.tie_embeddings:
        tensors[HEAD] = head
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **layer_fields(config.layer),
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        "dtype": _name(dtype),
    }
    if config.num_valid != config.vocab_size:
        fields[DMTP_CONFIG] = {"num_valid": config.num_valid}
    return _write(Path(directory), fields, tensors)


def save_mtp(
    directory: str | Path,
    mtp: MTP,
    target: TargetConfig,
    *,
    dtype: torch.dtype = torch.float32,
    stacked: bool = True,
) -> Path:
    """Write an MTP module alone, as Qwen3.5 names it; returns the directory.

    Its experts, if it has any, are stacked in two tensors a layer, or three tensors each unless `stacked`. Raises
    OSError when the disk refuses.
    """
    layer = mtp.config.layer
    described = layer_fields(layer)
    rope = described["rope_parameters"]
    assert isinstance(rope, dict)
    rope.setdefault("partial_rotary_factor", 1.0)
    kind, count = mtp_kind(layer)
    fields = {
        "model_type": kind,
        **described,
        "attn_output_gate": layer.gated,
        count: mtp.config.num_layers,
        "mtp_use_dedicated_embeddings": False,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "dtype": _name(dtype),
    }
    if not layer.gemma_norm:
        fields[DMTP_CONFIG] = {"mtp_gemma_norm": False}
    tensors = _state(mtp, "mtp.", dtype)
    return _write(Path(directory), fields, tensors if stacked else split_experts(tensors))


def _dflash2(drafter: Drafter, beside: DFlash2 | None) -> DFlash2Config | None:
    parts, config = drafter.config.parts, drafter.config
    if not parts:
        return None if beside is None else beside.config
    if beside is not None:
        raise ValueError(f"dflash2: is given for a drafter that has {' and '.join(parts)} itself")
    if parts != ("conv", "selector") or config.conv is None or config.selector is None:
        raise ValueError(f"drafter: has {' and '.join(parts)}, DFlash2 checkpoints have conv and selector")
    selector = config.selector
    return DFlash2Config(
        conv_taps=config.conv.taps,
        conv_group=config.conv.group,
        selector_rank=selector.rank,
        selector_top_k=selector.top_k,
        output_multiplier=selector.output_multiplier,
        softcap=selector.softcap,
    )


def _mask_fields(config: DrafterConfig) -> dict[str, object]:
    rules = [config.mask(i) for i in range(config.num_layers)] if config.layer_masks else []
    windows = {rule.window for rule in rules} - {None}
    plain = all(rule.window is None or rule.window_ref == "query" for rule in rules)
    causal = {rule.causal for rule in rules} or {False}
    by_kind = all(rule.causal == (rule.window is not None) for rule in rules)
    if not plain or len(windows) > 1 or not (by_kind or len(causal) == 1):
        raise ValueError("drafter: has layer masks that DFlash checkpoints cannot say")
    kinds = ["full_attention" if rule.window is None else "sliding_attention" for rule in rules]
    return {
        "layer_types": kinds or ["full_attention"] * config.num_layers,
        "is_causal": causal.pop() if len(causal) == 1 else None,
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": "sliding_attention" in kinds,
    }


def _state(module: nn.Module, prefix: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor.detach().to(dtype).contiguous() for name, tensor in module.state_dict().items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(directory: Path, fields: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ValueError(f"dtype: is {tensor.dtype}, must be a floating type of 16 bits or more")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: holds values that are not finite in {tensor.dtype}, which no reader takes")
    if (directory / INDEX).exists():
        raise ValueError(f"directory: {directory} holds {INDEX}, the shards of another model; choose another")
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(directory, tensors)
    write_atomically(directory / "config.json", (json.dumps(fields, indent=2, allow_nan=False) + "\n").encode())
    return directory
