"""The whole greedy loop against the DFlash authors' generation on the same directories: tokens and accepted lengths."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.models.checkpoint import load_checkpoint
from dmtp_kernels.models.formats import Exported, export_trio, read_trio
from dmtp_kernels.testing.models import tiny_checkpoint
from dmtp_kernels.training.data import held_out_prompts

peer: Any = pytest.importorskip("dflash.model", reason="the peer is not installed (make test-peer)")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed (make test-peer)")

NEW = 48


# as trained, and under every other rule that a checkpoint can ask for
MASKS: list[dict[str, Any]] = [
    {},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24, "is_causal": False},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": None},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 40, "is_causal": False},
    {"is_causal": True},
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The embedded target and DFlash drafter as directories. The drafter's window is longer than the texts here."""
    trio = load_checkpoint(drafters=["dflash"])
    drafter = trio.drafters["dflash"]
    assert drafter.config.target_layers == (1, 2, 3)
    drafter.config = dataclasses.replace(drafter.config, window=None, target_layers=(1, 2))
    # transformers lists the last layer's state after the final norm only
    drafter.fc.weight = nn.Parameter(drafter.fc.weight[:, : 2 * drafter.config.layer.hidden_size])
    return export_trio(tmp_path_factory.mktemp("trio"), dataclasses.replace(trio, mtp=None), "dflash")


@pytest.mark.parametrize("number", range(len(MASKS)))
def test_greedy_tokens_and_accepted_lengths(places: Exported, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((places.drafter / "config.json").read_text())
    plain = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "is_causal": False}
    rule = plain | MASKS[number] | {"use_sliding_window": "sliding_window" in MASKS[number]}
    (places.drafter / "config.json").write_text(json.dumps(config | rule))
    prompt = list(held_out_prompts()[number]["text"].encode()[:50])
    monkeypatch.setattr(peer, "_cuda_time", time.perf_counter)
    assert compare(places, "dflash", peer.DFlashDraftModel, prompt) >= 5


def test_a_block_shorter_than_trained(places: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(places.drafter, tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    for section in (config, config["dflash_config"]):
        section["block_size"] = 16
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    longer = Exported(places.target, None, tmp_path / "drafter")
    monkeypatch.setattr(peer, "_cuda_time", time.perf_counter)
    prompt = list(held_out_prompts()[7]["text"].encode()[:50])
    with pytest.raises(ValueError, match="has blocks of 16 slots"):
        compare(longer, "dflash", peer.DFlashDraftModel, prompt)
    assert compare(longer, "dflash", peer.DFlashDraftModel, prompt, block_size=8) >= 5


# random models whose candidates are accepted now and then
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_greedy_dflash2(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trio = tiny_checkpoint(seed, num_layers=4, target_layers=(0, 2), window=None, vocab_size=8, num_valid=8)
    places = export_trio(tmp_path, dataclasses.replace(trio, mtp=None), "dflash2")
    monkeypatch.setattr(peer, "_cuda_time", time.perf_counter)
    assert compare(places, "dflash2", peer.DFlash2DraftModel, [1, 2, 3]) >= 5


def compare(places: Exported, method: str, kind: Any, prompt: list[int], block_size: int | None = None) -> int:
    """Both generate from the same directories; returns how many candidates were accepted."""
    theirs = peer.dflash_generate(
        kind.from_pretrained(places.drafter).eval(),
        transformers.Qwen3ForCausalLM.from_pretrained(places.target).eval(),
        torch.tensor([prompt]),
        max_new_tokens=NEW,
        stop_token_ids=None,
        block_size=block_size,
        return_stats=True,
    )
    trio = read_trio(places.target, places.drafter, block_size=block_size)
    engine = Engine(trio, method, max_batch=1, max_tokens=128, page_size=4)
    (ours,) = engine.run([Request(tuple(prompt), NEW)])
    assert ours.tokens == theirs.output_ids[0, len(prompt) :].tolist()
    # a round of theirs counts its accepted tokens and one more; the last is cut by the budget
    lengths = [0] * 8
    for length in theirs.acceptance_lengths[:-1]:
        lengths[length - 1] += 1
    rest = [mine - their for mine, their in zip(ours.histogram, lengths, strict=True)]
    assert sum(rest) == 1 and min(rest) == 0
    return sum(k * count for k, count in enumerate(ours.histogram))
