"""Drafts over a shortlist: the decisions of the dense rows that say the same."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops.accept import BAD_DRAFT
from tests.ops.accept_cases import INF, MANY, NAN, RULES, Rule, call, certain, random_round

KERNEL_OPS = ("accept_rejection", "accept_block")
EVERY_CAPABILITY = True


def _listed(q: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest entries of q as ids and probabilities, and the dense rows that say the same."""
    probs, ids = q.topk(count, dim=2)
    return ids, probs, torch.zeros_like(q).scatter(2, ids, probs)


@MANY
@RULES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shortlist_decides_as_its_dense_rows_do(rule: Rule, dtype: torch.dtype) -> None:
    candidates, logits, q = random_round(200, vocab=70)
    ids, probs, dense = _listed(q.to(dtype), 9)
    inside = (candidates[:, 1:, None] == ids).any(dim=2)
    assert inside.any() and not inside.all()
    want = call(rule, candidates, logits, draft_probs=dense)
    assert want.accept_len.unique().numel() > 2
    # any order, padding anywhere with any probability, an id split over two entries
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    padded = torch.cat((ids[:, :, order], ids[:, :, :2], torch.full_like(ids[:, :, :2], -1)), dim=2)
    spread = torch.cat((probs[:, :, order], probs[:, :, :2] / 2, probs[:, :, :2] * NAN), dim=2)
    spread[:, :, :9] = (
        torch.where((ids[:, :, None, order] == ids[:, :, :2, None]).any(dim=2), 0.5, 1.0) * spread[:, :, :9]
    )
    for listed, values in ((ids, probs), (padded, spread), (padded.int(), spread)):
        got = call(rule, candidates, logits, draft_probs=values, draft_ids=listed)
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b)


@RULES
def test_a_shortlist_that_is_no_distribution_cuts_the_draft(rule: Rule) -> None:
    tokens = [5, 6, 7, 8]
    ids = torch.tensor([[[5, 1], [6, 1], [7, 1]]])
    probs = torch.tensor([[[1.0, 0.0]] * 3])
    assert call(rule, [[0, 5, 6, 7]], certain(tokens), draft_probs=probs, draft_ids=ids).accept_len.item() == 3
    for change_ids, change_probs in (((1, 12), 1.0), ((-1, -1), 1.0), ((6, 1), -1.0), ((6, 1), NAN), ((6, 1), INF)):
        bad_ids, bad_probs = ids.clone(), probs.clone()
        bad_ids[0, 1] = torch.tensor(change_ids)
        bad_probs[0, 1, 1] = change_probs
        got = call(rule, [[0, 5, 6, 7]], certain(tokens), draft_probs=bad_probs, draft_ids=bad_ids)
        assert (
            got.accept_len.item() == 1 and got.status.item() == BAD_DRAFT and got.out_tokens[0, :2].tolist() == [5, 6]
        )
    empty = call(rule, [[0, 5, 6, 7]], certain(tokens), draft_probs=probs[:, :, :0], draft_ids=ids[:, :, :0])
    assert empty.accept_len.item() == 0 and empty.status.item() == BAD_DRAFT and empty.out_tokens[0, 0].item() == 5
