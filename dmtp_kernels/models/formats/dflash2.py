"""What a DFlash2 checkpoint has beyond DFlash: a convolution around attention and MLP of every layer, and a path
selector. Read and checked here as tensors; `attach` gives the drafter that runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dmtp_kernels.models.config import ConvConfig, DrafterConfig, SelectorConfig
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.formats.fields import Fields, same

KEYS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
)
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


@dataclass(frozen=True)
class DFlash2Config:
    """Sizes of the convolution (taps along the block, channels a group) and of the selector (rank, candidates a slot),
    and what the head's logits go through: times `output_multiplier`, then `c * tanh(x / c)` where `softcap` is c."""

    conv_taps: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    output_multiplier: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class DFlash2:
    """The extra tensors, by their names in the checkpoint (codebooks without `.weight`)."""

    config: DFlash2Config
    tensors: dict[str, torch.Tensor]


def canonical(name: str) -> str:
    """The codebooks' names without `.weight`, which is there when an embedding module was saved."""
    return name.removesuffix(".weight") if name.removesuffix(".weight") in _CODEBOOKS else name


def read_config(config: Fields, section: Fields, drafter: DrafterConfig, vocab_size: int) -> DFlash2Config:
    """Raises CheckpointError on a missing size, or groups that do not divide the width."""

    def integer(key: str, most: int) -> int:
        return same(section, config, key).integer(key, most=most)

    width = drafter.layer.hidden_size
    group = integer("conv_group_size", width)
    if width % group:
        config.fail(f"conv_group_size is {group}, must divide hidden_size {width}")
    holder = same(section, config, "final_logit_softcapping")
    multiplier = same(section, config, "output_multiplier")
    return DFlash2Config(
        conv_taps=integer("conv_kernel_size", drafter.block_size),
        conv_group=group,
        selector_rank=integer("selector_rank", 1 << 16),
        selector_top_k=integer("selector_top_k", vocab_size),
        output_multiplier=multiplier.number("output_multiplier", 1.0),
        softcap=holder.number("final_logit_softcapping") if holder.given("final_logit_softcapping") else None,
    )


def shapes(config: DFlash2Config, drafter: DrafterConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the extra tensors."""
    width, taps = drafter.layer.hidden_size, config.conv_taps
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(drafter.num_layers):
        for place in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{place}"
            found[f"{prefix}.base_kernel"] = (2, taps, width)
            found[f"{prefix}.kernel_projection.weight"] = (2 * taps * (width // config.conv_group), width)
    found |= dict.fromkeys(_CODEBOOKS, (vocab_size, config.selector_rank))
    return found | {"candidate_selector.hidden_projection.weight": (config.selector_rank, width)}


def attach(drafter: Drafter, extra: DFlash2) -> Drafter:
    """The drafter that runs both: `drafter`'s tensors and those of `extra`, shared with them.

    Raises:
        RuntimeError: a tensor is missing or of another shape.
    """
    own = extra.config
    vocab_size = extra.tensors[_CODEBOOKS[0]].shape[0]
    config = replace(
        drafter.config,
        conv=ConvConfig(own.conv_taps, own.conv_group),
        selector=SelectorConfig(
            vocab_size, own.selector_rank, own.selector_top_k, own.output_multiplier, own.softcap or None
        ),
    )
    with torch.device("meta"):
        whole = Drafter(config)
    whole.load_state_dict({**drafter.state_dict(), **extra.tensors}, assign=True)
    return whole.eval().requires_grad_(False)
