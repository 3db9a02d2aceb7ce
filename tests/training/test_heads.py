"""Heads that look at earlier tokens: what they may see while they train, what their losses are, that they learn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS, SHIPPED
from dmtp_kernels.decode.request import Request
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.testing.models import tiny_checkpoint
from dmtp_kernels.training.budget import Budget
from dmtp_kernels.training.data import seeded, standard_library
from dmtp_kernels.training.heads import Slots, head_logits, slot_losses
from dmtp_kernels.training.losses import BLOCK, block_logits, block_slots, frozen_forward
from dmtp_kernels.training.optim import Optimizer
from dmtp_kernels.training.run import TrainingError, train
from dmtp_kernels.training.stages import enter, losses, new_trio

HEADED = [name for name in METHODS if name not in SHIPPED]
LENGTH, ANCHOR = 30, 14
TINY = Budget(4, 3, 2, rows=2, length=40, anchors=3, save_every=2, eval_rows=1)


@pytest.fixture(scope="module")
def trio() -> Checkpoint:
    return tiny_checkpoint(0, dtype=torch.float64)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 19, (1, LENGTH + 1), generator=seeded(0))


def slots_of(trio: Checkpoint, name: str, ids: torch.Tensor) -> tuple[Slots, int]:
    assert trio.mtp is not None
    drafter = trio.drafters[name]
    seen = frozen_forward(trio.target, trio.mtp, ids, drafter.config.target_layers)
    fusion = trio.fusions.get(name)
    return block_slots(METHODS[name], drafter, fusion, trio.target, seen, torch.tensor([[9, ANCHOR]]))


@pytest.mark.parametrize("name", HEADED)
def test_a_slot_sees_the_tokens_before_its_label_alone(trio: Checkpoint, ids: torch.Tensor, name: str) -> None:
    """A later token changes nothing; the token just before the label does, except for Domino's uncorrected slot."""
    drafter = trio.drafters[name]
    slots, first = slots_of(trio, name, ids)
    before = head_logits(drafter, trio.target, slots)[0, 1]
    assert before.shape[0] == BLOCK - first
    for offset in range(first, BLOCK):
        changed = ids.clone()
        changed[0, ANCHOR + offset] = (changed[0, ANCHOR + offset] + 1) % 19
        after = head_logits(drafter, trio.target, slots_of(trio, name, changed)[0])[0, 1]
        same = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        assert all(same[: offset - first + 1]), f"token {offset} leaks"
        if offset + 1 < BLOCK:
            assert not same[offset - first + 1], f"token {offset} is ignored"


@pytest.mark.parametrize("name", HEADED)
def test_labels_and_prefixes(trio: Checkpoint, ids: torch.Tensor, name: str) -> None:
    slots, first = slots_of(trio, name, ids)
    assert first == (1 if METHODS[name].first == "drafter" else 2)
    for n, anchor in enumerate((9, ANCHOR)):
        assert slots.labels[0, n].tolist() == ids[0, anchor + first : anchor + BLOCK].tolist()
        assert slots.prefix[0, n].tolist() == ids[0, anchor : anchor + BLOCK - 1].tolist()
        assert slots.previous[0, n].tolist() == ids[0, anchor + first - 1 : anchor + BLOCK - 1].tolist()
    assert trio.mtp is not None
    hidden = frozen_forward(trio.target, trio.mtp, ids, (0, 1)).hidden[0]
    assert torch.equal(slots.ahead[0, 1], hidden[ANCHOR + first - 1 : ANCHOR + BLOCK - 1])


def nats(logits: torch.Tensor, label: int) -> float:
    row = logits.tolist()
    return math.log(sum(map(math.exp, row))) - row[label]


def selector_nats(drafter: Drafter, trio: Checkpoint, slots: Slots, n: int, i: int) -> float:
    selector, label = drafter.candidate_selector, int(slots.labels[0, n, i])
    hidden, previous = slots.hidden[0, n, i], int(slots.previous[0, n, i])
    unary = selector.unary(trio.target.logits(hidden))
    listed = unary.topk(selector.config.top_k).indices.tolist()
    if label not in listed:
        listed[-1] = label
    context = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
    scores = torch.stack([unary[v] + context @ selector.successor_codebook[v] for v in listed])
    return nats(unary, label) + nats(scores, listed.index(label))


def markov_nats(drafter: Drafter, trio: Checkpoint, slots: Slots, n: int, i: int) -> float:
    hidden, embedded = slots.hidden[0, n, i], drafter.markov_head.markov_w1(slots.previous[0, n, i])
    logits = trio.target.logits(hidden) + drafter.markov_head.markov_w2(embedded)[:19]
    wanted = trio.target.logits(slots.ahead[0, n, i]).softmax(-1)
    distance = float((logits.softmax(-1) - wanted).abs().sum())
    said = float(drafter.confidence_head(hidden, embedded).sigmoid())
    chance = 1 - distance / 2
    confidence = -chance * math.log(said) - (1 - chance) * math.log(1 - said)
    return 0.1 * nats(logits, int(slots.labels[0, n, i])) + 0.9 * distance + confidence


def recurrent_nats(drafter: Drafter, trio: Checkpoint, slots: Slots, n: int, i: int) -> float:
    head, label = drafter.logit_head, int(slots.labels[0, n, i])
    plain = corrected = trio.target.logits(slots.hidden[0, n, i])
    seen = slots.prefix[0, n, : slots.prefix.shape[-1] - slots.labels.shape[-1] + i + 1]
    if len(seen) > 1:
        gru = torch.nn.GRU(32, head.config.state_size, bias=False, batch_first=True).double()
        gru.load_state_dict(head.prefix_gru.state_dict())
        state = gru(trio.target.embed_tokens(seen)[None])[0][0, -1]
        corrected = plain + head.embed_proj(torch.cat([slots.hidden[0, n, i], state]))[:19]
    return 0.5 * nats(plain, label) + 0.5 * nats(corrected, label)


FORMULAS = {"selector": selector_nats, "markov": markov_nats, "recurrent": recurrent_nats}


@torch.no_grad()
@pytest.mark.parametrize("name", HEADED)
def test_losses_are_the_formulas(trio: Checkpoint, ids: torch.Tensor, name: str) -> None:
    drafter = trio.drafters[name]
    slots, _ = slots_of(trio, name, ids)
    found = slot_losses(drafter, trio.target, slots)
    formula = FORMULAS[drafter.config.heads[0]]
    want = [[formula(drafter, trio, slots, n, i) for i in range(found.shape[2])] for n in range(2)]
    torch.testing.assert_close(found[0].double(), torch.tensor(want, dtype=torch.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dflash2", "dspark", "domino"])
def test_a_head_starts_as_if_it_were_not_there(name: str) -> None:
    """Fresh parts change neither the slots nor their logits: training continues from DFlash."""
    trio = tiny_checkpoint(0)
    assert trio.mtp is not None
    drafter = Drafter(trio.drafters[name].config)
    plain = trio.drafters["dflash"]
    drafter.load_state_dict({**drafter.state_dict(), **plain.state_dict()})
    ids = torch.randint(0, 19, (1, LENGTH + 1), generator=seeded(0))
    seen = frozen_forward(trio.target, trio.mtp, ids, (0, 1))
    slots, _ = block_slots(METHODS[name], drafter, None, trio.target, seen, torch.tensor([[ANCHOR]]))
    found = head_logits(drafter, trio.target, slots)
    want = trio.target.logits(slots.hidden)
    listed = found > -torch.inf
    torch.testing.assert_close(
        found[listed], drafter.candidate_selector.unary(want)[listed] if name == "dflash2" else want[listed]
    )
    if name == "dflash2":
        same, _ = block_logits(METHODS["dflash"], plain, None, trio.target, seen, torch.tensor([[ANCHOR]]))
        torch.testing.assert_close(want, same)


def test_every_head_learns() -> None:
    """The recipe's own stages on one batch of real text: every method's loss falls by a seventh and more."""
    torch.manual_seed(0)
    trio, corpus = new_trio(), standard_library()
    plan = Budget(1, 1, 1, rows=2, length=48, anchors=4)
    for stage, steps in ((0, 12), (1, 12)):
        optimizer = Optimizer(enter(trio, stage))
        for _ in range(steps):
            for _, loss in losses(trio, stage, 0, corpus=corpus, budget=plan, seed=0):
                if loss.requires_grad:
                    loss.backward()
            optimizer.step(1.0)
    optimizer = Optimizer(enter(trio, 2, HEADED))
    curves: dict[str, list[float]] = {name: [] for name in HEADED}
    for _ in range(20):
        for name, loss in losses(trio, 2, 0, corpus=corpus, budget=plan, seed=0):
            loss.backward()
            curves[name].append(loss.item())
        optimizer.step(1.0)
    assert all(curve[-1] < 0.85 * curve[0] for curve in curves.values()), curves
    moved = {
        "dflash2": ["candidate_selector.successor_codebook", "layers.0.mlp_conv.kernel_projection.weight"],
        "dspark": ["markov_head.markov_w2.weight"],
        "domino": ["logit_head.embed_proj.2.weight"],
    }
    for name, parameters in moved.items():
        for parameter in parameters:
            assert bool(trio.drafters[name].get_parameter(parameter).any()), f"{parameter} did not move from zero"


def test_trained_heads_are_saved_and_decode_like_the_target(tmp_path: Path) -> None:
    path = train(tmp_path, budget=TINY, methods=HEADED, progress=False, log=lambda _: None)
    checkpoint = load_checkpoint(path)
    assert list(checkpoint.drafters) == HEADED
    assert checkpoint.record is not None and set(checkpoint.record["held_out"]["agreement"]) == {"mtp", *HEADED}
    for name in HEADED:
        assert checkpoint.drafters[name].config.parts == METHODS[name].parts
    requests = [Request((256, *b"def f(x"), 12), Request((256, *b"import "), 12, temperature=0.7, seed=3)]
    with torch.no_grad():
        tokens = {
            name: [c.tokens for c in Engine(checkpoint, name, max_batch=2, max_tokens=64).run(requests)]
            for name in ("autoregressive", *HEADED)
        }
    assert all(found == tokens["autoregressive"] for found in tokens.values())


def test_methods_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    for methods, message in ((["mtp3"], "'mtp3' is not a method with a drafter"), ([], "names none")):
        with pytest.raises(TrainingError, match=message):
            train(tmp_path, budget=TINY, methods=methods, progress=False, log=lambda _: None)
