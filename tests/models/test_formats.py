"""Public formats: what is written comes back bit for bit, and every convention of theirs means what they mean by it."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmtp_kernels.models import MTP, MTPConfig, Target
from dmtp_kernels.models.checkpoint import CheckpointError
from dmtp_kernels.models.config import ExpertsConfig, MaskRule
from dmtp_kernels.models.formats import (
    read_dflash,
    read_dmtp,
    read_mtp,
    read_qwen3,
    save_drafter,
    save_mtp,
    save_qwen3,
)
from dmtp_kernels.models.formats.dflash import default_layer_ids
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.models.format_cases import (
    GATED,
    READERS,
    ROUTED,
    SLIDING,
    TARGET,
    dflash2,
    drafter,
    edit_config,
    edit_tensors,
    shard,
    tensors_of,
    write,
)
from tests.models.public_cases import randomise


def assert_same(first: nn.Module, second: nn.Module) -> None:
    assert getattr(first, "config", None) == getattr(second, "config", None)
    a, b = first.state_dict(), second.state_dict()
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize(
    "masks",
    [
        (),
        SLIDING,
        (MaskRule(5, "query"), MaskRule(None)),
        (MaskRule(5, "query", True),) * 2,
        (MaskRule(None, causal=True),) * 2,
    ],
    ids=["full", "sliding causal, full not", "none causal", "all sliding causal", "all full causal"],
)
def test_dflash_round_trip(tmp_path: Path, masks: tuple[MaskRule, ...]) -> None:
    module = drafter(masks)
    read = read_dflash(save_drafter(tmp_path, module, TARGET))
    assert_same(read.drafter, module)
    assert (read.vocab_size, read.num_target_layers, read.dflash2) == (20, 6, None)


@pytest.mark.parametrize(
    "masks",
    [
        (MaskRule(5, "anchor"), MaskRule(None)),
        (MaskRule(5, "query"), MaskRule(4, "query")),
        (MaskRule(5, "query"), MaskRule(None, causal=True)),
    ],
    ids=["from the anchor", "two windows", "full causal, sliding not"],
)
def test_masks_that_dflash_cannot_say_are_not_written(tmp_path: Path, masks: tuple[MaskRule, ...]) -> None:
    with pytest.raises(ValueError, match="layer masks that DFlash checkpoints cannot say"):
        save_drafter(tmp_path, drafter(masks), TARGET)
    assert not list(tmp_path.iterdir())


def test_dflash2_round_trip(tmp_path: Path) -> None:
    module, extra = drafter((MaskRule(6, "query"),) * 2), dflash2()
    read = read_dflash(save_drafter(tmp_path, module, TARGET, dflash2=extra))
    assert_same(read.drafter, module)
    assert read.dflash2 is not None and read.dflash2.config == extra.config
    assert read.dflash2.tensors.keys() == extra.tensors.keys() and len(extra.tensors) == 2 * 4 + 3
    assert all(torch.equal(read.dflash2.tensors[name], tensor) for name, tensor in extra.tensors.items())


def test_dflash2_codebooks_may_be_named_as_embeddings(tmp_path: Path) -> None:
    write(tmp_path, "dflash2")
    code = "candidate_selector.successor_codebook"
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{code}.weight": tensors.pop(code)}))
    found = read_dflash(tmp_path).dflash2
    assert found is not None and torch.equal(found.tensors[code], dflash2().tensors[code])


@pytest.mark.parametrize("method", ["dmtp", "low_rank", "replace", "mask_residual", "control", "dflash"])
def test_dmtp_round_trip_and_as_plain_dflash(tmp_path: Path, method: str) -> None:
    trio = tiny_checkpoint(5, num_layers=4, target_layers=(1, 2))
    module, fusion = trio.drafters[method], trio.fusions.get(method)
    save_drafter(tmp_path, module, trio.target.config, method=method, fusion=fusion)
    read = read_dmtp(tmp_path)
    assert read.method == method
    assert_same(read.dflash.drafter, module)
    assert (read.fusion is None) == (fusion is None)
    if fusion is not None and read.fusion is not None:
        assert (read.fusion.mode, read.fusion.norm_m.eps) == (fusion.mode, fusion.norm_m.eps)
        assert_same(read.fusion, fusion)
    # a plain reader passes over the fusion and the window that only DMTP knows
    plain = read_dflash(tmp_path).drafter
    assert plain.config.window is None and not plain.config.layer_masks
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_a_drafter_that_reads_mtp_features_is_no_dflash(tmp_path: Path) -> None:
    trio = tiny_checkpoint(5)
    with pytest.raises(ValueError, match="reads MTP features"):
        save_drafter(tmp_path, trio.drafters["mtp_context"], trio.target.config, method="mtp_context")
    with pytest.raises(ValueError, match="method: is None"):
        save_drafter(tmp_path, trio.drafters["dflash"], trio.target.config)


def test_a_plain_drafter_is_no_dmtp(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dmtp_config is missing"):
        read_dmtp(write(tmp_path, "dflash"))


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_round_trip(tmp_path: Path, tied: bool) -> None:
    target = tiny_checkpoint(5, tie_embeddings=tied).target
    read = read_qwen3(save_qwen3(tmp_path, target))
    assert_same(read, target)
    assert read.config.num_valid == 19 and read_qwen3(tmp_path, num_valid=7).config.num_valid == 7
    assert (read.lm_head.weight is read.embed_tokens.weight) == tied
    assert ("lm_head.weight" in tensors_of(tmp_path / "model.safetensors")) != tied


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    save_qwen3(tmp_path, tiny_checkpoint(5, tie_embeddings=True).target)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    read_qwen3(tmp_path)
    edit_tensors(tmp_path, lambda t: t["lm_head.weight"][3].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from embed_tokens\.weight"):
        read_qwen3(tmp_path)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_mtp_of_experts_round_trip(tmp_path: Path, stacked: bool, normalize: bool) -> None:
    routed = replace(ROUTED, experts=ExpertsConfig(5, 3, 12, normalize))
    module = MTP(MTPConfig(routed, num_layers=2))
    randomise(module, 3)
    assert_same(read_mtp(save_mtp(tmp_path, module, TARGET, stacked=stacked)), module)
    stored, stack = tensors_of(tmp_path / "model.safetensors"), module.state_dict()["layers.1.mlp.experts.gate_up_proj"]
    if stacked:
        assert torch.equal(stored["mtp.layers.1.mlp.experts.gate_up_proj"], stack)
    else:
        assert torch.equal(stored["mtp.layers.1.mlp.experts.4.gate_proj.weight"], stack[4, :12])
        assert torch.equal(stored["mtp.layers.1.mlp.experts.4.up_proj.weight"], stack[4, 12:])
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == ("qwen3_5_moe_text" if normalize else "qwen3_next")


def test_one_module_may_stack_some_of_its_experts(tmp_path: Path) -> None:
    write(tmp_path, "mtp of single experts")
    whole = read_mtp(tmp_path)
    stack = whole.state_dict()["layers.0.mlp.experts.down_proj"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(5):
            del tensors[f"mtp.layers.0.mlp.experts.{i}.down_proj.weight"]
        tensors["mtp.layers.0.mlp.experts.down_proj"] = stack

    edit_tensors(tmp_path, change)
    assert_same(read_mtp(tmp_path), whole)


def test_qwen3_next_has_one_layer_unless_it_says_another_number(tmp_path: Path) -> None:
    write(tmp_path, "mtp of experts")
    edit_config(tmp_path, lambda c: (c.pop("mtp_num_hidden_layers"), c.update(model_type="qwen3_next")))
    assert read_mtp(tmp_path).config == MTPConfig(ROUTED, num_layers=1)
    edit_config(tmp_path, lambda c: c.update(num_nextn_predict_layers=2))
    with pytest.raises(CheckpointError, match=r"tensors mtp\.layers\.1\.\* are missing"):
        read_mtp(tmp_path)


def test_targets_and_drafters_of_experts_are_not_written(tmp_path: Path) -> None:
    trio, experts = tiny_checkpoint(5), ROUTED.experts
    target = Target(replace(trio.target.config, layer=replace(trio.target.config.layer, experts=experts)))
    with pytest.raises(ValueError, match="dense Qwen3 checkpoints cannot say"):
        save_qwen3(tmp_path, target)
    routed = drafter()
    routed.config = replace(routed.config, layer=replace(routed.config.layer, experts=experts))
    with pytest.raises(ValueError, match="routes to experts"):
        save_drafter(tmp_path, routed, TARGET)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gated", [True, False])
def test_mtp_round_trip(tmp_path: Path, gated: bool) -> None:
    module = MTP(MTPConfig(GATED, num_layers=2)) if gated else tiny_checkpoint(5).mtp
    assert module is not None
    if gated:
        randomise(module, 3)
    assert_same(read_mtp(save_mtp(tmp_path, module, TARGET)), module)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_is_read_in_the_asked_one(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    write(tmp_path, kind)
    before = tensors_of(tmp_path / "model.safetensors")
    edit_tensors(tmp_path, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    read = READERS[kind](tmp_path, dtype=torch.float64)
    for tensor in (t for module in _modules(read) for t in module.parameters()):
        assert tensor.dtype == torch.float64 and not tensor.requires_grad
        parts = [tensor] if kind != "mtp of single experts" or tensor.dim() < 3 else _singles(tensor)
        for part in parts:
            assert any(torch.equal(other.to(dtype).double(), part) for other in before.values())


@pytest.mark.parametrize("kind", READERS)
def test_shards_and_prefixes_are_one_checkpoint(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    first = READERS[kind](tmp_path)
    if not kind.startswith("mtp"):
        edit_tensors(tmp_path, _other_prefix)
    shard(tmp_path)
    second = READERS[kind](tmp_path)
    for a, b in zip(_modules(first), _modules(second), strict=True):
        assert_same(a, b)


def _singles(stack: torch.Tensor) -> list[torch.Tensor]:
    gates = stack.shape[2] == 16  # [E, 2 I, H]
    return [part for expert in stack for part in (expert.chunk(2) if gates else [expert])]


def _modules(read: Any) -> list[nn.Module]:
    if isinstance(read, nn.Module):
        return [read]
    drafter = getattr(read, "dflash", read).drafter
    return [drafter, *([read.fusion] if getattr(read, "fusion", None) is not None else [])]


def _other_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if not name.startswith(("dmtp_fusion.", "lm_head.")):
            other = name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"
            tensors[other] = tensors.pop(name)


def test_default_layer_ids() -> None:
    # round half to even, as Python does: 64 layers, 5 and 8 read
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(40, 5) == (1, 10, 19, 28, 37)
    assert default_layer_ids(36, 1) == (18,)


def test_layer_ids_that_are_not_listed(tmp_path: Path) -> None:
    write(tmp_path, "dflash")
    edit_config(tmp_path, lambda c: c["dflash_config"].pop("target_layer_ids"))
    edit_config(tmp_path, lambda c: c.update(num_target_layers=40))
    assert read_dflash(tmp_path).drafter.config.target_layers == (1, 37)


def test_speculators_layer_ids_count_from_the_embedding(tmp_path: Path) -> None:
    write(tmp_path, "dflash")
    edit_config(tmp_path, _as_speculators)
    read = read_dflash(tmp_path).drafter
    # its id k is the state after k layers, ours the output of layer k - 1; its windows count from the anchor
    assert read.config.target_layers == (1, 3)
    assert read.config.layer_masks == (MaskRule(5, "anchor", True), MaskRule(None))
    edit_config(tmp_path, lambda c: c.update(sliding_window_non_causal=True))
    assert read_dflash(tmp_path).drafter.config.layer_masks[0] == MaskRule(5, "anchor", False)
    for change, word in [
        ({"aux_hidden_state_layer_ids": [0, 4]}, "aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 10}, "draft_vocab_size is 10"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
    ]:
        kept = (tmp_path / "config.json").read_text()
        edit_config(tmp_path, lambda c, change=change: c.update(change))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=word):
            read_dflash(tmp_path)
        (tmp_path / "config.json").write_text(kept)


def _as_speculators(config: dict[str, Any]) -> None:
    inner = dict(config)
    section = inner.pop("dflash_config")
    for key in ("block_size", "is_causal", "num_target_layers", "architectures"):
        inner.pop(key)
    config.clear()
    config |= {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": inner,
        "draft_vocab_size": 20,
        "block_size": 8,
        "aux_hidden_state_layer_ids": [i + 1 for i in section["target_layer_ids"]],
        "mask_token_id": section["mask_token_id"],
    }


def test_tensors_of_others_are_named_unless_they_are_to_be_ignored(tmp_path: Path) -> None:
    write(tmp_path, "dflash")
    edit_tensors(tmp_path, lambda t: t.update({"embed_tokens.weight": torch.zeros(20, 16)}))
    with pytest.raises(CheckpointError, match=r"tensor embed_tokens\.weight is not part of the configuration"):
        read_dflash(tmp_path)
    read_dflash(tmp_path, ignore=["embed_tokens.weight"])


def test_a_mask_id_can_be_given_where_the_configuration_says_null(tmp_path: Path) -> None:
    write(tmp_path, "dflash")
    edit_config(tmp_path, lambda c: c["dflash_config"].update(mask_token_id=None))
    with pytest.raises(CheckpointError, match="mask_token_id is null"):
        read_dflash(tmp_path)
    assert read_dflash(tmp_path, mask_token_id=7).drafter.config.mask_token_id == 7
    with pytest.raises(ValueError, match="mask_token_id: is 20"):
        read_dflash(tmp_path, mask_token_id=20)


def test_the_file_may_change_while_the_model_lives(tmp_path: Path) -> None:
    write(tmp_path, "dflash")
    read = read_dflash(tmp_path).drafter
    kept = read.fc.weight.clone()
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.seek(0)
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(read.fc.weight, kept)


def test_configurations_are_json_that_others_read(tmp_path: Path) -> None:
    for kind in READERS:
        config = json.loads((write(tmp_path / kind, kind) / "config.json").read_text())
        assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
        assert config["dtype"] == "float32"


def test_values_that_no_reader_takes_are_not_written(tmp_path: Path) -> None:
    mtp = MTP(MTPConfig(TARGET.layer))
    with torch.no_grad():
        mtp.fc.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"mtp.fc.weight: holds values that are not finite in torch.float16"):
        save_mtp(tmp_path, mtp, TARGET, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype: is torch.int8, must be a floating type"):
        save_mtp(tmp_path, mtp, TARGET, dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_shards_of_another_model_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds model.safetensors.index.json, the shards of another model"):
        save_mtp(tmp_path, MTP(MTPConfig(TARGET.layer)), TARGET)


def test_weights_are_as_readable_as_their_configuration(tmp_path: Path) -> None:
    save_mtp(tmp_path, MTP(MTPConfig(TARGET.layer)), TARGET)
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes.keys() == {"model.safetensors", "config.json"} and len(set(modes.values())) == 1


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    mtp = MTP(MTPConfig(TARGET.layer))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"model.safetensors"):
            save_mtp(tmp_path, mtp, TARGET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".tmp")]


def test_a_name_that_is_too_long_is_no_checkpoint(tmp_path: Path) -> None:
    for read in (read_mtp, read_qwen3):
        with pytest.raises(CheckpointError, match="File name too long"):
            read(tmp_path / ("x" * 300))
