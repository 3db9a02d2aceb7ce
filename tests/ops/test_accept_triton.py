"""The Triton kernels of the sampled rules as a GPU would launch them: rows in several parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.accept import SampledAcceptance, accept_block, accept_prefix, accept_rejection
from dmtp_kernels.testing import watch
from tests.ops.conftest import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
OPS = ("accept_prefix", "accept_rejection", "accept_block")
BATCH, ROWS, VOCAB = 6, 4, 2048 + 300  # two programs a row


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with use_backend("triton", *OPS), planned_for(132):
        yield


def inputs(form: str, dtype: torch.dtype, filtered: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(BATCH, ROWS, VOCAB, generator=generator)
    q = torch.softmax(logits[:, :-1] + 0.3 * torch.randn(BATCH, ROWS - 1, VOCAB, generator=generator), dim=2)
    drawn = torch.multinomial(q.view(-1, VOCAB), 1, generator=generator).view(BATCH, ROWS - 1)
    arguments: dict[str, Any] = {
        "candidates": torch.cat((torch.zeros(BATCH, 1, dtype=torch.int64), drawn), dim=1),
        "target_logits": logits.to(dtype),
        "temperature": torch.tensor([1.0, 0.0, 0.8, 2.0, 1.0, -1.0]),
        "seed": torch.arange(BATCH) - 3,
        "position": torch.arange(BATCH) << 33,
        "stop_ids": torch.tensor([[7], [8], [9], [int(drawn[3, 0])], [1], [2]]),
        "budget": torch.tensor([9, 9, 2, 9, 9, 9]),
        "num_candidates": torch.tensor([3, 3, 3, 3, 2, 3]),
    }
    if form == "dense":
        arguments["draft_probs"] = q.to(dtype)
    elif form == "listed":
        probs, ids = q.topk(20, dim=2)
        ids[:, :, -1] = drawn  # of what was drawn, some is listed and some repeats
        arguments |= {"draft_probs": probs.to(dtype), "draft_ids": ids.int()}
    if filtered:
        arguments |= {"top_k": torch.tensor([50, 0, 5, 2347, -1, 3]), "top_p": torch.full((BATCH,), 0.9)}
    return arguments


def equal(a: SampledAcceptance, b: SampledAcceptance) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("rule", "form", "dtype", "filtered", "launches"),
    [
        (accept_rejection, "dense", torch.float32, False, 4),
        (accept_rejection, "one_hot", torch.bfloat16, True, 5),
        (accept_rejection, "listed", torch.float32, True, 5),
        (accept_block, "dense", torch.float32, True, 6),
        (accept_block, "listed", torch.bfloat16, False, 5),
    ],
)
def test_rows_in_parts_decide_as_the_reference(
    rule: Any, form: str, dtype: torch.dtype, filtered: bool, launches: int
) -> None:
    arguments = inputs(form, dtype, filtered)
    with use_backend("reference"):
        want = rule(**arguments)
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        got = rule(**arguments)
    assert equal(got, want) and len(launched) == launches
    assert want.accept_len.unique().numel() > 1
    # alone a request decides the same
    one = {k: v[2:3] for k, v in arguments.items()}
    assert all(torch.equal(a[0], b[2]) for a, b in zip(rule(**one), got, strict=True))


def test_block_chances_of_a_shorter_prefix() -> None:
    """The last candidate is impossible, so the draw of the first decides against h_1 = S_1 / (S_1 + 1 - P_1)."""
    batch, vocab = 24, 6
    generator = torch.Generator().manual_seed(11)
    q = torch.softmax(torch.randn(batch, 2, vocab, generator=generator), dim=2)
    logits = torch.randn(batch, 3, vocab, generator=generator)
    logits[:, 1, 5] = -torch.inf
    drafts = torch.multinomial(q[:, 0], 1, generator=generator)
    candidates = torch.cat((torch.zeros_like(drafts), drafts, torch.full_like(drafts, 5)), dim=1)
    arguments = {
        "temperature": torch.ones(batch),
        "seed": torch.arange(batch),
        "position": torch.arange(batch),
        "stop_ids": torch.zeros(0, dtype=torch.int64),
        "budget": torch.full((batch,), 9),
        "draft_probs": q,
    }
    with use_backend("reference"):
        want = accept_block(candidates, logits, **arguments)
    assert want.accept_len.unique().tolist() == [0, 1]
    assert equal(accept_block(candidates, logits, **arguments), want)


def test_prefix_is_one_launch() -> None:
    ids = torch.tensor([[0, 5, 6], [0, 5, 7]]).repeat(20, 1)
    target = torch.tensor([[5, 6, 7], [5, 6, 7]]).repeat(20, 1)
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        got = accept_prefix(ids, target, stop_ids=torch.tensor([9]), budget=torch.full((40,), 9))
    assert len(launched) == 1 and got.accept_len.tolist() == [2, 1] * 20


def test_rows_behind_the_draft_are_not_read() -> None:
    arguments = inputs("dense", torch.float32, False)
    arguments["num_candidates"] = torch.tensor([1, 2, 0, 3, 1, 3])
    logits, q = arguments["target_logits"], arguments["draft_probs"]
    touched: set[tuple[str, int, int]] = set()

    def note(access: watch.Access) -> None:
        for name, tensor in (("logits_ptr", logits), ("probs_ptr", q)):
            if access.kind == "load" and access.owner() == name and access.addresses.size:
                rows = (access.addresses.astype("int64") - tensor.data_ptr()) // (4 * VOCAB)
                touched.update((name, int(r) // tensor.shape[1], int(r) % tensor.shape[1]) for r in set(rows.tolist()))

    with watch.watch(note):
        accept_rejection(**arguments)
    for name, request, row in touched:
        limit = int(arguments["num_candidates"][request])
        assert row <= limit if name == "logits_ptr" else row < limit
    assert ("logits_ptr", 2, 0) in touched and not any(request == 5 for _, request, _ in touched)
