"""Our DFlash2 against its authors' model on the same checkpoint files: hidden states, candidates and walked tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmtp_kernels.decode.heads import shortlist, walk
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.models.formats import read_dflash
from dmtp_kernels.models.formats.dflash2 import attach
from dmtp_kernels.ops.lm_head import pack_lm_head
from dmtp_kernels.ops.sample.filters import lowest_argmax
from tests.models.peer_cases import peer_block, save
from tests.models.public_cases import chunked, drafter_case, run_block, worst

pytest.importorskip("dflash.model", reason="the peer is not installed (make test-peer)")

CASES = 48


def dflash2_case(draw: random.Random) -> dict[str, Any]:
    """Keys of a DFlash2 configuration: any number of taps and candidates, with and without scaled or capped logits."""
    case = drafter_case(draw)
    extra: dict[str, Any] = {
        "conv_kernel_size": draw.choice([1, 2, 2, 3]),
        "conv_group_size": draw.choice([1, 4, 8]),
        "selector_rank": draw.choice([1, 5, 16]),
        "selector_top_k": draw.choice([1, 4, 16, 32]),
    }
    if draw.random() < 0.5:
        extra["output_multiplier"] = draw.choice([0.25, 3.0])
    if draw.random() < 0.5:
        extra["final_logit_softcapping"] = draw.choice([2.0, 30.0])
    section = case["dflash_config"]
    size = case.get("block_size", section.get("block_size"))
    extra["conv_kernel_size"] = min(extra["conv_kernel_size"], size)
    section |= extra
    return case


def ours_of(directory: Path) -> Drafter:
    read = read_dflash(directory)
    assert read.dflash2 is not None
    return attach(read.drafter, read.dflash2)


@torch.no_grad()
def our_walk(drafter: Drafter, head: nn.Linear, hidden: torch.Tensor, anchors: torch.Tensor) -> Any:
    """Tokens `[B, n]` and shortlists of slots `hidden[B, n, H]` after `anchors[B]`."""
    selector = drafter.candidate_selector
    ids, unary = shortlist(selector, pack_lm_head(head.weight.detach(), format="dense", capacity=64), hidden)
    tokens, _, _ = walk(
        anchors,
        hidden.shape[1],
        lambda slot, previous: selector.scores(unary[:, slot], hidden[:, slot], previous, ids[:, slot]),
        lambda scores, slot: (lowest_argmax(scores), None),
        ids,
    )
    return tokens, ids


@pytest.mark.parametrize("seed", range(CASES))
@torch.no_grad()
def test_hidden_states_and_path(tmp_path: Path, seed: int) -> None:
    draw = random.Random(1000 + seed)
    case = dflash2_case(draw)
    model = save(tmp_path, case, seed, "DFlash2DraftModel")
    ours = ours_of(tmp_path)
    length = draw.choice([1, 2, 9, 30, 70])
    chunks = chunked(draw, length)
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, ours.config.context_size, generator=generator)
    table = torch.randn(case["vocab_size"], case["hidden_size"], generator=generator)
    ids = torch.full((model.block_size,), model.mask_token_id)
    ids[0] = draw.randrange(case["vocab_size"])

    theirs = peer_block(model, features, table[ids], chunks)
    found = run_block(ours, features, table[ids], chunks)
    assert worst(found, theirs) < 1e-4

    head = nn.Linear(case["hidden_size"], case["vocab_size"], bias=False)
    head.weight.copy_(table)
    slots, anchors = theirs[None, 1:], ids[:1]
    tokens, candidates, _ = model.propose(slots, anchors, head, 0.0)
    walked, listed = our_walk(ours, head, slots, anchors)
    assert torch.equal(listed, candidates.sort(dim=-1).values)
    assert torch.equal(walked, tokens)
    # and from our own hidden states
    assert torch.equal(our_walk(ours, head, found[None, 1:], anchors)[0], tokens)


@torch.no_grad()
def test_what_it_draws_from_is_the_peers(tmp_path: Path) -> None:
    """The peer's distribution over its candidates at temperature 1, row by row along its own path."""
    case = dflash2_case(random.Random(5))
    case["dflash_config"] |= {"block_size": 8, "selector_top_k": 16}
    case.pop("block_size", None)
    model = save(tmp_path, case, 5, "DFlash2DraftModel")
    ours = ours_of(tmp_path)
    head = nn.Linear(case["hidden_size"], case["vocab_size"], bias=False)
    slots = torch.randn(3, 7, case["hidden_size"], generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([0, 3, 7])
    tokens, candidates, q = model.propose(slots, anchors, head, 1.0)
    ids, unary = shortlist(ours.candidate_selector, pack_lm_head(head.weight.detach(), format="dense"), slots)
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
    mine = ours.candidate_selector.scores(unary, slots, previous, ids).softmax(-1)
    dense = torch.zeros(3, 7, case["vocab_size"])
    torch.testing.assert_close(dense.scatter(2, ids, mine), dense.scatter(2, candidates, q), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("part", ["attention_conv.base_kernel", "mlp_conv.kernel_projection.weight"])
def test_a_convolution_left_out_is_seen(tmp_path: Path, part: str) -> None:
    case = dflash2_case(random.Random(3))
    case["dflash_config"] |= {"conv_kernel_size": 2}
    model = save(tmp_path, case, 3, "DFlash2DraftModel")
    ours = ours_of(tmp_path)
    features = torch.randn(30, ours.config.context_size, generator=torch.Generator().manual_seed(0))
    embeds = torch.randn(model.block_size, case["hidden_size"], generator=torch.Generator().manual_seed(1))
    theirs = peer_block(model, features, embeds, [30])
    assert worst(run_block(ours, features, embeds, [30]), theirs) < 1e-4
    with torch.no_grad():
        ours.get_parameter(f"layers.0.{part}").zero_()
    assert worst(run_block(ours, features, embeds, [30]), theirs) > 1e-3
