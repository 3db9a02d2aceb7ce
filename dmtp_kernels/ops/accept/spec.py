"""Inputs and traffic of the acceptance rules."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes


def _prefix_case(batch: int, rows: int, dtype: torch.dtype, num_stop: int, ragged: bool) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        candidates = torch.randint(0, 3, (batch, rows), generator=generator).to(dtype)
        target = torch.randint(0, 3, (batch, rows), generator=generator).to(dtype)
        stop_ids = torch.randint(0, 4, (batch, num_stop), generator=generator).to(dtype)
        budget = torch.randint(0, rows + 3, (batch,), generator=generator).to(dtype)
        count = torch.randint(-1, rows + 1, (batch,), generator=generator).to(dtype) if ragged else None
        return candidates, target, stop_ids, budget, count

    return make


PREFIX = Spec(
    op="accept_prefix",
    cases=(
        Case("round", "the DMTP round: seven candidates, int64 ids", _prefix_case(8, 8, torch.int64, 2, False)),
        Case("int32", "vLLM passes int32 ids", _prefix_case(5, 8, torch.int32, 1, False)),
        Case(
            "ragged",
            "rows with fewer candidates, finished rows, no stop ids",
            _prefix_case(33, 8, torch.int64, 0, True),
        ),
        Case("anchor_only", "autoregressive rows: nothing to accept", _prefix_case(3, 1, torch.int64, 1, False)),
        Case("empty", "no live request", _prefix_case(0, 8, torch.int64, 1, False)),
    ),
    floor_bytes=lambda candidates, target, stop_ids, budget, count: (
        nbytes(candidates, target, stop_ids, budget, count)
        + candidates.shape[0] * (4 + 4 + 8 + 4)
        + candidates.numel() * 8
    ),
    flops=lambda candidates, target, *_: candidates.numel(),
    exact=True,
)


def _sampled_case(
    batch: int,
    rows: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    dense: bool = True,
    listed: int = 0,
    ragged: bool = False,
    filters: bool = False,
) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        logits = 2 * torch.randn(batch, rows, vocab, generator=generator)
        draft = torch.softmax(logits[:, :-1] + torch.randn(batch, rows - 1, vocab, generator=generator), dim=2)
        draws = torch.multinomial(draft.reshape(-1, vocab), 1, generator=generator) if draft.numel() else draft.long()
        anchor = torch.randint(0, vocab, (batch, 1), generator=generator)
        candidates = torch.cat((anchor, draws.reshape(batch, rows - 1)), dim=1).to(index)
        temperature = torch.tensor([1.0, 0.0, 0.6])[torch.arange(batch) % 3]
        seed = torch.randint(-(2**31), 2**31, (batch,), generator=generator).to(index)
        position = torch.randint(0, 2**20, (batch,), generator=generator).to(index)
        stop_ids = torch.randint(0, vocab, (batch, 2), generator=generator).to(index)
        budget = torch.randint(1, rows + 3, (batch,), generator=generator).to(index)
        count = torch.randint(-1, rows + 1, (batch,), generator=generator).to(index) if ragged else None
        top_k = torch.randint(0, vocab, (batch,), generator=generator).to(index) if filters else None
        top_p = torch.rand(batch, generator=generator) * 1.2 if filters else None
        draft_probs = draft.to(dtype) if dense else None
        head = (candidates, logits.to(dtype), temperature, seed, position, stop_ids, budget)
        draft_ids = None
        if listed:
            kept = draft.topk(listed, dim=2).indices
            draft_ids = torch.where(kept % 7 == 3, -1, kept).to(index)
            draft_probs = draft.gather(2, kept).to(dtype)
        return (*head, draft_probs, count, top_k, top_p, draft_ids)

    return make


def _sampled_bytes(candidates: torch.Tensor, target_logits: torch.Tensor, *rest: torch.Tensor | None) -> int:
    batch, width = candidates.shape
    return nbytes(candidates, target_logits, *rest) + batch * (4 + 4 + 8 + 4 + 4) + batch * width * 8


def _sampled_flops(candidates: torch.Tensor, target_logits: torch.Tensor, *_: object) -> int:
    # softmax, residual and its draw (Philox: 40, two logarithms) per entry
    return target_logits.numel() * 4 + candidates.shape[0] * target_logits.shape[2] * 44


_SHARED = (
    Case("round", "the embedded model: seven candidates, greedy and sampled requests mixed", _sampled_case(6, 8, 260)),
    Case(
        "ragged",
        "fewer candidates, inert rows, filters, bf16, int32",
        _sampled_case(9, 8, 33, dtype=torch.bfloat16, index=torch.int32, ragged=True, filters=True),
    ),
    Case("anchor_only", "autoregressive rows: one draw each", _sampled_case(3, 1, 17)),
    Case("shortlist", "the draft drew from twelve ids, some of them padding", _sampled_case(7, 6, 65, listed=12)),
    Case("empty", "no live request", _sampled_case(0, 8, 17)),
)

REJECTION = Spec(
    op="accept_rejection",
    cases=(*_SHARED, Case("one_hot", "deterministic draft", _sampled_case(5, 8, 65, dense=False))),
    floor_bytes=_sampled_bytes,
    flops=_sampled_flops,
    exact=True,
)

BLOCK = Spec(
    op="accept_block",
    cases=_SHARED,
    floor_bytes=_sampled_bytes,
    flops=_sampled_flops,
    exact=True,
)

SPECS = (PREFIX, REJECTION, BLOCK)

_FULL, _CUT = 248_320, 16_384
_PART = 4 * 8  # bytes that a part of 2,048 entries of a row leaves, and 16 of its draft


def _rows_bytes(candidates: torch.Tensor, target_logits: torch.Tensor, *rest: torch.Tensor | None) -> int:
    parts = target_logits.shape[2] // 2048
    draft = rest[5]
    drafted = 0 if draft is None else nbytes(draft) + draft.shape[0] * draft.shape[1] * parts * 16
    requests = nbytes(rest[0], rest[4])
    return nbytes(target_logits) + drafted + requests + target_logits.shape[0] * target_logits.shape[1] * parts * _PART


def _sampled_traffic(op: str, dtype: torch.dtype, dense: bool) -> Traffic:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        made = list(_sampled_case(2, 8, _CUT, dtype=dtype, dense=dense)(generator))
        made[2], made[6] = torch.ones(2), torch.full((2,), 9)  # sampled, with a budget
        return tuple(made)

    case = Case(f"b2_{'dense' if dense else 'one_hot'}", f"a vocabulary of {_FULL} cut to {_CUT}", inputs)
    # how many rows the other launches read is for the draws to say
    names = ("decide", "race", "finish", *(("surplus",) if op == "accept_block" else ()))
    others = dict.fromkeys(f"accept_{name}_kernel" for name in names)
    return Traffic(op, case, {"accept_rows_kernel": _rows_bytes, **others}, scale=_FULL / _CUT)


TRAFFIC = (
    _sampled_traffic("accept_rejection", torch.float32, True),
    _sampled_traffic("accept_rejection", torch.bfloat16, False),
    _sampled_traffic("accept_block", torch.bfloat16, True),
)
