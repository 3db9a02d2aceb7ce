"""Reading and writing the trio: target, MTP module, and every method's drafter and fusion, in one safetensors file.

Tensors are named `target.*`, `mtp.*`, `drafters.<name>.*`, `fusion.<name>.*`; shapes are JSON in the file's metadata. A
matrix, or a stack of them, may be stored as int8 rows with one fp32 scale each (`<tensor>.scale`), dequantised when it
is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from dmtp_kernels.models.config import (
    PARTS,
    DrafterConfig,
    ExpertsConfig,
    LayerConfig,
    MaskRule,
    MTPConfig,
    TargetConfig,
)
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.mtp import MTP
from dmtp_kernels.models.target import Target

EMBEDDED = Path(__file__).parent.parent / "assets" / "tiny.safetensors"
"""The checkpoint that ships with the package."""
FORMAT = "dmtp-1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line and names the file."""


@dataclass
class Checkpoint:
    """Models in eval mode without gradients; `drafters` and `fusions` are keyed by method name. `mtp` is None where
    only methods without MTP are to run."""

    target: Target
    mtp: MTP | None
    drafters: dict[str, Drafter]
    fusions: dict[str, FusionModule] = field(default_factory=dict)
    record: dict[str, Any] | None = None

    def modules(self) -> dict[str, nn.Module]:
        """Every module by the prefix of its tensors."""
        named: dict[str, nn.Module] = {"target": self.target}
        if self.mtp is not None:
            named["mtp"] = self.mtp
        named |= {f"drafters.{name}": module for name, module in self.drafters.items()}
        return named | {f"fusion.{name}": module for name, module in self.fusions.items()}

    def freeze(self, dtype: torch.dtype | None = None) -> Checkpoint:
        """Put every module in eval mode without gradients, in `dtype` where given; returns itself."""
        for module in self.modules().values():
            module.eval().requires_grad_(False)
            if dtype is not None:
                module.to(dtype)
        return self


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 rows of `weight[..., N, H]` and their fp32 scales `[..., N]`."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale[..., None]).round().to(torch.int8), scale


def write_atomically(path: Path, payload: bytes) -> None:
    """Replace `path` by `payload`; whatever was there stays whole until the new file is on disk. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(payload)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(
    path: str | Path,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.bfloat16,
    int8_drafters: bool = True,
    with_target: bool = True,
) -> Path:
    """Write the trio to `path` and its record, if any, to the `.json` beside it, each by atomic rename.

    Target and MTP are stored in `dtype`; matrices of drafters and fusions as int8 rows unless `int8_drafters` is false.
    Without the target (`with_target` false) MTP's matrices are int8 rows, too, and the drafters' `fc`, whose columns
    belong to features of very different sizes, is stored in `dtype`; whoever reads the file has the target.
    Raises ValueError without an MTP module, OSError when the disk refuses.
    """
    if checkpoint.mtp is None:
        raise ValueError("checkpoint: has no MTP module, which the trio's file holds")
    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in checkpoint.modules().items():
        if prefix == "target" and not with_target:
            continue
        draft_side = not with_target or prefix.startswith(("drafters.", "fusion."))
        for name, tensor in _stored_state(module).items():
            key = f"{prefix}.{name}"
            if not with_target and prefix.startswith("drafters.") and name == "fc.weight":
                tensors[key] = tensor.detach().to(dtype).contiguous()
            elif draft_side and int8_drafters and (tensor.dim() == 2 or ".mlp.experts." in name):
                tensors[key], tensors[f"{key}.scale"] = quantize_rows(tensor)
            else:
                tensors[key] = tensor.detach().to(torch.float32 if draft_side and int8_drafters else dtype).contiguous()
    # one key: safetensors writes several in an order that changes from call to call
    metadata = {"config": json.dumps({"format": FORMAT, **_describe(checkpoint)})}
    write_atomically(path, save(tensors, metadata=metadata))
    if checkpoint.record is not None:
        write_atomically(path.with_suffix(".json"), (json.dumps(checkpoint.record, indent=1) + "\n").encode())
    return path


def load_checkpoint(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    drafters: Collection[str] | None = None,
    target: Target | None = None,
) -> Checkpoint:
    """Read a trio, by default the embedded one.

    `drafters` limits which drafters (and their fusions) are read. `target` is the model that a file without one was
    trained for; it is used as it is. Weights come back in `dtype` on the CPU, in eval
    mode, without gradients. Raises CheckpointError, one line naming the file and what is wrong with it.
    """
    path = EMBEDDED if path is None else Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path}: {'is not a file' if path.exists() else 'no such file'}")
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            config = _parse(path, metadata)
            wanted = _selection(path, config, drafters)
            names = set(handle.keys())
            _check_layers(path, config, len(names))
            checkpoint = _build(path, config, wanted)
            if target is None and names and not any(name.startswith("target.") for name in names):
                raise CheckpointError(f"checkpoint {path}: holds drafts alone, their target must be given")
            if target is not None:
                if target.config != config["target"]:
                    raise CheckpointError(f"checkpoint {path}: was trained for another target than the one given")
                checkpoint.target = target
            known: set[str] = set()
            for prefix, module in checkpoint.modules().items():
                if module is target:
                    continue
                state = {}
                for name, shape in _expected(module).items():
                    state[name] = _read(path, handle, names, known, f"{prefix}.{name}", shape, dtype)
                _assign(module, state)
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {path}: not a readable safetensors file ({error})") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {error.strerror or error}") from error
    for name in sorted(names - known):
        if drafters is None or name.split(".")[0] not in ("drafters", "fusion"):
            raise CheckpointError(f"checkpoint {path}: tensor {name} is not part of the configuration")
    checkpoint.record = _record(path)
    return checkpoint.freeze()


def _stored_state(module: nn.Module) -> dict[str, torch.Tensor]:
    state = dict(module.state_dict())
    if isinstance(module, Target) and module.config.tie_embeddings:
        del state["lm_head.weight"]
    return state


def _expected(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _stored_state(module).items()}


def _assign(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    tied = isinstance(module, Target) and module.config.tie_embeddings
    module.load_state_dict(state, assign=True, strict=not tied)
    if tied:
        module.lm_head.weight = module.embed_tokens.weight  # type: ignore[union-attr]


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    fusions = {}
    for name, fusion in checkpoint.fusions.items():
        rank = fusion.down.weight.shape[0] if fusion.mode == "residual_low_rank" else None
        fusions[name] = {
            "mode": fusion.mode,
            "width": fusion.norm_m.weight.numel(),
            "eps": fusion.norm_m.eps,
            "rank": rank,
        }
    return {
        "target": asdict(checkpoint.target.config),
        "mtp": None if checkpoint.mtp is None else asdict(checkpoint.mtp.config),
        "drafters": {name: asdict(drafter.config) for name, drafter in checkpoint.drafters.items()},
        "fusions": fusions,
    }


def _parse(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if "config" not in metadata:
        raise CheckpointError(f"checkpoint {path}: has no configuration of format {FORMAT!r} in its metadata")
    try:
        raw = json.loads(metadata["config"])
        if raw["format"] != FORMAT:
            raise ValueError(f"format is {raw['format']!r}, must be {FORMAT!r}")
        target = TargetConfig(**{**raw["target"], "layer": _layer_config(raw["target"]["layer"])})
        mtp = MTPConfig(**{**raw["mtp"], "layer": _layer_config(raw["mtp"]["layer"])})
        drafters = {name: _drafter_config(fields) for name, fields in raw["drafters"].items()}
        fusions = {name: _fusion_config(fields) for name, fields in raw["fusions"].items()}
        config = {"target": target, "mtp": mtp, "drafters": drafters, "fusions": fusions}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: its configuration cannot be read ({error!r})") from error
    check_parts(path, config)
    return config


def _layer_config(fields: dict[str, Any]) -> LayerConfig:
    experts = fields.get("experts")
    return LayerConfig(**{**fields, "experts": None if experts is None else ExpertsConfig(**experts)})


def _drafter_config(fields: dict[str, Any]) -> DrafterConfig:
    masks = tuple(MaskRule(**rule) for rule in fields.get("layer_masks", ()))
    layers = tuple(fields["target_layers"])
    parts = {name: kind(**fields[name]) for name, kind in PARTS.items() if fields.get(name) is not None}
    return DrafterConfig(
        **{**fields, "layer": _layer_config(fields["layer"]), "target_layers": layers, "layer_masks": masks, **parts}
    )


def _fusion_config(fields: dict[str, Any]) -> dict[str, Any]:
    mode, width, eps, rank = (fields[key] for key in ("mode", "width", "eps", "rank"))
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise ValueError(f"fusion eps is {eps!r}, must be a number between 0 and 1")
    if rank is not None and (not isinstance(rank, int) or not 1 <= rank <= 1 << 20):
        raise ValueError(f"fusion rank is {rank!r}, must be a positive integer")
    return {"mode": mode, "width": width, "eps": eps, "rank": rank}


def check_parts(path: Path, config: Mapping[str, Any]) -> None:
    """Whether the configurations of target, MTP module (None: there is none), drafters and fusions fit one another.

    Raises CheckpointError that names `path`.
    """
    target: TargetConfig = config["target"]
    width = target.layer.hidden_size

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise CheckpointError(f"checkpoint {path}: {what}")

    require(
        0 < target.num_valid <= target.vocab_size,
        f"num_valid {target.num_valid} exceeds vocabulary {target.vocab_size}",
    )
    got = width if config["mtp"] is None else config["mtp"].layer.hidden_size
    require(got == width, f"mtp hidden size is {got}, the target's is {width}")
    for name, drafter in config["drafters"].items():
        got = drafter.layer.hidden_size
        require(got == width, f"drafter {name} hidden size is {got}, the target's is {width}")
        layers = drafter.target_layers
        inside = all(0 <= i < target.num_layers for i in layers)
        require(inside, f"drafter {name} reads target layers {list(layers)}, the target has {target.num_layers}")
        mask = drafter.mask_token_id
        require(
            0 <= mask < target.vocab_size,
            f"drafter {name} mask id {mask} is outside the embedding of {target.vocab_size}",
        )
        require(drafter.context_size > 0, f"drafter {name} reads no context stream")
        for part in drafter.heads:
            got = getattr(drafter, part).vocab_size
            require(
                got == target.vocab_size, f"drafter {name} {part} has {got} tokens, the target has {target.vocab_size}"
            )
    for name, fusion in config["fusions"].items():
        require(name in config["drafters"], f"fusion {name} has no drafter")
        require(fusion.get("width") == width, f"fusion {name} width is {fusion.get('width')}, the target's is {width}")


def _selection(path: Path, config: dict[str, Any], drafters: Collection[str] | None) -> list[str]:
    present = config["drafters"]
    for name in drafters or ():
        if name not in present:
            raise CheckpointError(f"checkpoint {path}: has no drafter {name!r}, only {', '.join(present)}")
    return [name for name in present if drafters is None or name in drafters]


def _check_layers(path: Path, config: dict[str, Any], tensors: int) -> None:
    """A model of as many layers as any number in a file says is not built."""
    for part, shapes in {"target": config["target"], "mtp": config["mtp"], **config["drafters"]}.items():
        if shapes.num_layers > tensors:
            raise CheckpointError(
                f"checkpoint {path}: {part} has {shapes.num_layers} layers, the file {tensors} tensors"
            )


def _build(path: Path, config: dict[str, Any], wanted: list[str]) -> Checkpoint:
    try:
        with torch.device("meta"):
            drafters = {name: Drafter(config["drafters"][name]) for name in wanted}
            fusions = {}
            for name, fusion in config["fusions"].items():
                if name in drafters:
                    rank = {"rank": fusion["rank"]} if fusion["rank"] is not None else {}
                    fusions[name] = FusionModule(fusion["mode"], fusion["width"], fusion["eps"], **rank)
            return Checkpoint(Target(config["target"]), MTP(config["mtp"]), drafters, fusions)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path}: its configuration is not a model ({error})") from error


def _read(
    path: Path,
    handle: Any,
    names: set[str],
    known: set[str],
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One tensor in `dtype`, dequantised; `known` collects what was read."""
    known.add(key)
    if key not in names:
        raise CheckpointError(f"checkpoint {path}: tensor {key} is missing, expected shape {list(shape)}")
    tensor = handle.get_tensor(key)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"checkpoint {path}: tensor {key} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype == torch.int8 and tensor.dim() >= 2:
        scale = _read(path, handle, names, known, f"{key}.scale", shape[:-1])
        tensor = tensor.float() * scale[..., None]
    elif tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(
            f"checkpoint {path}: tensor {key} is {tensor.dtype}, expected floating point or int8 rows"
        )
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"checkpoint {path}: tensor {key} holds values that are not finite")
    return tensor


def _record(path: Path) -> dict[str, Any] | None:
    beside = path.with_suffix(".json")
    if not beside.is_file():
        return None
    try:
        record = json.loads(beside.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: its record {beside.name} cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"checkpoint {path}: its record {beside.name} is not a JSON object")
    return record
