"""The checkpoint file: what is written comes back, and every way a file can be wrong is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dmtp_kernels.models.checkpoint import (
    EMBEDDED,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    quantize_rows,
    save_checkpoint,
    write_atomically,
)
from dmtp_kernels.models.smollm2 import DRAFTERS
from dmtp_kernels.testing.models import tiny_checkpoint


@pytest.fixture(scope="module")
def trio() -> Checkpoint:
    return tiny_checkpoint(3)


@pytest.fixture
def saved(trio: Checkpoint, tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "trio.safetensors", trio, dtype=torch.float32, int8_drafters=False)


def _rewrite(path: Path, edit: Callable[[dict, dict], None]) -> None:
    """Change a saved file's tensors and configuration in place."""
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    config = json.loads(metadata["config"])
    edit(tensors, config)
    save_file(tensors, path, metadata={**metadata, "config": json.dumps(config)})


def test_full_precision_comes_back_bit_for_bit(trio: Checkpoint, saved: Path) -> None:
    read = load_checkpoint(saved)
    assert list(read.modules()) == list(trio.modules())
    for prefix, module in trio.modules().items():
        other = read.modules()[prefix].state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.equal(other[name], tensor), f"{prefix}.{name}"
    assert read.target.config == trio.target.config
    assert {name: drafter.config for name, drafter in read.drafters.items()} == {
        name: drafter.config for name, drafter in trio.drafters.items()
    }
    assert {name: fusion.mode for name, fusion in read.fusions.items()} == {
        name: fusion.mode for name, fusion in trio.fusions.items()
    }


def test_read_models_are_frozen_in_the_asked_dtype(saved: Path) -> None:
    for module in load_checkpoint(saved, dtype=torch.float64).modules().values():
        assert not module.training
        assert all(p.dtype == torch.float64 and not p.requires_grad for p in module.parameters())


def test_tied_head_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    trio = tiny_checkpoint(0, tie_embeddings=True)
    path = save_checkpoint(tmp_path / "tied.safetensors", trio, dtype=torch.float32)
    with safe_open(path, framework="pt") as handle:
        assert "target.lm_head.weight" not in handle.keys()  # noqa: SIM118
    read = load_checkpoint(path)
    assert read.target.lm_head.weight is read.target.embed_tokens.weight


def test_int8_rows_err_by_half_a_step_at_most(trio: Checkpoint, tmp_path: Path) -> None:
    read = load_checkpoint(save_checkpoint(tmp_path / "int8.safetensors", trio, dtype=torch.float32))
    for prefix, module in trio.modules().items():
        for name, tensor in module.state_dict().items():
            other = read.modules()[prefix].state_dict()[name]
            if prefix.startswith(("drafters", "fusion")) and tensor.dim() == 2:
                step = tensor.abs().amax(dim=1, keepdim=True) / 127
                assert ((other - tensor).abs() <= step * 0.5001).all(), f"{prefix}.{name}"
            else:
                assert torch.equal(other, tensor), f"{prefix}.{name}"


def test_zero_rows_quantise_to_zero() -> None:
    # the first step of a zero-initialised residual: a scale of 0 would make NaN
    rows, scale = quantize_rows(torch.zeros(2, 4))
    assert not rows.any() and torch.isfinite(scale).all()


def test_only_the_asked_drafters_are_read(saved: Path) -> None:
    read = load_checkpoint(saved, drafters=["dmtp", "dflash"])
    assert set(read.drafters) == {"dmtp", "dflash"}
    assert set(read.fusions) == {"dmtp"}


def test_the_record_lies_beside_the_weights(trio: Checkpoint, tmp_path: Path) -> None:
    with_record = Checkpoint(trio.target, trio.mtp, trio.drafters, trio.fusions, record={"seed": 7})
    path = save_checkpoint(tmp_path / "a.safetensors", with_record)
    assert json.loads((tmp_path / "a.json").read_text()) == {"seed": 7}
    assert load_checkpoint(path).record == {"seed": 7}


def assert_refused(path: Path, *words: str, **options: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


def test_missing_file(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere.safetensors", "no such file")


def test_directory_instead_of_a_file(tmp_path: Path) -> None:
    assert_refused(tmp_path, "is not a file")


@pytest.mark.parametrize(
    "kept", [0, 7, 100, -1], ids=["empty", "inside the size", "inside the header", "last byte cut"]
)
def test_truncated_file(saved: Path, kept: int) -> None:
    saved.write_bytes(saved.read_bytes()[:kept])
    assert_refused(saved, "not a readable safetensors file")


def test_file_of_another_kind(saved: Path) -> None:
    saved.write_bytes(b"\x00" * 4096)
    assert_refused(saved)


def test_safetensors_of_another_program(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert_refused(tmp_path / "other.safetensors", "format")


def test_missing_tensor_names_it_and_its_shape(saved: Path) -> None:
    _rewrite(saved, lambda tensors, config: tensors.pop("mtp.fc.weight"))
    assert_refused(saved, "mtp.fc.weight", "missing", "[32, 64]")


def test_missing_scale(trio: Checkpoint, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "int8.safetensors", trio)
    _rewrite(path, lambda tensors, config: tensors.pop("fusion.dmtp.proj.weight.scale"))
    assert_refused(path, "fusion.dmtp.proj.weight.scale", "missing", "[32]")


def test_wrong_shape(saved: Path) -> None:
    _rewrite(saved, lambda tensors, config: tensors.update({"target.norm.weight": torch.ones(31)}))
    assert_refused(saved, "target.norm.weight", "[31]", "[32]")


def test_integer_weights_without_rows(saved: Path) -> None:
    _rewrite(saved, lambda tensors, config: tensors.update({"target.norm.weight": torch.ones(32, dtype=torch.int32)}))
    assert_refused(saved, "target.norm.weight", "int32")


def test_values_that_are_not_finite(saved: Path) -> None:
    _rewrite(saved, lambda tensors, config: tensors["mtp.norm.weight"].fill_(float("nan")))
    assert_refused(saved, "mtp.norm.weight", "not finite")


def test_tensor_outside_the_configuration(saved: Path) -> None:
    _rewrite(saved, lambda tensors, config: tensors.update({"target.layers.9.x": torch.ones(1)}))
    assert_refused(saved, "target.layers.9.x")


def _set(*keys: str, to: object) -> Callable[[dict, dict], None]:
    def edit(tensors: dict, config: dict) -> None:
        place = config
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return edit


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (_set("mtp", "layer", "hidden_size", to=64), "mtp hidden size is 64"),
        (_set("drafters", "dmtp", "layer", "hidden_size", to=64), "drafter dmtp hidden size is 64"),
        (_set("drafters", "dmtp", "target_layers", to=[0, 2]), "target layers [0, 2]"),
        (_set("drafters", "dmtp", "mask_token_id", to=99), "mask id 99"),
        (_set("target", "num_valid", to=99), "num_valid 99"),
        (_set("fusions", "dmtp", "mode", to="sum"), "sum"),
        (_set("fusions", "dmtp", "width", to=8), "width is 8"),
        (_set("target", "surprise", to=1), "configuration"),
        (_set("drafters", to=None), "configuration"),
        (_set("format", to="dmtp-2"), "format is 'dmtp-2'"),
        (_set("target", "num_layers", to=3), "target.layers.2"),
        (_set("target", "num_layers", to=2**31 - 1), "target has 2147483647 layers"),
        (_set("drafters", "dmtp", "num_layers", to=10**9), "dmtp has 1000000000 layers"),
        (_set("target", "num_layers", to="2"), "TargetConfig.num_layers is '2'"),
        (_set("target", "num_valid", to=1.5), "TargetConfig.num_valid is 1.5"),
        (_set("target", "max_positions", to=None), "TargetConfig.max_positions is None"),
        (_set("target", "layer", "rope_theta", to=-1.0), "LayerConfig.rope_theta is -1.0"),
        (_set("target", "layer", "rms_norm_eps", to="x"), "LayerConfig.rms_norm_eps is 'x'"),
        (_set("target", "tie_embeddings", to=1), "TargetConfig.tie_embeddings is 1"),
        (_set("drafters", "dmtp", "window", to=10**12), "DrafterConfig.window is 1000000000000"),
        (_set("drafters", "dmtp", "target_layers", to=[1.5]), "DrafterConfig.target_layers is (1.5,)"),
        (_set("fusions", "dmtp", "eps", to=None), "fusion eps is None"),
        (_set("fusions", "dmtp", to=None), "configuration"),
        (_set("fusions", to="x"), "configuration"),
    ],
)
def test_mismatched_configuration(saved: Path, edit: Callable[[dict, dict], None], word: str) -> None:
    _rewrite(saved, edit)
    assert_refused(saved, word)


def test_unknown_drafter_lists_those_present(saved: Path) -> None:
    assert_refused(saved, "'eagle'", "dflash", drafters=["eagle"])


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_unreadable_record(saved: Path, text: str) -> None:
    saved.with_suffix(".json").write_text(text)
    assert_refused(saved, "record")


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.bin"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.bin"]


def test_random_trios_depend_on_the_seed_alone() -> None:
    first, again, other = tiny_checkpoint(1), tiny_checkpoint(1), tiny_checkpoint(2)
    for prefix, module in first.modules().items():
        for name, tensor in module.state_dict().items():
            assert torch.equal(again.modules()[prefix].state_dict()[name], tensor)
            assert not torch.equal(other.modules()[prefix].state_dict()[name], tensor)
    assert all(p.abs().sum() > 0 for fusion in first.fusions.values() for p in fusion.parameters())


def test_the_embedded_checkpoint_ships_whole_and_small() -> None:
    assert EMBEDDED.stat().st_size <= 12_000_000
    shipped = load_checkpoint()
    assert len(shipped.drafters) == 10 and shipped.record is not None


def test_the_same_trio_gives_the_same_bytes(tmp_path: Path) -> None:
    trio = tiny_checkpoint(0)
    files = [save_checkpoint(tmp_path / f"{i}.safetensors", trio).read_bytes() for i in range(12)]
    assert len(set(files)) == 1


def test_drafts_alone_ask_for_their_target() -> None:
    with pytest.raises(CheckpointError, match=r"smollm2.safetensors: holds drafts alone, their target must be given"):
        load_checkpoint(DRAFTERS)
