"""The MTP module that Qwen3.5, 3.6 and Qwen3-Next checkpoints carry as `mtp.*`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from dmtp_kernels.models.config import LayerConfig, MTPConfig
from dmtp_kernels.models.formats.experts import take_experts
from dmtp_kernels.models.formats.fields import Fields, read_json
from dmtp_kernels.models.formats.files import TensorFiles
from dmtp_kernels.models.formats.layer import MOST_LAYERS, read_experts, read_layer
from dmtp_kernels.models.mtp import MTP

_DENSE, _EXPERTS, _NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
_WHOLE = {"qwen3_5": _DENSE, "qwen3_5_moe": _EXPERTS}
_COUNT = {_DENSE: "mtp_num_hidden_layers", _EXPERTS: "mtp_num_hidden_layers", _NEXT: "num_nextn_predict_layers"}


def read_mtp(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> MTP:
    """Read the `mtp.*` tensors of a checkpoint directory; the target's own tensors are passed over unread.

    Gated attention with each head's gate after its query, norms of `1 + weight`, the embedding half first in `mtp.fc`,
    partial RoPE (for text the three M-RoPE positions are one); the MLP dense, or with experts, stacked or one by one
    in the file. Weights come in `dtype` on the CPU, in eval mode, without gradients.

    Raises:
        CheckpointError: one line that names the file and what is wrong with it.
    """
    directory = Path(directory)
    with TensorFiles(directory) as files:
        config = parse(Fields(directory / "config.json", read_json(directory / "config.json")))
        files.check_layers("mtp.layers.", config.num_layers)
        mtp = files.build(MTP, config)
        files.fill(mtp, "mtp.", dtype, take=partial(take_experts, files))
        files.finish(lambda name: not name.startswith("mtp."))
    return mtp


def parse(config: Fields) -> MTPConfig:
    """Configuration of the module, of a whole model or of its text part."""
    kind = config.word("model_type", (*_WHOLE, *_COUNT))
    if kind in _WHOLE:
        config = config.section("text_config")
        kind = config.word("model_type", (_WHOLE[kind],))
    config.refuse("mtp_use_dedicated_embeddings", (False,), "an MTP module with its own embedding is not supported")
    if kind == _EXPERTS:
        # transformers does not read the key, serving engines do
        config.refuse("norm_topk_prob", (True,), "the weights of this model's chosen experts add up to 1")
    ours = config.section("dmtp_config")
    count = _COUNT[kind]
    return MTPConfig(
        layer=read_layer(
            config,
            gated=config.flag("attn_output_gate", True),
            gemma_norm=ours.flag("mtp_gemma_norm", True),
            partial=True,
            experts=None if kind == _DENSE else read_experts(config),
        ),
        num_layers=1 if kind == _NEXT and not config.given(count) else config.integer(count, most=MOST_LAYERS),
    )


def mtp_kind(layer: LayerConfig) -> tuple[str, str]:
    """The `model_type` whose MTP module has such layers, and the key under which it counts them."""
    kind = _DENSE if layer.experts is None else _EXPERTS if layer.experts.normalize else _NEXT
    return kind, _COUNT[kind]
