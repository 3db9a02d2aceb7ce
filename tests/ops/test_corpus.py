"""Same ids, same bits: every backend of every op with CUDA kernels on the calls of tests/corpus.

A plain run has the compiled kernels at every instruction set and the CUDA kernels on fibers, an interpreted one the
Triton kernels. Digests in tests/corpus/digests.json hold both to the same calls and the same answers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dmtp_kernels import backends
from tests.corpus.calls import CPU, DIGESTS, ENTRIES, Call
from tests.corpus.entry import I32, I64, Entry
from tests.cuda_host import host
from tests.cuda_host.cases import cuda_ops, tensors
from tests.ops.conftest import INTERPRETED, kernel_backends

# schedules: the order of the threads, its reverse, and two at random; memory is fenced at its end and at its start in
# turn. Interpreted kernels have their bounds checked anyway
TURNS = {"cuda": (0, 1, 7, 8), "cpu": (0, 1), "triton": (0,)}
WANTED: dict[str, str] = json.loads(DIGESTS.read_text())
OPS = sorted({entry.op for entry in ENTRIES})
# attention is held against float64 (tests/cuda_host/test_cuda_host_attention.py): no two backends have its bits
PINNED = sorted({*cuda_ops()} - {"block_attention"})
BY_ENTRY = pytest.mark.parametrize("entry", ENTRIES, ids=[entry.id for entry in ENTRIES])
BY_OP = pytest.mark.parametrize("op", OPS)


def backends_of(op: str) -> list[str]:
    found = [name for name in kernel_backends(op, every_capability=True) if name != "reference"]
    return found if INTERPRETED or op not in cuda_ops() else [*dict.fromkeys([*found, "cuda"])]


@functools.cache
def call_of(entry: Entry) -> Call:
    return Call(entry)


@contextmanager
def ready(backend: str, op: str) -> Iterator[str]:
    """The name of a backend that takes the call's tensors, at its instruction set."""
    name, _, capability = backend.partition("-")
    if name == "cuda":
        with host.accepted(op):
            yield name
        return
    if not capability:
        yield name
        return
    compiled = backends.compiled()
    before = compiled.capability()
    compiled.set_capability(capability)
    try:
        yield name
    finally:
        compiled.set_capability(before)


@BY_ENTRY
def test_calls_and_answers_are_those_of_every_other_run(entry: Entry) -> None:
    assert call_of(entry).digest() == WANTED[entry.id]


@pytest.mark.parametrize(
    ("entry", "backend"),
    [pytest.param(e, b, id=f"{e.id}-{b}") for e in ENTRIES for b in backends_of(e.op)],
)
def test_a_backend_gives_the_references_bits(entry: Entry, backend: str) -> None:
    with ready(backend, entry.op) as name:
        for turn, seed in enumerate(TURNS[name]):
            if name == "cuda":
                host.seed(seed)
            call_of(entry).check(name, at_end=turn % 2 == 0)


@pytest.mark.skipif(INTERPRETED, reason="CUDA kernels run in a plain process")
@pytest.mark.parametrize("op", PINNED)
def test_row_175_no_request_launches_nothing(op: str) -> None:
    # triton-lang/triton-ascend#984: a grid of no blocks is an error of CUDA's
    (entry,) = (entry for entry in ENTRIES if entry.op == op and entry.name == "none")
    with host.accepted(op):
        for _ in range(2):
            host.seed(0)
            call_of(entry).check("cuda", at_end=True)
            assert host.launches() == 0


@pytest.mark.skipif(INTERPRETED, reason="CUDA kernels run in a plain process")
def test_row_177_a_grid_beyond_32_bits_is_refused() -> None:
    # triton-lang/triton#7260: a very large grid silently did nothing
    page_table, ctx_len = torch.zeros(2, 4, dtype=I32), torch.ones(2, dtype=I32)
    wide = torch.zeros(2, 1, dtype=I32).expand(2, 2**38)  # 2^31 blocks a request
    with host.emulated("draft_page_table"), pytest.raises(RuntimeError, match="more blocks than a grid has"):
        run = backends.implementation("draft_page_table", CPU)
        run(page_table, ctx_len, 4, 4, 0, None, None, wide, ctx_len.clone(), ctx_len.clone())


def test_every_pinned_op_with_cuda_kernels_is_in_the_corpus() -> None:
    assert set(PINNED) <= set(OPS)
    assert set(WANTED) == {entry.id for entry in ENTRIES} and len(WANTED) == len(ENTRIES)


@BY_OP
def test_the_corpus_has_what_every_op_must_take(op: str) -> None:
    calls = [call_of(entry) for entry in ENTRIES if entry.op == op]
    batches = {call.batch() for call in calls}
    given = [t for call in calls for t in tensors(call.inputs)]
    assert {0, 1} < batches
    assert {I32, I64} <= {t.dtype for t in given}
    assert any(not t.is_contiguous() for t in given), "odd strides"
    edges = {n for t in given if t.dtype in (I32, I64) for n in t.flatten().tolist()}
    assert {2**63 - 1, -(2**63), 2**31 - 1, -(2**31)} <= edges


# output, counted from the end: every value, or every bit, that the op's README documents
ANSWERS: dict[str, dict[int, set[int]]] = {
    "draft_page_table": {-2: {-1, 0}, -1: {-1, 0}},
    "draft_page_table_from_slots": {-2: {-1, 0}, -1: {-1, 0}},
    "accept_prefix": {-5: set(range(8)), -4: set(range(9)), -1: {0, 1, 2}},
    "accept_rejection": {-6: set(range(5)), -2: {0, 1, 2}},
    "accept_block": {-6: set(range(5)), -2: {0, 1, 2}},
    "fused_t1_prep": {-1: {0, 1}, -4: {-1}},
    "sample_rows": {-2: {-1, 0}},
}
BITS: dict[str, tuple[int, int]] = {
    "advance_round": (-1, 7),
    "sample_rows": (-1, 7),
    "accept_rejection": (-1, 15),
    "accept_block": (-1, 15),
    "commit_kv": (-1, 15),
    "commit_round": (-1, 7),
}


@BY_OP
def test_the_corpus_has_every_kind_of_answer(op: str) -> None:
    answers: list[list[Any]] = [call_of(entry).wanted for entry in ENTRIES if entry.op == op]
    for output, values in ANSWERS.get(op, {}).items():
        found = {int(n) for answer in answers for n in answer[output].flatten()}
        assert values <= found, (output, values - found)
    output, bits = BITS.get(op, (-1, 0))
    seen = torch.tensor([int(n) for answer in answers for n in answer[output].flatten() if bits])
    assert all((seen & bit).any() for bit in (1, 2, 4, 8) if bits & bit), seen.unique()


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels run in a plain process")
def test_the_corpus_sees_one_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in ENTRIES if entry.op == "accept_prefix")
    right = backends.implementation("accept_prefix", CPU)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[-2][-1, -1] ^= 1

    monkeypatch.setitem(backends._loaded, ("accept_prefix", "cpu"), wrong)
    with pytest.raises(AssertionError, match=r"tensor 8 of the call: at \(47, 7\) is"):
        call_of(entry).check("cpu", True)
