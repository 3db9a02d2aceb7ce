"""The MTP module that Qwen3.5, 3.6 and Qwen3-Next checkpoints carry as `mtp.*`."""

from __future__ import annotations

from pathlib import Path

import torch

from dmtp_kernels.models.config import MTPConfig
from dmtp_kernels.models.formats.fields import Fields, read_json
from dmtp_kernels.models.formats.files import TensorFiles
from dmtp_kernels.models.formats.layer import MOST_LAYERS, read_layer
from dmtp_kernels.models.mtp import MTP

_WHOLE = ("qwen3_5",)
_TEXT = ("qwen3_5_text",)
_EXPERTS = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")


def read_mtp(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> MTP:
    """Read the `mtp.*` tensors of a checkpoint directory; the target's own tensors are passed over unread.

    Gated attention with each head's gate after its query, norms of `1 + weight`, the embedding half first in `mtp.fc`,
    partial RoPE (for text the three M-RoPE positions are one). Weights come in `dtype` on the CPU, in eval mode,
    without gradients.

    Raises:
        CheckpointError: one line that names the file and what is wrong with it; experts are refused.
    """
    directory = Path(directory)
    with TensorFiles(directory) as files:
        config = parse(Fields(directory / "config.json", read_json(directory / "config.json")))
        files.check_layers("mtp.layers.", config.num_layers)
        mtp = files.build(MTP, config)
        files.fill(mtp, "mtp.", dtype)
        files.finish(lambda name: not name.startswith("mtp."))
    return mtp


def parse(config: Fields) -> MTPConfig:
    """Configuration of the module, of a whole model or of its text part."""
    if config.values.get("model_type") in _EXPERTS:
        config.fail(
            f"model_type is {config.values['model_type']!r}: its MTP module routes to experts, which this library's "
            "dense MLP cannot run"
        )
    if config.word("model_type", (*_WHOLE, *_TEXT)) in _WHOLE:
        config = config.section("text_config")
        config.word("model_type", _TEXT)
    config.refuse("mtp_use_dedicated_embeddings", (False,), "an MTP module with its own embedding is not supported")
    ours = config.section("dmtp_config")
    return MTPConfig(
        layer=read_layer(
            config,
            gated=config.flag("attn_output_gate", True),
            gemma_norm=ours.flag("mtp_gemma_norm", True),
            partial=True,
        ),
        num_layers=config.integer("mtp_num_hidden_layers", most=MOST_LAYERS),
    )
