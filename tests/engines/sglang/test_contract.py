"""Whole rounds on tensors as SGLang keeps them: slots by `req_to_token`, padded rows, no pending slot."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dmtp_kernels.decode.dense import causal_mask, dense_attend, target_forward
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.stack import op_fusion
from dmtp_kernels.engines.sglang import register, tensors
from dmtp_kernels.engines.sglang.draft import MTPDraft
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.ops.block_attention import block_attention
from dmtp_kernels.ops.draft_pages import DraftPages, draft_page_table_from_slots
from dmtp_kernels.training.data import held_out_prompts

BLOCK, MAX_LEN, NEW = 8, 256, 40


@dataclass
class Pool:
    """Keys and values `[L, size + page_size, Hkv, D]` of one model, garbage in slots that nobody wrote."""

    k: torch.Tensor
    v: torch.Tensor
    page_size: int
    rows_k: list[torch.Tensor] = field(default_factory=list)
    rows_v: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def create(cls, config: Any, num_slots: int, page_size: int) -> Pool:
        shape = (config.num_layers, num_slots, config.layer.num_kv_heads, config.layer.head_dim)
        k, v = torch.full((2, *shape), float("nan"))
        k[:, :page_size] = v[:, :page_size] = 0  # the dummy page
        return cls(k, v, page_size)

    def attend(self, pages: DraftPages, causal: bool) -> Any:
        self.rows_k, self.rows_v = [], []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.rows_k.append(k)
            self.rows_v.append(v)
            cache_k, cache_v = (c[layer].unflatten(0, (-1, self.page_size)) for c in (self.k, self.v))
            table, length, skip = pages
            return block_attention(
                q, cache_k, cache_v, table, length, block_k=k, block_v=v, block_causal=causal, valid_from=skip
            )[0]

        return attend

    def commit(
        self, rows_k: list[torch.Tensor], rows_v: list[torch.Tensor], slots: torch.Tensor, n: torch.Tensor
    ) -> None:
        assert not tensors.commit(rows_k, rows_v, list(self.k), list(self.v), slots, n).any()


class Rounds:
    """The DMTP round of a worker, on one batch."""

    def __init__(self, trio: Checkpoint, page_size: int, requests: int) -> None:
        self.trio, self.drafter = trio, trio.drafters["dmtp"]
        pages = MAX_LEN // page_size
        order = 1 + torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1))
        table = order.view(requests, pages, 1) * page_size + torch.arange(page_size)
        # row 0 and slot 0 are the dummies
        self.table = torch.cat([torch.zeros(1, MAX_LEN), table.flatten(1)]).int()
        slots = page_size * (1 + requests * pages)
        self.target = Pool.create(trio.target.config, slots, page_size)
        self.context = Pool.create(self.drafter.config, slots, page_size)
        weight, config = trio.target.embed_tokens.weight, trio.target.config
        assert trio.mtp is not None
        self.head = tensors.head_of(trio.target.lm_head.weight, num_org=config.num_valid)
        self.draft = MTPDraft(
            trio.mtp,
            self.head,
            weight,
            op_fusion(trio.fusions["dmtp"]),
            num_slots=slots,
            page_size=page_size,
            max_reqs=requests + 1,
            block_size=BLOCK,
            mask_token_id=self.drafter.config.mask_token_id,
        )

    def verify(self, ids: torch.Tensor, lens: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target over `ids[bs, R]`: its tokens and features; rows stay out of the cache."""
        pages = draft_page_table_from_slots(
            self.table, lens, window=MAX_LEN, page_size=self.target.page_size, req_pool_indices=pool
        )
        self.positions = lens[:, None] + torch.arange(ids.shape[1])
        out = self.trio.target(
            ids, self.positions, self.target.attend(pages, causal=True), self.drafter.config.target_layers
        )
        self.hidden = out.hidden
        return tensors.select(out.hidden.flatten(0, 1), self.head).view(ids.shape), out.features

    def commit(
        self, tokens: torch.Tensor, features: torch.Tensor, lens: torch.Tensor, n: torch.Tensor, pool: torch.Tensor
    ) -> None:
        slots = tensors.slots_of(self.table, pool, self.positions, n)
        self.target.commit(self.target.rows_k, self.target.rows_v, slots, n)
        context = self.drafter.context_keys_values(features, self.positions)
        self.context.commit([k for k, _ in context], [v for _, v in context], slots, n)
        self.draft.advance(tokens, self.hidden, lens, n, pool, self.table)

    def prefill(self, prompt: list[int], pool: int) -> int:
        ids, row, zero = torch.tensor([prompt]), torch.tensor([pool]), torch.tensor([0])
        tokens, features = self.verify(ids, zero, row)
        following = torch.cat([ids[:, 1:], tokens[:, -1:]], dim=1)
        self.commit(following, features, zero, torch.tensor([len(prompt)]), row)
        return int(tokens[0, -1])

    def propose(self, bonus: torch.Tensor, lens: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """Candidates `[bs, 8]`: A, T1, and the drafter's."""
        ids, positions, _, embeds = self.draft.block(bonus, lens, pool, self.table)
        config = self.drafter.config
        assert config.window is not None
        pages = tensors.window_table(
            self.table, pool, lens, window=config.window, page_size=self.context.page_size, block_size=0
        )
        hidden = self.drafter(embeds.view(*ids.shape, -1), positions, self.context.attend(pages, causal=False))
        drafted = tensors.select(hidden[:, 2:].flatten(0, 1), self.head).view(len(ids), -1)
        return torch.cat([ids[:, :2], drafted], dim=1)


def last_mtp_state(trio: Checkpoint, ids: list[int]) -> torch.Tensor:
    """What MTP says after a whole text, without caches."""
    hidden = target_forward(trio, torch.tensor(ids[:-1])).hidden
    assert trio.mtp is not None
    embeds, positions = trio.target.embed_tokens(torch.tensor(ids[1:])), torch.arange(len(hidden))
    state: torch.Tensor = trio.mtp(embeds, hidden, positions, dense_attend(causal_mask(len(hidden))))[-1]
    return state


@pytest.mark.parametrize("page_size", [1, 16])
def test_rounds_equal_the_loop(page_size: int) -> None:
    trio = load_checkpoint(drafters=["dmtp"])
    # longer than the window of 128, shorter than a block, in between
    whole = "".join(prompt["text"] for prompt in held_out_prompts()).encode()
    texts = [list(whole[start : start + count]) for start, count in ((0, 140), (200, 3), (300, 40))]
    engine = Engine(trio, "dmtp", max_batch=3, max_tokens=MAX_LEN - BLOCK)
    wanted = engine.run([Request(tuple(text), NEW) for text in texts])
    rounds = Rounds(trio, page_size, len(texts))
    tokens = [[rounds.prefill(text, 1 + i)] for i, text in enumerate(texts)]
    histograms = [[0] * BLOCK for _ in texts]
    # a graph of four rows: the last is padding, length 1 over the dummy row
    pool, lens = torch.tensor([1, 2, 3, 0]), torch.tensor([*map(len, texts), 1])
    bonus, budget = torch.tensor([*(row[0] for row in tokens), 0]), torch.tensor([*[NEW - 1] * 3, 0])
    while budget.any():
        candidates = rounds.propose(bonus, lens, pool)
        target, features = rounds.verify(candidates, lens, pool)
        accepted, commits, last, out, new_lens = tensors.accept(candidates, target, lens, budget=budget)
        rounds.commit(out, features, lens, commits, pool)
        for i in range(3):
            if commits[i]:
                tokens[i] += out[i, : int(commits[i])].tolist()
                histograms[i][int(accepted[i])] += 1
        assert torch.equal(new_lens, lens + commits)
        lens, budget = new_lens, budget - commits
        bonus = torch.where(commits > 0, last, bonus)
    assert tokens == [row.tokens for row in wanted]
    assert histograms == [row.histogram for row in wanted]
    assert sum(k * n for row in histograms for k, n in enumerate(row)) > NEW
    for i, text in enumerate(texts):
        assert torch.allclose(rounds.draft.hidden[1 + i], last_mtp_state(trio, text + tokens[i]), atol=1e-4)
    # what padded rows computed went nowhere
    assert not rounds.target.k[:, 0].any() and not rounds.draft.k[:, 0].any() and not rounds.draft.hidden[0].any()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMTP_SGLANG_OPS", raising=False)
    register()
    monkeypatch.setenv("DMTP_SGLANG_OPS", "commit_kv")
    with pytest.raises(RuntimeError, match="SGLang is not installed, the hooks are for"):
        register()
