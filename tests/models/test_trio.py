"""Target, drafter and MTP module from directories of their own decode as the trio that they were written from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.models import MTP, Drafter, MTPConfig
from dmtp_kernels.models.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from dmtp_kernels.models.config import LayerConfig, MaskRule
from dmtp_kernels.models.formats import export_trio, read_trio, save_drafter
from dmtp_kernels.testing.audit import Auditor
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.models.format_cases import dflash2, edit_config
from tests.models.public_cases import randomise

PROMPTS = ((1, 2, 3), (7,), (5, 4, 3, 2, 1, 0, 10))


def decoded(checkpoint: Checkpoint, method: str) -> list[tuple[list[int], list[int]]]:
    engine = Engine(checkpoint, method, max_batch=len(PROMPTS), max_tokens=80)
    done = engine.run(Request(prompt, 40, temperature=0.7, seed=i) for i, prompt in enumerate(PROMPTS))
    return [(completion.tokens, completion.histogram) for completion in done]


@pytest.mark.parametrize("method", ["dmtp", "low_rank", "control", "dflash", "dflash2", "dmtp_dflash2"])
def test_an_exported_trio_decodes_the_same(tmp_path: Path, method: str) -> None:
    trio = tiny_checkpoint(5, num_layers=4, target_layers=(1, 2))
    places = export_trio(tmp_path, trio, method)
    read = read_trio(places.target, places.drafter, places.mtp)
    assert set(read.drafters) == {method} and set(read.fusions) == {method} & set(trio.fusions)
    assert decoded(read, method) == decoded(trio, method)


def test_a_plain_drafter_needs_no_mtp(tmp_path: Path) -> None:
    trio = tiny_checkpoint(5, window=None, target_layers=(0,))
    places = export_trio(tmp_path, dataclasses.replace(trio, mtp=None), "dflash")
    read = read_trio(places.target, places.drafter)
    assert places.mtp is None and read.mtp is None
    assert decoded(read, "dflash") == decoded(trio, "dflash")
    for method, word in [("dmtp", "has no MTP module"), ("mtp3", "has no MTP module")]:
        with pytest.raises(ValueError, match=word):
            Engine(read, method, max_tokens=80)
    with pytest.raises(ValueError, match="has no MTP module"):
        save_checkpoint(tmp_path / "x.safetensors", read)
    assert not read_trio(places.target).drafters


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    trio = tiny_checkpoint(5, window=None)
    good = export_trio(tmp_path / "good", trio, "dmtp")
    other = export_trio(tmp_path / "other", tiny_checkpoint(5, hidden_size=48, window=None), "dmtp")
    longer = export_trio(tmp_path / "longer", tiny_checkpoint(5, num_layers=3, window=None), "dmtp")
    assert good.mtp is not None and other.mtp is not None
    wider = export_trio(tmp_path / "wider", tiny_checkpoint(5, vocab_size=21, window=None), "dmtp")
    for drafter_of, mtp, word in [
        (other.drafter, good.mtp, "drafter dmtp hidden size is 48, the target's is 32"),
        (good.drafter, other.mtp, "mtp hidden size is 48, the target's is 32"),
        (longer.drafter, good.mtp, "num_target_layers is 3, the target has 2"),
        (wider.drafter, good.mtp, "vocab_size is 21, the target's is 20"),
    ]:
        with pytest.raises(CheckpointError, match=word) as caught:
            read_trio(good.target, drafter_of, mtp)
        assert str(tmp_path) in str(caught.value)
    edit_config(good.drafter, lambda c: c["dflash_config"].update(target_layer_ids=[0, 2]))
    with pytest.raises(CheckpointError, match=r"target_layer_ids are \[0, 2\], the target has 2 layers"):
        read_trio(good.target, good.drafter, good.mtp)
    edit_config(good.drafter, lambda c: (c.pop("num_target_layers"), c.pop("dmtp_config")))
    with pytest.raises(CheckpointError, match=r"target_layer_ids are \[0, 2\], the target has 2 layers"):
        read_trio(good.target, good.drafter, good.mtp)
    edit_config(good.drafter, lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]))
    with pytest.raises(CheckpointError, match=r"\[0, 1\]: the state after the last of 2 layers"):
        read_trio(good.target, good.drafter, good.mtp)


@pytest.mark.parametrize("named", [True, False])
def test_a_dflash2_checkpoint_is_the_drafter_that_runs(tmp_path: Path, named: bool) -> None:
    trio = tiny_checkpoint(5, num_layers=4, target_layers=(1, 2), window=6 if named else None)
    places = export_trio(tmp_path, trio, "dflash2")
    config = json.loads((places.drafter / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"] and ("dmtp_config" in config) == named
    drafter = read_trio(places.target, places.drafter).drafters["dflash2"]
    assert drafter.config == trio.drafters["dflash2"].config
    with pytest.raises(ValueError, match="has conv and selector itself"):
        save_drafter(tmp_path, drafter, trio.target.config, method="dflash2", dflash2=dflash2())
    part = Drafter(dataclasses.replace(drafter.config, selector=None))
    with pytest.raises(ValueError, match="drafter: has conv, DFlash2 checkpoints have"):
        save_drafter(tmp_path, part, trio.target.config, method="dflash2")


def test_a_block_is_only_ever_shortened(tmp_path: Path) -> None:
    places = export_trio(tmp_path, tiny_checkpoint(5), "dmtp")
    read = read_trio(places.target, places.drafter, places.mtp, block_size=4)
    assert read.drafters["dmtp"].config.block_size == 4
    for size in (1, 9):
        with pytest.raises(ValueError, match=f"block_size: is {size}, must be between 2 and the drafter's 8"):
            read_trio(places.target, places.drafter, places.mtp, block_size=size)


def test_a_method_without_a_drafter_is_not_exported(tmp_path: Path) -> None:
    trio = tiny_checkpoint(5)
    for method in ("mtp3", "nothing"):
        with pytest.raises(ValueError, match="method: no drafter"):
            export_trio(tmp_path, trio, method)
    with pytest.raises(ValueError, match="reads MTP features"):
        export_trio(tmp_path, trio, "context_fusion")
    assert not list(tmp_path.iterdir())


def test_sliding_layers_in_the_loop(tmp_path: Path) -> None:
    # what a drafter sees changes what it proposes, never what is produced
    trio = tiny_checkpoint(7, window=None, vocab_size=12, target_layers=(0,))
    places = export_trio(tmp_path, trio, "dflash")
    edit_config(
        places.drafter,
        lambda c: c.update(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=3,
            use_sliding_window=True,
            is_causal=None,
        ),
    )
    read = read_trio(places.target, places.drafter)
    assert read.drafters["dflash"].config.layer_masks
    slid, full = decoded(read, "dflash"), decoded(trio, "dflash")
    assert [tokens for tokens, _ in slid] == [tokens for tokens, _ in full]
    assert slid != full


GATED = LayerConfig(32, 48, 4, 2, 16, rotary_dim=4, gated=True, gemma_norm=True)
MASKS = {
    "sliding causal": (MaskRule(3, "query", True), MaskRule(None)),
    "sliding both ways": (MaskRule(4, "query"), MaskRule(20, "query")),
    "from the anchor, causal": (MaskRule(5, "anchor", True), MaskRule(0, "anchor")),
    "causal": (MaskRule(None, causal=True),) * 2,
}


@torch.no_grad()
@pytest.mark.parametrize("method", ["dmtp", "dflash", "mtp3"])
@pytest.mark.parametrize("rule", MASKS)
def test_every_state_of_the_loop_with_a_gated_mtp_and_masks_of_layers(method: str, rule: str) -> None:
    trio = tiny_checkpoint(7, window=None)
    mtp = MTP(MTPConfig(GATED))
    randomise(mtp, 1)
    trio.mtp = mtp.eval().requires_grad_(False)
    for name in ("dmtp", "dflash"):
        part = trio.drafters[name]
        part.config = dataclasses.replace(part.config, layer_masks=MASKS[rule])
    plain = [tokens for tokens, _ in decoded(trio, "autoregressive")]
    engine = Engine(trio, method, max_batch=len(PROMPTS), max_tokens=80, page_size=4, prefill_chunk=5)
    auditor = Auditor(engine, trio.fusions.get(method))
    done = engine.run(Request(prompt, 40, temperature=0.7, seed=i) for i, prompt in enumerate(PROMPTS))
    assert auditor.findings == [] and auditor.rounds > 10
    assert [completion.tokens for completion in done] == plain


def test_weights_are_the_asked_dtype(tmp_path: Path) -> None:
    places = export_trio(tmp_path, tiny_checkpoint(5), "dmtp", dtype=torch.bfloat16)
    read = read_trio(places.target, places.drafter, places.mtp, dtype=torch.bfloat16)
    assert {p.dtype for module in read.modules().values() for p in module.parameters()} == {torch.bfloat16}
