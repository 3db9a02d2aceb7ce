"""Configurations that are damaged, hostile or ask for what cannot be done: one line that names the file and the key."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmtp_kernels.models.checkpoint import CheckpointError
from tests.models.format_cases import READERS, each_kind, edit_config, refused, write


@each_kind
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not readable JSON"),
        ("{", "not readable JSON"),
        ("[1]", "must be an object"),
        ("null", "must be an object"),
        ("{}", "missing"),
        ("[" * 200_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ('{"head_dim": NaN}', "NaN is not a JSON number"),
        ('{"head_dim": -Infinity}', "-Infinity is not a JSON number"),
        ('{"head_dim": ' + "9" * 10_000 + "}", "not readable JSON"),
        ('{"head_dim": 1, "head_dim": 2}', "'head_dim' is there twice"),
        (b"\xff\xfe", "not readable JSON"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, kind: str, text: str | bytes, word: str) -> None:
    write(tmp_path, kind)
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(tmp_path, kind, str(tmp_path / "config.json"), word)


_DRAFTER_UNREAD = {"max_position_embeddings", "tie_word_embeddings", "attention_dropout", "dtype"}
_UNREAD = (
    dict.fromkeys(READERS, _DRAFTER_UNREAD)
    | {
        "qwen3": {"attention_dropout", "dtype"},
    }
    | {
        kind: {"vocab_size", "max_position_embeddings", "attention_dropout", "dtype"}
        for kind in READERS
        if kind.startswith("mtp")
    }
)
# null says nothing, these do
_NULLABLE: dict[str, Any] = {"is_causal": bool, "final_logit_softcapping": (int, float)}
_WRONG: list[Any] = [
    True, -1, 0, 2.5, 10**400, 1e999, "x", "8", [], [8], {}, {"a": {"b": 1}}, [[[]]], 2**31, 2**63, float("-inf"),
]  # fmt: skip


@each_kind
def test_values_of_the_wrong_type_are_never_taken_for_a_default(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    places: list[tuple[str, ...]] = [(key,) for key in good]
    places += [(key, inner) for key, value in good.items() if isinstance(value, dict) for inner in value]
    for place in places:
        for wrong in _WRONG:
            config = json.loads(json.dumps(good))
            inner = config
            for key in place[:-1]:
                inner = inner[key]
            right, inner[place[-1]] = inner[place[-1]], wrong
            path.write_text(json.dumps(config).replace("Infinity", "1e999"))
            try:
                READERS[kind](tmp_path)
            except CheckpointError as error:
                message = str(error)
                assert "\n" not in message and str(tmp_path) in message and len(message) < 1000
            else:
                assert place[-1] in _UNREAD[kind] or _of_the_type(place[-1], wrong, right), (place, wrong)


def _of_the_type(key: str, wrong: Any, right: Any) -> bool:
    if isinstance(wrong, bool) or isinstance(right, bool):
        return isinstance(wrong, bool) and (isinstance(right, bool) or _NULLABLE.get(key) is bool)
    if right is None:
        return isinstance(wrong, _NULLABLE.get(key, ())) and 0 < wrong < 1e300
    if isinstance(right, float):
        return isinstance(wrong, int | float) and 0 < wrong < 1e300
    return type(wrong) is type(right)


@each_kind
def test_more_layers_than_tensors_is_seen_before_a_model_is_built(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    key = "mtp_num_hidden_layers" if kind.startswith("mtp") else "num_hidden_layers"

    def change(config: dict[str, Any]) -> None:
        config[key] = 4000
        if "layer_types" in config:
            config["layer_types"] = ["full_attention"] * 4000

    edit_config(tmp_path, change)
    started = time.monotonic()
    refused(tmp_path, kind, "4000 layers")
    assert time.monotonic() - started < 2


@each_kind
def test_sizes_that_no_tensor_has(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    good = (tmp_path / "config.json").read_text()
    keys = ["hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "vocab_size"]
    if "experts" in kind:
        keys[1:2] = ["num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"]
    for key in keys:
        (tmp_path / "config.json").write_text(good)
        edit_config(tmp_path, lambda c, key=key: c.update({key: 2**30}))  # type: ignore[misc]
        if key == "vocab_size" and kind not in ("dflash2", "qwen3"):
            continue  # no tensor has it
        tracemalloc.start()
        refused(tmp_path, kind)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()
    # products beyond 2**63
    (tmp_path / "config.json").write_text(good)
    edit_config(tmp_path, lambda c: c.update(head_dim=2**31 - 8, num_attention_heads=2**31 - 8))
    refused(tmp_path, kind, "its configuration is not a model")


def _top(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config.update(values)


def _inner(section: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config[section].update(values)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("dflash", _top(use_sliding_window=False), ("layer_types has sliding", "use_sliding_window is not true")),
        ("dflash", _top(sliding_window=None), ("sliding_window is null",)),
        ("dflash", _top(layer_types=["full_attention"]), ("layer_types has 1 entries for 2 layers",)),
        ("dflash", _top(layer_types=["full_attention", "linear_attention"]), ("layer_types is",)),
        ("dflash", _top(block_size=7), ("block_size is 8 but block_size is 7",)),
        ("dflash", _inner("dflash_config", causal=False, is_causal=None), ("dflash_config.is_causal is not a key",)),
        ("dflash", _inner("dflash_config", target_layer_ids=[1, 6]), ("[1, 6]", "the target has 6 layers")),
        ("dflash", _inner("dflash_config", mask_token_id=20), ("mask_token_id is 20", "between 0 and 19")),
        ("dflash", _inner("dflash_config", projector_type="domino"), ("projector_type is 'domino'",)),
        ("dflash", _inner("dflash_config", use_swa=True), ("use_swa is True",)),
        ("dflash", _inner("dflash_config", novelty=1), ("dflash_config.novelty is not a key",)),
        ("dflash", _top(input_embedding_scale=2.0), ("input_embedding_scale is 2.0",)),
        ("dflash", _top(output_multiplier=2.0), ("output_multiplier is 2.0",)),
        ("dflash", _top(architectures=["Qwen3DSparkModel"]), ("architectures is ['Qwen3DSparkModel']",)),
        ("dflash", _top(model_type="llama"), ("model_type is 'llama'",)),
        ("dflash", _top(attention_bias=True), ("attention_bias is True",)),
        ("dflash", _top(hidden_act="gelu"), ("hidden_act is 'gelu'",)),
        ("dflash", _top(rope_scaling={"rope_type": "yarn", "factor": 4.0}), ("rope_scaling.rope_type is 'yarn'",)),
        ("dflash", _top(rope_theta=5.0), ("rope_parameters.rope_theta is 1000000.0 but rope_theta is 5.0",)),
        ("dflash", _top(rope_parameters={"full_attention": {"rope_theta": 1.0}}), ("one RoPE per layer type",)),
        ("dflash", _top(quantization_config={"quant_method": "fp8"}), ("quantization_config", "not supported")),
        ("dflash", _top(num_attention_heads=3), ("3 heads must be a multiple of 2",)),
        ("dflash2", _inner("dflash_config", conv_group_size=5), ("conv_group_size is 5, must divide hidden_size 16",)),
        ("dflash2", _inner("dflash_config", conv_kernel_size=9), ("conv_kernel_size is 9",)),
        ("dflash2", _inner("dflash_config", selector_top_k=21), ("selector_top_k is 21",)),
        ("dmtp", _inner("dmtp_config", version=2), ("dmtp_config.version is 2",)),
        ("dmtp", _inner("dmtp_config", window_ref="query"), ("dmtp_config.window_ref is 'query'",)),
        ("dmtp", _inner("dmtp_config", fusion=None), ("dmtp_fusion.", "not part of the configuration")),
        ("dmtp", _inner("dmtp_config", later=1), ("dmtp_config.later is not a key",)),
        ("dmtp", _top(is_causal=True), ("window is given beside sliding or causal layers",)),
        ("qwen3", _top(model_type="qwen3_moe"), ("model_type is 'qwen3_moe'",)),
        ("qwen3", _top(use_sliding_window=True), ("use_sliding_window is True",)),
        ("qwen3", _top(tie_word_embeddings=None), ("tie_word_embeddings is null",)),
        ("qwen3", _inner("dmtp_config", num_valid=21), ("dmtp_config.num_valid is 21",)),
        ("mtp", _top(model_type="qwen3_5_moe"), ("text_config.model_type is missing", "'qwen3_5_moe_text'")),
        ("mtp", _top(model_type="qwen3_5_moe_text"), ("num_experts is missing",)),
        ("mtp of experts", _top(num_experts=4), ("mlp.gate.weight is [5, 16], expected [4, 16]",)),
        ("mtp of experts", _top(num_experts_per_tok=6), ("num_experts_per_tok is 6", "between 1 and 5")),
        ("mtp of experts", _top(norm_topk_prob=False), ("norm_topk_prob is False",)),
        ("mtp of experts", _top(decoder_sparse_step=2), ("decoder_sparse_step is 2",)),
        ("mtp of experts", _top(mlp_only_layers=[0]), ("mlp_only_layers is [0]",)),
        ("mtp of experts", _top(model_type="qwen3_5_text"), ("intermediate_size is missing",)),
        ("mtp", _top(mtp_use_dedicated_embeddings=True), ("mtp_use_dedicated_embeddings is True",)),
        ("mtp", _top(attn_output_gate=False), ("q_proj", "[128, 16]", "[64, 16]")),
        ("mtp", _inner("rope_parameters", partial_rotary_factor=None), ("partial_rotary_factor is null",)),
        ("mtp", _inner("rope_parameters", partial_rotary_factor=0.3), ("0.3 of head_dim 16",)),
        ("mtp", _inner("rope_parameters", partial_rotary_factor=2.0), ("at most 1",)),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object], words: tuple[str, ...]
) -> None:
    write(tmp_path, kind)
    edit_config(tmp_path, change)
    refused(tmp_path, kind, *words)
