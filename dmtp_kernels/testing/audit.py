"""Recompute a round's whole state from the committed tokens, without caches, and list what differs.

Lossless output proves nothing about the draft side: a drafter fed garbage only lowers acceptance. After a round,
every cached row, the pending row, the predictor hidden, the positions, the block's embeddings and the drafter's
output must equal what the dense models give on the committed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.decode.caches import PagedCache
from dmtp_kernels.decode.dense import causal_mask, dense_attend
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.round import Draft, RoundResult
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.models.config import MaskRule
from dmtp_kernels.models.fusion import FusionModule
from dmtp_kernels.models.layers import Attend

TOLERANCE = 2e-4
"""Largest difference, relative to the largest expected magnitude, that fp32 summation order explains."""


class Auditor:
    """Audits every round of an engine: the draft before it is judged, every row's state after it.

    `findings` collects `"request 3, round 5: ..."`; empty means all of it equalled the truth.
    """

    def __init__(self, engine: Engine, fusion: FusionModule | None) -> None:
        """`fusion` is the trainable form of the method's fusion weights, None where it has none."""
        self.engine, self.fusion = engine, fusion
        self.findings: list[str] = []
        self.rounds = 0
        self._tokens: dict[object, list[int]] = {}
        self._inner = engine.round_function
        engine.round_function = self._audited

    def _audited(self, stack: Stack, state: BatchState) -> RoundResult:
        engine = self.engine
        committed = []
        for seat in engine.seats:
            completion = engine.completions[seat.request_id]
            start = [*completion.request.prompt, *completion.tokens]
            committed.append(self._tokens.setdefault(seat, start))
        if self.rounds == 0:
            for row, tokens in enumerate(committed):
                self._note(row, audit_state(engine, row, tokens))
        live = (state.budget > 0).tolist()
        result = self._inner(stack, state)
        self.rounds += 1
        for row, tokens in enumerate(committed):
            if not live[row]:
                continue  # an inert row drafts for nobody
            self._note(row, audit_draft(engine, row, tokens, result.draft, self.fusion))
            tokens += [t for t in result.accepted.out_tokens[row].tolist() if t >= 0]
            self._note(row, audit_state(engine, row, tokens))
        return result

    def _note(self, row: int, found: list[str]) -> None:
        request = self.engine.live[row]
        self.findings += [f"request {request}, round {self.rounds}: {finding}" for finding in found]


@dataclass(frozen=True)
class Truth:
    """What the models say about one request whose committed tokens are x_0..x_a, the last one being the anchor.

    Row p of every stream belongs to position p, p < a.
    """

    tokens: torch.Tensor  # [a + 1]
    target_k: list[torch.Tensor]  # per layer [a, Hkv, D]
    target_v: list[torch.Tensor]
    mtp_k: list[torch.Tensor]
    mtp_v: list[torch.Tensor]
    mtp_hidden: torch.Tensor | None  # [a, H]
    context_k: list[torch.Tensor]
    context_v: list[torch.Tensor]

    @property
    def length(self) -> int:
        """a"""
        return self.tokens.shape[0] - 1


def _capturing(mask: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> Attend:
    inner = dense_attend(mask)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys.append(k)
        values.append(v)
        return inner(layer, q, k, v)

    return attend


@torch.no_grad()
def recompute(engine: Engine, tokens: list[int]) -> Truth:
    """The truth about a request with committed `tokens` x_0..x_a."""
    stack = engine.stack
    ids = torch.tensor(tokens)
    length = len(tokens) - 1
    positions, mask = torch.arange(length), causal_mask(length)
    truth = Truth(ids, [], [], [], [], None, [], [])
    layers = stack.drafter.config.target_layers if stack.drafter is not None else ()
    output = stack.target(ids[:-1], positions, _capturing(mask, truth.target_k, truth.target_v), layers)
    hidden = None
    if stack.mtp is not None:
        embeds = stack.target.embed_tokens(ids[1:])
        hidden = stack.mtp(embeds, output.hidden, positions, _capturing(mask, truth.mtp_k, truth.mtp_v))
    if stack.drafter is not None:
        config = stack.drafter.config
        streams = [output.features] if config.use_target_features else []
        if config.use_mtp_features:
            assert hidden is not None
            streams.append(hidden)
        for k, v in stack.drafter.context_keys_values(torch.cat(streams, dim=-1), positions):
            truth.context_k.append(k)
            truth.context_v.append(v)
    return Truth(
        ids, truth.target_k, truth.target_v, truth.mtp_k, truth.mtp_v, hidden, truth.context_k, truth.context_v
    )


def audit_state(engine: Engine, row: int, tokens: list[int]) -> list[str]:
    """Names of the cached states of `row` that differ from the truth about its committed `tokens`."""
    truth, state, stack = recompute(engine, tokens), engine.state, engine.stack
    findings = []
    if int(state.length[row]) != truth.length:
        findings.append(f"length is {int(state.length[row])}, must be {truth.length}")
    if int(state.anchor[row]) != tokens[-1]:
        findings.append(f"anchor is {int(state.anchor[row])}, must be {tokens[-1]}")
    caches = [("target", stack.target_cache, state.target_table, truth.target_k, truth.target_v, truth.length)]
    if stack.drafter_cache is not None:
        caches.append(
            ("context", stack.drafter_cache, state.drafter_table, truth.context_k, truth.context_v, truth.length)
        )
    if stack.mtp_cache is not None:
        caches.append(("mtp history", stack.mtp_cache, state.mtp_table, truth.mtp_k, truth.mtp_v, truth.length - 1))
    for name, cache, table, keys, values, length in caches:
        slots = row_slots(cache, table[row], length)
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            findings += _differs(f"{name} k, layer {layer}", cache.flat_k[layer][slots], k[:length])
            findings += _differs(f"{name} v, layer {layer}", cache.flat_v[layer][slots], v[:length])
    if stack.mtp_cache is not None and truth.mtp_hidden is not None:
        pending = state.tail_slots[row, 0]
        for layer, (k, v) in enumerate(zip(truth.mtp_k, truth.mtp_v, strict=True)):
            findings += _differs(f"pending k, layer {layer}", stack.mtp_cache.flat_k[layer][pending], k[-1])
            findings += _differs(f"pending v, layer {layer}", stack.mtp_cache.flat_v[layer][pending], v[-1])
        findings += _differs("h_mtp", state.h_mtp[row], truth.mtp_hidden[-1])
    return findings


@torch.no_grad()
def audit_draft(engine: Engine, row: int, tokens: list[int], draft: Draft, fusion: FusionModule | None) -> list[str]:
    """What differs in the draft of `row` from the truth about the `tokens` committed before it was made.

    `fusion` is the trainable form of the method's fusion weights: the block is rebuilt with it, not with the op.
    """
    stack, method = engine.stack, engine.method
    truth = recompute(engine, tokens)
    length, anchor = truth.length, tokens[-1]
    candidates = draft.candidates[row].tolist()
    findings = [] if candidates[0] == anchor else [f"candidates start with {candidates[0]}, must be {anchor}"]
    if stack.mtp is not None and method.first == "mtp" and truth.mtp_hidden is not None:
        t1 = _argmax(stack.target.logits(truth.mtp_hidden[-1]))
        if candidates[1] != t1:
            findings.append(f"T1 is {candidates[1]}, must be {t1}")
    if method.chain:
        findings += _audit_chain(engine, truth, candidates)
    if draft.block_hidden is None:
        return findings
    assert stack.drafter is not None and draft.block_positions is not None and draft.block_embeds is not None
    mask_id, embed = stack.drafter.config.mask_token_id, stack.target.embed_tokens.weight
    known = {"drafter": [anchor]}.get(method.first, [anchor, candidates[1]] if method.anchors == 2 else candidates[1:2])
    ids = known + [mask_id] * (method.num_slots - len(known))
    first = length if known[0] == anchor and method.block_has_anchor else length + 1
    positions = torch.arange(first, first + len(ids))
    embeds = embed[torch.tensor(ids)].clone()
    if fusion is not None and truth.mtp_hidden is not None:
        slot = len(known) - 1
        fused = fusion(embeds[slot], truth.mtp_hidden[-1])
        if fusion.mode == "replace":
            embeds[slot] = fused
        elif fusion.mode == "mask_residual":
            embeds[slot + 1 :] += fused
        else:
            embeds[slot] += fused
    assert draft.block_ids is not None
    if draft.block_ids[row].tolist() != ids:
        findings.append(f"block ids are {draft.block_ids[row].tolist()}, must be {ids}")
    if draft.block_positions[row].tolist() != positions.tolist():
        findings.append(f"block positions start at {int(draft.block_positions[row, 0])}, must start at {first}")
    findings += _differs("block embeddings", draft.block_embeds[row], embeds)
    hidden = _dense_draft(engine, truth, embeds, positions)
    findings += _differs("block hidden", draft.block_hidden[row], hidden)
    return findings


def _dense_draft(engine: Engine, truth: Truth, embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Drafter over one block, each layer under its own rule."""
    drafter = engine.stack.drafter
    assert drafter is not None
    config = drafter.config

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = torch.cat([truth.context_k[layer], k]), torch.cat([truth.context_v[layer], v])
        return dense_attend(block_mask(config.mask(layer), truth.length, q.shape[0]))(layer, q, k, v)

    return drafter(embeds, positions, attend)


def block_mask(rule: MaskRule, length: int, slots: int) -> torch.Tensor:
    """`[slots, length + slots]`, True where a slot sees a row: `length` context rows, then the block's."""
    row = torch.arange(length + slots)
    slot = length + torch.arange(slots)[:, None]
    seen = torch.ones(slots, length + slots, dtype=torch.bool)
    if rule.causal:
        seen &= row <= slot
    if rule.window is not None and rule.window_ref == "anchor":
        seen &= row >= length - rule.window
    elif rule.window is not None:
        seen &= (slot - row).abs() < rule.window if not rule.causal else slot - row < rule.window
    return seen


def _audit_chain(engine: Engine, truth: Truth, candidates: list[int]) -> list[str]:
    """The chain's candidates, each from a dense MTP pass over all rows before it."""
    stack = engine.stack
    assert stack.mtp is not None and truth.mtp_hidden is not None
    target = stack.target(truth.tokens[:-1], torch.arange(truth.length), dense_attend(causal_mask(truth.length)), ())
    tokens, hidden = truth.tokens[1:], target.hidden
    out = truth.mtp_hidden
    for step in range(engine.method.chain):
        expected = _argmax(stack.target.logits(out[-1]))
        if candidates[step + 1] != expected:
            return [f"chain candidate {step + 1} is {candidates[step + 1]}, must be {expected}"]
        tokens = torch.cat([tokens, torch.tensor([expected])])
        hidden = torch.cat([hidden, out[-1:]])
        rows = tokens.shape[0]
        embeds = stack.target.embed_tokens(tokens)
        out = stack.mtp(embeds, hidden, torch.arange(rows), dense_attend(causal_mask(rows)))
    return []


def row_slots(cache: PagedCache, table: torch.Tensor, length: int) -> torch.Tensor:
    """Slots of rows 0..length-1 through one request's page table."""
    size = cache.page_size
    slots = [int(table[p // size]) * size + p % size for p in range(length)]
    return torch.tensor(slots, dtype=torch.int64)


def _argmax(logits: torch.Tensor) -> int:
    return int((logits == logits.max()).nonzero()[0])


def _differs(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    if want.numel() == 0:
        return []
    scale = float(want.abs().max().clamp(min=1e-3))
    error = float((got - want).abs().nan_to_num(nan=float("inf")).max())
    return [] if error <= TOLERANCE * scale else [f"{name} differs by {error:.3g} (largest value {scale:.3g})"]
