"""Dense Qwen3 targets as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch

from dmtp_kernels.models.checkpoint import CheckpointError
from dmtp_kernels.models.config import TargetConfig
from dmtp_kernels.models.formats.fields import Fields, read_json
from dmtp_kernels.models.formats.files import TensorFiles
from dmtp_kernels.models.formats.layer import MOST_LAYERS, read_layer
from dmtp_kernels.models.target import Target

HEAD = "lm_head.weight"


def read_qwen3(directory: str | Path, *, dtype: torch.dtype = torch.float32, num_valid: int | None = None) -> Target:
    """Read a target directory: `config.json` and safetensors.

    `num_valid` is the number of ids that may be produced, by default what this library's export wrote, else all.
    Tensors of an MTP module (`mtp.*`) are left to `read_mtp`. Weights come in `dtype` on the CPU, in eval mode, without
    gradients.

    Raises:
        CheckpointError: one line that names the file and what is wrong with it.
    """
    directory = Path(directory)
    with TensorFiles(directory, _canonical) as files:
        config = _parse(Fields(directory / "config.json", read_json(directory / "config.json")), num_valid)
        files.check_layers("layers.", config.num_layers)
        target = files.build(Target, config)
        files.fill(target, "", dtype, skip=(HEAD,) if config.tie_embeddings else ())
        if config.tie_embeddings:
            embedding = target.embed_tokens.weight
            if HEAD in files.names and not torch.equal(files.take(HEAD, tuple(embedding.shape), dtype), embedding):
                raise CheckpointError(
                    f"checkpoint {directory}: tie_word_embeddings is true, but {HEAD} differs from embed_tokens.weight"
                )
            target.lm_head.weight = embedding
        files.finish(lambda name: name.startswith("mtp."))
    return target


def _canonical(name: str) -> str:
    return name.removeprefix("model.")


def _parse(config: Fields, num_valid: int | None) -> TargetConfig:
    config.word("model_type", ("qwen3",))
    if config.given("architectures"):
        config.words("architectures", ("Qwen3ForCausalLM",))
    config.refuse("use_sliding_window", (False,), "targets with a sliding window are not supported")
    if config.given("layer_types"):
        config.words("layer_types", ("full_attention",))
    vocab_size = config.integer("vocab_size")
    if num_valid is None:
        ours = config.section("dmtp_config")
        num_valid = ours.integer("num_valid", most=vocab_size) if ours.given("num_valid") else vocab_size
    elif not 1 <= num_valid <= vocab_size:
        raise ValueError(f"num_valid: is {num_valid}, must be between 1 and the vocabulary's {vocab_size}")
    return TargetConfig(
        layer=read_layer(config),
        num_layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
        vocab_size=vocab_size,
        num_valid=num_valid,
        max_positions=config.integer("max_position_embeddings"),
        tie_embeddings=config.flag("tie_word_embeddings"),
    )
