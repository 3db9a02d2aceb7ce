"""Which tokens, hiddens and context rows each method may see while it trains, and what it is asked to predict."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.models.config import MaskRule
from dmtp_kernels.testing.models import tiny_checkpoint
from dmtp_kernels.training.data import seeded
from dmtp_kernels.training.losses import (
    BLOCK,
    GAMMA,
    Frozen,
    block_logits,
    block_loss,
    frozen_forward,
    sample_anchors,
    target_and_mtp,
)
from dmtp_kernels.training.stages import DRAFTED

LENGTH, ANCHOR = 30, 14
"""One block in the middle: rows before it, its own eight tokens, and rows after it."""


@pytest.fixture(scope="module")
def trio() -> Checkpoint:
    return tiny_checkpoint(0, dtype=torch.float64)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 19, (1, LENGTH + 1), generator=seeded(0))


def _logits(trio: Checkpoint, name: str, seen: Frozen) -> torch.Tensor:
    anchors = torch.tensor([[ANCHOR]])
    return block_logits(METHODS[name], trio.drafters[name], trio.fusions.get(name), trio.target, seen, anchors)[0]


def _seen(trio: Checkpoint, ids: torch.Tensor) -> Frozen:
    assert trio.mtp is not None
    return frozen_forward(trio.target, trio.mtp, ids, trio.drafters["dflash"].config.target_layers)


@pytest.mark.parametrize("name", DRAFTED)
def test_logits_depend_on_nothing_they_must_predict(trio: Checkpoint, ids: torch.Tensor, name: str) -> None:
    before = _logits(trio, name, _seen(trio, ids))
    first_unknown = ANCHOR + (1 if METHODS[name].first == "drafter" else 2)
    for position in range(first_unknown, LENGTH + 1):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 19
        assert torch.equal(_logits(trio, name, _seen(trio, changed)), before), f"position {position} leaks"


@pytest.mark.parametrize("name", DRAFTED)
def test_logits_depend_on_what_is_known(trio: Checkpoint, ids: torch.Tensor, name: str) -> None:
    """The other side of the leak test: a block that ignored its anchor or T1 would pass that one."""
    method = METHODS[name]
    before = _logits(trio, name, _seen(trio, ids))
    known = [ANCHOR - 1] + [ANCHOR] * (method.anchors == 2 or method.first == "drafter")
    for position in known + [ANCHOR + 1] * (method.first == "mtp"):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 19
        assert not torch.equal(_logits(trio, name, _seen(trio, changed)), before), f"position {position} is ignored"


@pytest.mark.parametrize("name", [name for name, method in DRAFTED.items() if method.fusion != "none"])
def test_fused_hidden_is_the_row_that_predicts_the_first_candidate(
    trio: Checkpoint, ids: torch.Tensor, name: str
) -> None:
    seen = _seen(trio, ids)
    before = _logits(trio, name, seen)
    for row in range(LENGTH):
        ahead = seen.ahead.clone()
        ahead[0, row] += torch.randn(ahead.shape[-1], generator=seeded(row)).double()
        changed = not torch.equal(_logits(trio, name, replace(seen, ahead=ahead)), before)
        assert changed == (row == ANCHOR - 1), f"row {row}"


@pytest.mark.parametrize("name", ["context_fusion", "mtp_context"])
def test_mtp_context_rows_end_before_the_anchor(trio: Checkpoint, ids: torch.Tensor, name: str) -> None:
    seen = _seen(trio, ids)
    before = _logits(trio, name, seen)
    for row in (ANCHOR - 1, ANCHOR):
        ahead = seen.ahead.clone()
        ahead[0, row] += torch.randn(ahead.shape[-1], generator=seeded(row)).double()
        changed = not torch.equal(_logits(trio, name, replace(seen, ahead=ahead)), before)
        assert changed == (row < ANCHOR), f"row {row}"


def test_mtp_row_reads_one_token_ahead(trio: Checkpoint, ids: torch.Tensor) -> None:
    before = _seen(trio, ids).ahead
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 19
    differs = (_seen(trio, changed).ahead != before).any(-1)[0]
    assert differs.tolist() == [row >= 9 for row in range(LENGTH)]


def test_zero_residual_is_the_plain_dual_anchor_block(trio: Checkpoint, ids: torch.Tensor) -> None:
    seen = _seen(trio, ids)
    anchors = torch.tensor([[ANCHOR]])
    zero = tiny_checkpoint(0, dtype=torch.float64).fusions["dmtp"]
    nn.init.zeros_(zero.proj.weight)
    drafter = trio.drafters["dmtp"]
    fused, _ = block_logits(METHODS["dmtp"], drafter, zero, trio.target, seen, anchors)
    plain, _ = block_logits(METHODS["control"], drafter, None, trio.target, seen, anchors)
    assert torch.equal(fused, plain)


@pytest.mark.parametrize(("name", "first"), [("dflash", 1), ("conditioned", 2), ("dmtp", 2)])
def test_loss_is_the_decayed_cross_entropy_of_the_same_positions(
    trio: Checkpoint, ids: torch.Tensor, name: str, first: int
) -> None:
    seen = _seen(trio, ids)
    anchors = torch.tensor([[9, ANCHOR]])
    drafter, fusion = trio.drafters[name], trio.fusions.get(name)
    logits, got = block_logits(METHODS[name], drafter, fusion, trio.target, seen, anchors)
    assert got == first and logits.shape[2] == BLOCK - first
    total = weights = 0.0
    for n, anchor in enumerate((9, ANCHOR)):
        for i, offset in enumerate(range(first, BLOCK)):
            row = logits[0, n, i].tolist()
            nats = math.log(sum(map(math.exp, row))) - row[int(ids[0, anchor + offset])]
            total += math.exp(-i / GAMMA) * nats
            weights += math.exp(-i / GAMMA)
    loss = block_loss(METHODS[name], drafter, fusion, trio.target, seen, anchors)
    assert loss.item() == pytest.approx(total / weights, rel=1e-5)


def test_masks_of_single_layers_are_not_trained(ids: torch.Tensor) -> None:
    trio = tiny_checkpoint(7, window=None)
    drafter = trio.drafters["dflash"]
    drafter.config = replace(drafter.config, layer_masks=(MaskRule(None, causal=True),) * 2)
    with pytest.raises(ValueError, match="has mask rules of single layers"):
        _logits(trio, "dflash", _seen(trio, ids))


def test_target_predicts_one_ahead_and_mtp_two(trio: Checkpoint) -> None:
    ids = torch.randint(0, 19, (1, 8), generator=seeded(5))
    seen = _seen(trio, ids[:, :7])
    assert trio.mtp is not None
    target, mtp = target_and_mtp(trio.target, trio.mtp, ids)
    for loss, hidden, ahead in ((target, seen.hidden, 1), (mtp, seen.ahead, 2)):
        logs = trio.target.logits(hidden).log_softmax(-1)[0]
        want = -sum(logs[p, ids[0, p + ahead]].item() for p in range(6)) / 6
        assert loss.item() == pytest.approx(want, rel=1e-5)


def test_anchors_leave_room_for_context_and_block() -> None:
    anchors = sample_anchors(200, 6, 30, seeded(1))
    assert anchors.min() == BLOCK and anchors.max() == 30 - BLOCK - 1
    assert (anchors.diff(dim=1) > 0).all()
