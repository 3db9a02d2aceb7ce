"""Heads that walk: which tokens they draft, what they say they drew from, what they leave to be judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS, SHIPPED
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.work import Work
from dmtp_kernels.models.drafter import Drafter
from tests.decode.engine_cases import CHECKPOINT, REQUESTS, engine_of, run

WALKS = [name for name in METHODS if name not in SHIPPED]
GREEDY = [replace(r, temperature=0.0) for r in REQUESTS]


def proposed(method: str, requests: list[Request], **options: Any) -> tuple[rounds.Draft, Work]:
    """The draft of a later round, and what its stages left."""
    engine = engine_of(method, **options)
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    view = engine.state.rows(0, len(requests))
    return rounds.propose(engine.stack, view), view.work


def selected(drafter: Drafter, hidden: torch.Tensor, known: list[int]) -> torch.Tensor:
    """Scores of every id, -inf outside the slot's candidates, by the formula."""
    selector, config = drafter.candidate_selector, drafter.candidate_selector.config
    logits = CHECKPOINT.target.logits(hidden) * config.output_multiplier
    if config.softcap is not None:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    scores = torch.full_like(logits, -torch.inf)
    for token in logits.topk(config.top_k).indices.tolist():
        pair = selector.predecessor_codebook[known[-1]] * selector.successor_codebook[token]
        scores[token] = logits[token] + pair @ (selector.hidden_projection.weight @ hidden)
    return scores


def biased(drafter: Drafter, hidden: torch.Tensor, known: list[int]) -> torch.Tensor:
    head = drafter.markov_head
    return CHECKPOINT.target.logits(hidden) + (head.markov_w2.weight @ head.markov_w1.weight[known[-1]])[:19]


def corrected(drafter: Drafter, hidden: torch.Tensor, known: list[int]) -> torch.Tensor:
    """By torch's own GRU over the whole prefix."""
    head, logits = drafter.logit_head, CHECKPOINT.target.logits(hidden)
    if len(known) == 1:
        return logits
    gru = torch.nn.GRU(hidden.shape[0], head.config.state_size, bias=False, batch_first=True)
    gru.load_state_dict(head.prefix_gru.state_dict())
    state = gru(CHECKPOINT.target.embed_tokens.weight[known][None])[0][0, -1]
    down, up = (head.get_parameter(f"embed_proj.{i}.weight") for i in (0, 2))
    return logits + (up @ torch.nn.functional.silu(down @ torch.cat([hidden, state])))[:19]


FORMULAS = {"selector": selected, "markov": biased, "recurrent": corrected}


@torch.no_grad()
@pytest.mark.parametrize("method", WALKS)
def test_tokens_follow_the_formula(method: str) -> None:
    """From the block's hidden states, one request and one slot at a time: T1 is the first token's predecessor where MTP
    proposes it, and slots that predict the next token start at the last known one."""
    draft, _ = proposed(method, GREEDY)
    chosen, drafter = METHODS[method], CHECKPOINT.drafters[method]
    formula = FORMULAS[drafter.config.heads[0]]
    assert draft.block_hidden is not None and draft.block_hidden.shape[1] == chosen.num_slots
    for row in range(len(GREEDY)):
        known = draft.candidates[row, : 8 - chosen.num_drafted].tolist()
        assert len(known) == (2 if chosen.first == "mtp" else 1)
        for slot in draft.block_hidden[row, chosen.num_known - chosen.shift :][: chosen.num_drafted]:
            known.append(int(formula(drafter, slot, known).argmax()))
        assert draft.candidates[row].tolist() == known


@torch.no_grad()
@pytest.mark.parametrize("method", WALKS)
def test_what_sampled_drafts_were_drawn_from(method: str) -> None:
    """The distributions left for the acceptance are the formula's, along the tokens that were drawn."""
    draft, work = proposed(method, [replace(r, temperature=0.8, top_k=5) for r in REQUESTS], verification="rejection")
    chosen, drafter = METHODS[method], CHECKPOINT.drafters[method]
    formula = FORMULAS[drafter.config.heads[0]]
    weights = torch.cat(work.probabilities, dim=1)
    if chosen.parts[-1] == "selector" and chosen.first == "drafter":
        assert work.draft_ids is not None and weights.shape == work.draft_ids.shape == (4, 7, 16)
        weights = torch.zeros(4, 7, 19).scatter(2, work.draft_ids, weights)
    assert weights.shape == (4, 7, 19)
    assert draft.block_hidden is not None
    for row in range(4):
        for slot, hidden in enumerate(draft.block_hidden[row, chosen.predicting], 7 - chosen.num_drafted):
            known = draft.candidates[row, : slot + 1].tolist()
            scores = formula(drafter, hidden, known)
            kept = scores >= scores.topk(5).values[-1]
            want = (scores / 0.8).masked_fill(~kept, -torch.inf).softmax(0)
            torch.testing.assert_close(weights[row, slot] / weights[row, slot].sum(), want, rtol=1e-3, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", ["dspark", "dmtp_dspark"])
def test_confidence_cuts_what_is_judged(method: str) -> None:
    """With the heads' bias at both ends: nothing of the drafter's is judged, or all; the tokens stay the same."""
    head = CHECKPOINT.drafters[method].confidence_head
    kept = head.proj.bias.clone()
    found = {}
    try:
        for bias in (-50.0, 0.0, 50.0):
            head.proj.bias.fill_(bias)
            found[bias] = run(GREEDY, method)
    finally:
        head.proj.bias.copy_(kept)
    plain = [c.tokens for c in run(GREEDY, "autoregressive")]
    assert all([c.tokens for c in completions] == plain for completions in found.values())
    first = 1 if method == "dmtp_dspark" else 0
    accepted = {bias: [n for c in some for n, count in enumerate(c.histogram) if count] for bias, some in found.items()}
    assert max(accepted[-50.0]) <= first < max(accepted[50.0])


@torch.no_grad()
def test_the_cut_is_the_product_of_chances() -> None:
    draft, work = proposed("dmtp_dspark", GREEDY)
    drafter = CHECKPOINT.drafters["dmtp_dspark"]
    assert draft.block_hidden is not None and drafter.config.markov is not None and work.num_candidates is not None
    limits = []
    for row in range(4):
        reached, count = 1.0, 1
        for slot, hidden in enumerate(draft.block_hidden[row, 1:]):
            before = drafter.markov_head.markov_w1.weight[draft.candidates[row, 1 + slot]]
            proj = drafter.confidence_head.proj
            reached *= float((proj.weight[0] @ torch.cat([hidden, before]) + proj.bias[0]).sigmoid())
            if reached < drafter.config.markov.cut:
                break
            count += 1
        limits.append(count)
    assert work.num_candidates.tolist() == limits
    assert len(set(limits)) > 1, "the case must tell rows apart"


@torch.no_grad()
def test_a_drafter_without_the_methods_parts_is_refused() -> None:
    broken = replace(CHECKPOINT, drafters={**CHECKPOINT.drafters, "dflash2": CHECKPOINT.drafters["dflash"]})
    with pytest.raises(ValueError, match="has the parts none, method 'dflash2' needs conv, selector"):
        Engine(broken, "dflash2", max_tokens=64)
    broken = replace(CHECKPOINT, drafters={**CHECKPOINT.drafters, "dspark": CHECKPOINT.drafters["domino"]})
    with pytest.raises(ValueError, match="has blocks of 8 slots, method 'dspark' needs 7"):
        Engine(broken, "dspark", max_tokens=64)


@torch.no_grad()
def test_nan_in_a_block_costs_candidates_not_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [c.tokens for c in run(GREEDY, "autoregressive")]
    original = rounds.run_drafter

    def spoiled(*args: Any) -> torch.Tensor:
        hidden = original(*args)
        hidden[:, 3] = torch.nan
        return hidden

    monkeypatch.setattr(rounds, "run_drafter", spoiled)
    for method in WALKS:
        for verification in ("target", "block"):
            assert [c.tokens for c in run(GREEDY, method, verification=verification)] == plain
