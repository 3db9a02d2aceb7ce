"""DFlash and DFlash2 drafters, as their authors publish them and as the speculators library saves them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from dmtp_kernels.models.config import DrafterConfig, LayerConfig, MaskRule
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.formats import dflash2
from dmtp_kernels.models.formats.dflash2 import DFlash2, DFlash2Config
from dmtp_kernels.models.formats.fields import Fields, read_json, same
from dmtp_kernels.models.formats.files import TensorFiles
from dmtp_kernels.models.formats.layer import MOST_LAYERS, read_layer

DMTP_CONFIG, DMTP_PREFIX = "dmtp_config", "dmtp_fusion."
"""What a DMTP drafter has beyond DFlash; a plain reader passes over both."""

_KNOWN = ("block_size", "causal", "mask_token", "mask_token_id", "projector_type", "target_layer_ids")
_NEUTRAL = {
    "projector_type": (("dflash",), "only plain DFlash and DFlash2 are supported"),
    "use_swa": ((False,), "windows are read from layer_types and sliding_window"),
    "attention_sink_bias": ((False,), "attention sinks are not supported"),
    "attention_value_scale": ((1, 1.0), "scaled values are not supported"),
    "sample_from_anchor": ((False,), "slots that predict the next position are not supported"),
    "input_embedding_scale": ((1, 1.0), "scaled embeddings are not supported"),
    "use_gemma_norm": ((False,), "norms of 1 + weight are not supported in a drafter"),
}


@dataclass(frozen=True)
class DFlashCheckpoint:
    """A drafter as read. `dflash2` is None for plain DFlash; `num_target_layers` where the configuration says it."""

    drafter: Drafter
    vocab_size: int
    num_target_layers: int | None = None
    dflash2: DFlash2 | None = None


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Target layers read where a DFlash configuration lists none: evenly from 1 to the fourth from the end."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def read_dflash(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    mask_token_id: int | None = None,
    ignore: Collection[str] = (),
) -> DFlashCheckpoint:
    """Read a drafter directory: `config.json` and safetensors, names with or without a leading `model.`.

    Weights come in `dtype` on the CPU, in eval mode, without gradients. `mask_token_id` is for configurations that say
    null; `ignore` names tensors that may be there unused, such as a copy of the target's `embed_tokens.weight`.

    Raises:
        CheckpointError: one line that names the file and what is wrong: a tensor that is missing, unused or of another
            shape or dtype, a key that is missing or that asks for what the drafter cannot do.
    """
    directory = Path(directory)
    with open_dflash(directory) as files:
        config = Fields(directory / "config.json", read_json(directory / "config.json"))
        drafter_config, extra, vocab_size = parse(config, mask_token_id)
        drafter, found = load(files, drafter_config, extra, vocab_size, dtype)
        files.finish(lambda name: name in ignore or name.startswith(DMTP_PREFIX))
    count = config.integer("num_target_layers") if config.given("num_target_layers") else None
    return DFlashCheckpoint(drafter, vocab_size, count, found)


def open_dflash(directory: Path) -> TensorFiles:
    """The tensors of a drafter directory under the names that this module uses."""
    return TensorFiles(directory, lambda name: dflash2.canonical(name.removeprefix("model.")))


def load(
    files: TensorFiles, config: DrafterConfig, extra: DFlash2Config | None, vocab_size: int, dtype: torch.dtype
) -> tuple[Drafter, DFlash2 | None]:
    """The drafter's tensors and those of DFlash2."""
    files.check_layers("layers.", config.num_layers)
    drafter = files.build(Drafter, config)
    files.fill(drafter, "", dtype)
    if extra is None:
        return drafter, None
    wanted = dflash2.shapes(extra, config, vocab_size)
    return drafter, DFlash2(extra, {name: files.take(name, shape, dtype) for name, shape in wanted.items()})


def parse(config: Fields, mask_token_id: int | None) -> tuple[DrafterConfig, DFlash2Config | None, int]:
    """Configuration of the drafter, of DFlash2's modules, and the size of the vocabulary."""
    if config.given("speculators_model_type"):
        return _speculators(config, mask_token_id)
    kinds = ("DFlashDraftModel", "DFlash2DraftModel")
    kind = config.words("architectures", kinds)
    if len(kind) != 1:
        config.wrong("architectures", f"one of {' or '.join(kinds)}")
    config.word("model_type", ("qwen3",))
    section = config.section("dflash_config")
    second = kind[0] == "DFlash2DraftModel"
    section.known((*_KNOWN, *_NEUTRAL, *(dflash2.KEYS if second else ()), "swa_window_size"))
    for key, (neutral, why) in _NEUTRAL.items():
        for place in (section, config):
            place.refuse(key, neutral, why)
    if not second:
        for place in (section, config):
            place.refuse("output_multiplier", (1, 1.0), "scaled logits are not supported")
            place.refuse("final_logit_softcapping", (0, 0.0), "soft-capped logits are not supported")
    layer, count = read_layer(config), config.integer("num_hidden_layers", most=MOST_LAYERS)
    vocab_size = config.integer("vocab_size")
    if same(section, config, "target_layer_ids").given("target_layer_ids"):
        layers = same(section, config, "target_layer_ids").integers("target_layer_ids")
    else:
        total = config.integer("num_target_layers", least=4)
        layers = default_layer_ids(total, count)
    drafter = _build(
        config,
        layer=layer,
        num_layers=count,
        target_layers=layers,
        block_size=same(section, config, "block_size").integer("block_size"),
        mask_token_id=_mask_id(same(section, config, "mask_token_id"), mask_token_id, vocab_size),
        layer_masks=_masks(config, section, count),
    )
    extra = dflash2.read_config(config, section, drafter, vocab_size) if second else None
    return drafter, extra, vocab_size


def _speculators(config: Fields, mask_token_id: int | None) -> tuple[DrafterConfig, None, int]:
    config.word("speculators_model_type", ("dflash",))
    config.refuse("projector_type", ("dflash",), "only plain DFlash is supported")
    config.refuse("shift_label", (False,), "slots that predict the next position are not supported")
    inner = config.section("transformer_layer_config")
    inner.word("model_type", ("qwen3",))
    layer, count = read_layer(inner), inner.integer("num_hidden_layers", most=MOST_LAYERS)
    vocab_size = inner.integer("vocab_size")
    config.refuse(
        "draft_vocab_size", (vocab_size,), f"a vocabulary other than the target's {vocab_size} is not supported"
    )
    config.refuse("target_hidden_size", (layer.hidden_size,), f"must be the drafter's {layer.hidden_size}")
    window, types = _layer_types(inner, count)
    causal = not config.flag("sliding_window_non_causal", False)
    sliding, full = MaskRule(window, "anchor", causal), MaskRule(None)
    drafter = _build(
        config,
        layer=layer,
        num_layers=count,
        # the library counts hidden states, of which the first is the embedding
        target_layers=tuple(i - 1 for i in config.integers("aux_hidden_state_layer_ids", least=1)),
        block_size=config.integer("block_size"),
        mask_token_id=_mask_id(config, mask_token_id, vocab_size),
        layer_masks=_compact(tuple(sliding if kind == "sliding_attention" else full for kind in types)),
    )
    return drafter, None, vocab_size


def _build(
    config: Fields,
    *,
    layer: LayerConfig,
    num_layers: int,
    target_layers: tuple[int, ...],
    block_size: int,
    mask_token_id: int,
    layer_masks: tuple[MaskRule, ...],
) -> DrafterConfig:
    if block_size < 2:
        config.fail(f"block_size is {block_size}, must be at least 2")
    if config.given("num_target_layers"):
        total = config.integer("num_target_layers")
        check_layer_ids(config, target_layers, total)
    return DrafterConfig(layer, num_layers, target_layers, block_size, None, mask_token_id, layer_masks=layer_masks)


def check_layer_ids(config: Fields, target_layers: tuple[int, ...], total: int) -> None:
    """Raise CheckpointError on ids that a target of `total` layers does not have, and in plain DFlash on its last one:
    this library takes that layer's output as it is, transformers after the final norm."""
    if max(target_layers) >= total:
        config.fail(f"target_layer_ids are {list(target_layers)}, the target has {total} layers")
    if max(target_layers) == total - 1 and not config.given(DMTP_CONFIG):
        config.fail(
            f"target_layer_ids are {list(target_layers)}: the state after the last of {total} layers is before the "
            "final norm in some readers and after it in others"
        )


def _mask_id(holder: Fields, given: int | None, vocab_size: int) -> int:
    if given is None and not holder.given("mask_token_id"):
        holder.wrong("mask_token_id", "the id of the mask, or given as mask_token_id")
    if given is not None and not 0 <= given < vocab_size:
        raise ValueError(f"mask_token_id: is {given}, must be below the vocabulary's {vocab_size}")
    return given if given is not None else holder.integer("mask_token_id", least=0, most=vocab_size - 1)


def _layer_types(config: Fields, count: int) -> tuple[int | None, tuple[str, ...]]:
    """Window and kind of every layer, as transformers' Qwen3 has them."""
    on = config.flag("use_sliding_window", False)
    # transformers has values for both that count only when the flag is on
    for key, least in (("sliding_window", 1), ("max_window_layers", 0)):
        if config.given(key):
            config.integer(key, least)
    window = config.integer("sliding_window") if on else None
    if config.given("layer_types"):
        types = config.words("layer_types", ("full_attention", "sliding_attention"))
        if len(types) != count:
            config.fail(f"{config.name('layer_types')} has {len(types)} entries for {count} layers")
        if "sliding_attention" in types and not on:
            config.fail(
                f"{config.name('layer_types')} has sliding layers, use_sliding_window is not true: transformers then "
                "drops the window; say true, or full_attention"
            )
        return window, types
    first = config.integer("max_window_layers", least=0) if on else count
    return window, tuple("sliding_attention" if i >= first else "full_attention" for i in range(count))


def _masks(config: Fields, section: Fields, count: int) -> tuple[MaskRule, ...]:
    """Sliding layers are causal and full ones not, unless the configuration says one rule for all."""
    window, types = _layer_types(config, count)
    stated = config.flag("is_causal") if config.given("is_causal") else None
    if section.given("causal"):
        if stated is not None and section.flag("causal") != stated:
            config.fail(f"is_causal is {stated} but {section.name('causal')} is {section.flag('causal')}")
        stated = section.flag("causal")
    rules = []
    for kind in types:
        sliding = kind == "sliding_attention"
        causal = sliding if stated is None else stated
        rules.append(MaskRule(window if sliding else None, "query" if sliding else "anchor", causal))
    return _compact(tuple(rules))


def _compact(rules: tuple[MaskRule, ...]) -> tuple[MaskRule, ...]:
    return () if all(rule == MaskRule(None) for rule in rules) else rules
