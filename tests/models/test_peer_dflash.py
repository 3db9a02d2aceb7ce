"""Our drafter against the DFlash authors' own model on the same checkpoint files: hidden states and greedy tokens."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels.models.formats import read_dflash, save_drafter
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.models.format_cases import TARGET
from tests.models.peer_cases import peer_block, save
from tests.models.public_cases import chunked, drafter_case, run_block, worst

peer: Any = pytest.importorskip("dflash.model", reason="the peer is not installed (make test-peer)")


@pytest.mark.parametrize("seed", range(64))
def test_hidden_and_tokens_of_a_block(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    case = drafter_case(draw)
    model = save(tmp_path, case, seed)
    ours = read_dflash(tmp_path).drafter
    config = ours.config
    assert list(config.target_layers) == list(model.target_layer_ids)
    assert (config.block_size, config.mask_token_id) == (model.block_size, model.mask_token_id)

    length = draw.choice([1, 2, 9, 30, 70])
    chunks = chunked(draw, length)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, config.context_size, generator=generator)
    table = torch.randn(case["vocab_size"], case["hidden_size"], generator=generator)
    ids = torch.full((draw.randint(2, model.block_size),), model.mask_token_id)
    ids[0] = draw.randrange(case["vocab_size"])

    theirs = peer_block(model, features, table[ids], chunks)
    found = run_block(ours, features, table[ids], chunks)
    assert worst(found, theirs) < 1e-4
    assert torch.equal((found @ table.T).argmax(-1), (theirs @ table.T).argmax(-1))


@pytest.mark.parametrize("method", ["dmtp", "low_rank", "control"])
def test_the_peer_loads_a_dmtp_checkpoint_as_plain_dflash(tmp_path: Path, method: str) -> None:
    trio = tiny_checkpoint(5, num_layers=4, target_layers=(1, 2))
    save_drafter(tmp_path, trio.drafters[method], trio.target.config, method=method, fusion=trio.fusions.get(method))
    model, report = peer.DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(key.startswith("dmtp_fusion.") for key in report["unexpected_keys"])
    assert bool(report["unexpected_keys"]) == (method in trio.fusions)
    generator = torch.Generator().manual_seed(0)
    features, embeds = torch.randn(40, 64, generator=generator), torch.randn(8, 32, generator=generator)
    ours = read_dflash(tmp_path).drafter
    assert worst(run_block(ours, features, embeds, [40]), peer_block(model.eval(), features, embeds, [25, 15])) < 1e-4


def test_our_sliding_checkpoints_are_the_peer_s(tmp_path: Path) -> None:
    for seed in range(20):
        first, second = tmp_path / f"peer{seed}", tmp_path / f"ours{seed}"
        case = drafter_case(random.Random(4000 + seed))
        save(first, case, seed)
        ours = read_dflash(first).drafter
        target = dataclasses.replace(TARGET, num_layers=case["num_target_layers"], vocab_size=case["vocab_size"])
        save_drafter(second, ours, target)
        model = peer.DFlashDraftModel.from_pretrained(second).eval()
        features = torch.randn(30, ours.config.context_size, generator=torch.Generator().manual_seed(seed))
        embeds = torch.randn(2, case["hidden_size"], generator=torch.Generator().manual_seed(seed))
        assert worst(run_block(ours, features, embeds, [30]), peer_block(model, features, embeds, [30])) < 1e-4


@pytest.mark.parametrize("seed", range(6))
def test_dflash2_tensors_are_the_peer_s(tmp_path: Path, seed: int) -> None:
    draw = random.Random(5000 + seed)
    case = drafter_case(draw)
    case["dflash_config"] |= {
        "conv_kernel_size": draw.choice([1, 2]), "conv_group_size": draw.choice([1, 4, 8]),
        "selector_rank": draw.choice([3, 8]), "selector_top_k": draw.choice([1, 16]),
    }  # fmt: skip
    model = save(tmp_path / "peer", case, seed, "DFlash2DraftModel")
    read = read_dflash(tmp_path / "peer")
    assert read.dflash2 is not None
    state = model.state_dict()
    known = {name.removesuffix(".weight"): tensor for name, tensor in state.items()}
    for name, tensor in read.dflash2.tensors.items():
        assert torch.equal(tensor, known[name.removesuffix(".weight")]), name
    assert len(state) == len(read.dflash2.tensors) + len(read.drafter.state_dict())
    target = dataclasses.replace(TARGET, num_layers=case["num_target_layers"], vocab_size=case["vocab_size"])
    save_drafter(tmp_path / "ours", read.drafter, target, dflash2=read.dflash2)
    again, report = peer.DFlash2DraftModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_a_wrong_window_is_seen(tmp_path: Path) -> None:
    # the comparison above can fail: the same weights under a window one longer
    case = drafter_case(random.Random(3)) | {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True,
        "sliding_window": 6, "is_causal": False,
    }  # fmt: skip
    case["dflash_config"] |= {"block_size": 8, "target_layer_ids": [1, 3]}
    case.pop("block_size", None)
    model = save(tmp_path, case, 3)
    features = torch.randn(30, 2 * case["hidden_size"], generator=torch.Generator().manual_seed(0))
    embeds = torch.randn(8, case["hidden_size"], generator=torch.Generator().manual_seed(1))
    theirs = peer_block(model, features, embeds, [30])
    assert worst(run_block(read_dflash(tmp_path).drafter, features, embeds, [30]), theirs) < 1e-4
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"sliding_window": 7}, {"is_causal": True}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert worst(run_block(read_dflash(tmp_path).drafter, features, embeds, [30]), theirs) > 1e-2
