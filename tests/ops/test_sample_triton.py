"""The Triton kernels of sampling as a GPU would launch them: rows in several parts, logits read once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.sample import sample_rows
from dmtp_kernels.testing import watch
from tests.ops.conftest import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with use_backend("triton", "sample_rows"), planned_for(132):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("filtered", [False, True])
def test_rows_in_parts_give_the_references_tokens(dtype: torch.dtype, filtered: bool) -> None:
    n, vocab = 10, 2 * 2048 + 700
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(n, vocab + 5, generator=generator)).to(dtype)
    logits[:, vocab:] = INF
    logits[0, 4000], logits[1], logits[2, [4096, 4500]], logits[3, :4100] = NAN, NAN, INF, -INF
    logits[4] = 0.0  # ties everywhere: filters cut by id, across parts
    arguments = {
        "temperature": torch.tensor([1.0, 1.0, 0.7, 1.0, 1.0, 0.0, 1e-6, 1e-30, 3.0, -1.0]),
        "seed": torch.arange(n) - 4,
        "position": torch.arange(n) << 31,
        "top_k": torch.tensor([40, 3, 3, 90, 3000, 5, 0, 7, vocab - 1, 2]) if filtered else None,
        "top_p": torch.tensor([0.9, 0.5, 0.5, 1.0, 0.9, NAN, 0.99, 0.0, 0.7, 0.5]) if filtered else None,
        "num_valid": vocab,
    }
    with use_backend("reference"):
        want = sample_rows(logits, **arguments)  # type: ignore[arg-type]
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        got = sample_rows(logits, **arguments)  # type: ignore[arg-type]
    assert torch.equal(got.token, want.token) and torch.equal(got.status, want.status)
    assert len(launched) == 2 + filtered


def test_a_row_of_one_part_is_one_launch() -> None:
    logits = torch.randn(3, 259, generator=torch.Generator().manual_seed(0))
    key = torch.arange(3)
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        sample_rows(logits, temperature=torch.ones(3), seed=key, position=key)
    assert len(launched) == 1


def test_logits_are_read_once() -> None:
    vocab = 5000
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    loads = []

    def note(access: watch.Access) -> None:
        if access.kind == "load" and access.owner() == "logits_ptr":
            loads.append(access.addresses.size)

    with watch.watch(note):
        sample_rows(logits, temperature=torch.ones(2), seed=torch.arange(2), position=torch.arange(2))
    # and the winner of each of three parts once more
    assert sum(loads) == 2 * (vocab + 3)
