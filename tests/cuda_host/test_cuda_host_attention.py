"""Block attention's CUDA kernels on the CPU: against float64, the same bits under every schedule, grid and batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import backends
from dmtp_kernels.ops import _workspace
from dmtp_kernels.ops.block_attention.spec import SPEC
from dmtp_kernels.testing.capture import capture_safe
from tests.cuda_host import host
from tests.cuda_host.attention_cases import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    OP,
    OPTIONS,
    Attended,
    attention_case,
)
from tests.cuda_host.cases import CPU, same

SCHEDULES = 12  # of a case
FEW = 12  # schedules of which one shows that a barrier is missing
MANY, ONE = 132, 1
"""Processors for which a request's parts are dealt to a cluster, and for which one block takes them in turn."""
EDGES = (0, 1, 15, 16, 17, 63, 64, 65)

CASES: dict[str, dict[str, Any]] = {
    "drafter": {"lengths": (40, 0, 90), "heads": (6, 2), "dim": 128, "dense": 8, "window": 37},
    "mtp": {"lengths": (70, 3), "heads": (8, 1), "dim": 256, "dense": 9, "causal": True, "page_size": 64},
    "in_cache": {"lengths": (33, 64, 7), "heads": (4, 2), "dim": 64, "causal": True, "page_size": 3},
    "query": {"lengths": (90, 20), "heads": (3, 1), "dim": 80, "window": 17, "by_query": True, "page_size": 1},
    "query_causal": {
        **{"lengths": (90, 5), "heads": (5, 1), "dim": 48, "window": 5, "by_query": True},
        **{"causal": True, "dense": 9, "page_size": 7},
    },
    "query_packed": {
        **{"lengths": (300, 31), "heads": (2, 2), "dim": 64, "window": 64, "by_query": True, "packed": True},
        **{"page_size": 48, "valid_from": (250, 0)},
    },
    "wide_pages": {"lengths": (300, 511), "heads": (2, 1), "dim": 192, "page_size": 256, "slots": 3, "dense": 5},
    "fp16": {"lengths": EDGES, "heads": (2, 1), "dim": 64, "dtype": FP16, "slots": 4, "scale": 0.5},
    "fp16_odd": {"lengths": EDGES, "heads": (3, 1), "dim": 17, "dtype": FP16, "dense": 8, "causal": True},
    "fp32": {"lengths": EDGES, "heads": (4, 2), "dim": 48, "dtype": FP32, "dense": 8, "window": 40},
    "fp32_wide": {"lengths": (70, 9), "heads": (2, 1), "dim": 256, "dtype": FP32, "slots": 3, "causal": True},
    "fp32_query": {
        **{"lengths": (70, 9), "heads": (2, 1), "dim": 80, "dtype": FP32, "window": 9, "by_query": True},
        **{"packed": True},
    },
    "one_element": {"lengths": (50, 9), "heads": (2, 1), "dim": 1, "slots": 2, "dense": 2},
    "group_24": {"lengths": (40, 17), "heads": (24, 1), "dim": 32, "dense": 8, "sink": FP32},
    "group_7": {"lengths": (40, 17), "heads": (14, 2), "dim": 96, "dense": 8, "soft_cap": 2.0, "slots": 5},
    "group_12": {"lengths": (40,), "heads": (12, 1), "dim": 64, "slots": 16, "causal": True, "block_len": (11,)},
    "one_slot": {"lengths": (100, 16), "heads": (16, 2), "dim": 64, "slots": 1},
    "many_slots": {"lengths": (30, 0), "heads": (2, 1), "dim": 16, "slots": 70, "dense": 71, "causal": True},
    "e4m3": {
        **{"lengths": (90, 33), "heads": (8, 1), "dim": 128, "cache": (E4M3, E4M3), "dense": 8, "window": 64},
        **{"scales": (2, 1), "page_size": 64},
    },
    "e4m3_packed": {
        **{"lengths": (90, 33), "heads": (2, 1), "dim": 40, "cache": (E4M3, E4M3), "scales": (1,), "packed": True},
        **{"dense": 8},
    },
    "e5m2": {"lengths": (90, 33), "heads": (4, 2), "dim": 64, "cache": (E5M2, E5M2), "scales": (2,), "causal": True},
    "e4m3_e5m2_fp16": {
        **{"lengths": (90, 33), "heads": (4, 1), "dim": 80, "cache": (E4M3, E5M2), "scales": (), "dtype": FP16},
        **{"window": 20, "by_query": True, "dense": 8},
    },
    "e5m2_wide": {"lengths": (45,), "heads": (8, 1), "dim": 256, "cache": (E5M2, E5M2), "scales": (1, 1)},
    "scaled_bf16": {"lengths": (45, 6), "heads": (4, 2), "dim": 64, "scales": (2, 2), "dense": 8},
    "extras": {
        **{"lengths": (60, 60, 0, 2), "heads": (6, 2), "dim": 64, "dense": 8, "valid_from": (60, 11, 0, -3)},
        **{"block_len": (0, 8, 0, 5), "sink": torch.float64, "soft_cap": 5.0, "scales": (2,)},
    },
    "nothing": {"lengths": (60, 0), "heads": (2, 1), "dim": 64, "window": 0, "by_query": True, "sink": BF16},
    "peaked": {"lengths": (130, 20), "heads": (4, 1), "dim": 64, "dense": 8, "spread": 6.0},
}  # fmt: skip
HISTORY: dict[str, Any] = {"slots": 2, "heads": (2, 1), "dim": 16, "page_size": 64}
LENGTHS = (511, 512, 513, 1024, 4095, 4096, 4097, 9000)
RULES: dict[str, dict[str, Any]] = {
    "whole": {"causal": True},
    "anchor": {"window": 1000, "dense": 2},
    "anchor_long": {"window": 4500, "dense": 3, "valid_from": (600,) * 8},
    "query": {"window": 513, "by_query": True},
    "fp8": {"cache": (E4M3, E5M2), "scales": (8, 1), "dense": 2},
    "sink": {"sink": FP32, "soft_cap": 3.0, "dtype": FP32},
}
BITS: dict[str, dict[str, Any]] = {
    "mtp": {"lengths": (700, 3, 1100), "slots": 4, "heads": (4, 2), "dim": 32, "causal": True, "dense": 5},
    "drafter": {"lengths": (700, 3, 1100), "slots": 4, "heads": (8, 2), "dim": 32, "window": 600, "dense": 4},
    "query": {"lengths": (700, 3), "slots": 3, "heads": (2, 1), "dim": 32, "window": 520, "by_query": True},
    "fp8": {
        **{"lengths": (700, 3), "slots": 3, "heads": (2, 1), "dim": 32, "cache": (E5M2, E4M3), "scales": (2, 1)},
        **{"sink": FP32},
    },
    "fp32": {"lengths": (700, 3), "slots": 3, "heads": (2, 1), "dim": 24, "dtype": FP32, "causal": True},
}
# of the last part the last tile is whole, and lies where sums are left for the cluster
WHOLE: dict[str, Any] = {"lengths": (832,), "heads": (4, 1), "page_size": 64}
WAITED: tuple[dict[str, Any], ...] = (
    CASES["query_packed"], CASES["e4m3"], WHOLE | {"dim": 128},
    WHOLE | {"dim": 64, "cache": (E4M3, E5M2), "scales": ()},
    {"lengths": (700, 20), "slots": 2, "heads": (2, 1), "dim": 32, "dtype": FP32}, HISTORY | {"lengths": (4200,)},
)  # fmt: skip
BARRIERS = {"attention_block.cuh": 1, "attention_launch.cuh": 2, "attention_sum.cuh": 7}


@pytest.fixture(autouse=True)
def on_fibers() -> Iterator[None]:
    with host.emulated(OP):
        yield


def made(slots: int = 8, **options: Any) -> tuple[Any, ...]:
    return attention_case(slots=slots, **options)


def of(inputs: tuple[Any, ...], b: int) -> tuple[Any, ...]:
    """Request `b` of a call alone."""
    shared = ("k_cache", "v_cache", "sink")
    names = ("q", "k_cache", "v_cache", "page_table", "ctx_len", *OPTIONS)
    pairs = zip(names, inputs, strict=True)
    return tuple(x[b : b + 1] if isinstance(x, torch.Tensor) and name not in shared else x for name, x in pairs)


@pytest.mark.parametrize("name", CASES)
def test_errs_within_the_budget_and_alike_under_every_schedule(name: str) -> None:
    one = Attended(made(**CASES[name]))
    for seed in range(SCHEDULES):
        with host.processors(MANY if seed % 3 else ONE):
            assert one.differs(seed) is None, seed


@pytest.mark.parametrize("case", [c for c in SPEC.cases if c.name != "empty"], ids=lambda case: str(case.name))
def test_the_cases_of_the_spec(case: Any) -> None:
    one = Attended(case.make(torch.Generator().manual_seed(1)))
    for seed in range(SCHEDULES):
        assert one.differs(seed) is None, seed


@pytest.mark.parametrize("rule", RULES)
def test_histories_around_parts_and_chunks(rule: str) -> None:
    # all in a batch, and each alone: by a cluster, and by one block in turn
    inputs = made(lengths=LENGTHS, **HISTORY | RULES[rule])
    whole = Attended(inputs)
    assert whole.differs(0) is None
    assert whole.first is not None
    for b, length in enumerate(LENGTHS):
        alone = Attended(of(inputs, b))
        alone.first = whole.first[0][b : b + 1], whole.first[1][b : b + 1]
        for seed, count in ((2, MANY), (3, ONE)):
            with host.processors(count):
                assert alone.differs(seed) is None, (length, count)


@pytest.mark.parametrize("name", BITS)
def test_requests_alone_and_together_have_the_same_bits(name: str) -> None:
    inputs = made(**BITS[name])
    whole = Attended(inputs)
    with host.processors(ONE):
        assert whole.differs(4) is None
    assert whole.first is not None
    with host.processors(MANY):
        assert whole.differs(5) is None
        for b in range(len(inputs[0])):
            alone = Attended(of(inputs, b))
            alone.first = whole.first[0][b : b + 1], whole.first[1][b : b + 1]
            assert alone.differs(7 + b) is None, b


def test_without_any_barrier_or_wait_some_schedule_differs() -> None:
    every = [(Attended(made(**options)), count) for options in WAITED for count in (ONE, MANY)]

    def differs(seed: int) -> Iterator[str | None]:
        for one, count in every:
            with host.processors(count):
                yield one.differs(seed)

    host.barriers()
    assert not any(found for seed in (0, 4) for found in differs(seed))
    found = host.barriers()
    assert {file: sum(b.startswith(file) for b in found) for file in BARRIERS} == BARRIERS, found
    assert len(found) == sum(BARRIERS.values()), found
    for barrier in found:
        with host.without(barrier):
            assert any(any(differs(seed)) for seed in range(FEW)), barrier
    assert not any(differs(1))


@pytest.mark.parametrize(("rows", "launches"), [(4096, 1), (4160, 2)])
def test_as_few_launches_as_said(rows: int, launches: int) -> None:
    # by the width of the table, since lengths are not known to the host
    inputs = made(lengths=(40,), slots=1, heads=(1, 1), dim=16, page_size=64)
    table = torch.nn.functional.pad(inputs[3], (0, rows // 64 - inputs[3].shape[1]), value=-1)
    for count in (ONE, MANY):
        with host.processors(count):
            assert Attended((*inputs[:3], table, *inputs[4:])).differs(0) is None
            assert host.launches() == launches


def outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = q.dtype if q.dtype == torch.float64 else FP32
    return torch.full_like(q, float("nan")), torch.full(q.shape[:3], float("nan"), dtype=dtype)


@pytest.mark.parametrize(
    ("dim", "dtype", "cache"),
    [(257, BF16, None), (8, torch.float64, None), (16, FP32, (E4M3, E5M2)), (16, BF16, (BF16, E5M2))],
    ids=str,
)
def test_what_has_no_kernel_goes_to_the_reference(dim: int, dtype: torch.dtype, cache: Any) -> None:
    scales = None if cache is None else (1,)
    inputs = made(lengths=(20, 3), heads=(2, 1), dim=dim, dtype=dtype, cache=cache, scales=scales, dense=8)
    got, want = outputs(inputs[0]), outputs(inputs[0])
    host.seed(0)
    backends.implementation(OP, CPU)(*inputs, *got)
    assert host.launches() == 0
    with backends.use_backend("reference"):
        backends.implementation(OP, CPU)(*inputs, *want)
    assert all(map(same, got, want)) and torch.isfinite(got[0]).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0)], ids=str)
def test_row_175_no_requests_and_no_slots_launch_nothing(shape: tuple[int, int]) -> None:
    inputs = made(lengths=(20, 3), heads=(2, 1), dim=16)
    few = (inputs[0][: shape[0], : shape[1]], *inputs[1:3], *(x[: shape[0]] for x in inputs[3:5]), *inputs[5:])
    host.seed(0)
    backends.implementation(OP, CPU)(*few, *outputs(few[0]))
    assert host.launches() == 0


def test_row_177_a_grid_beyond_32_bits_is_refused() -> None:
    # triton-lang/triton#7260: a very large grid silently did nothing
    inputs = made(lengths=(20,), slots=1, heads=(1, 1), dim=16)
    wide = [x.expand(2**31, *x.shape[1:]) for x in (inputs[0], inputs[3], inputs[4], torch.zeros(1, 1, 1))]
    with pytest.raises(RuntimeError, match="more blocks than a grid has"):
        backends.implementation(OP, CPU)(wide[0], *inputs[1:3], *wide[1:3], *inputs[5:], wide[0], wide[3])


def test_too_little_scratch_is_answered_with_what_it_takes() -> None:
    inputs = made(lengths=(9000,), **HISTORY)
    out, lse = outputs(inputs[0])
    call = (list(inputs[:5]), [0, 1, 2, 3, 4, *[-1] * 7], -1, False, False, 0.25, 0.0, out, lse)
    run = backends.cuda_library().block_attention
    host.seed(0)
    taken = run(*call, torch.empty(0, dtype=torch.uint8))
    assert taken > 0 and run(*call, torch.empty(taken - 1, dtype=torch.uint8)) == taken
    assert host.launches() == 0 and out.isnan().all() and lse.isnan().all()
    assert run(*call, torch.empty(taken, dtype=torch.uint8)) == 0 and not out.isnan().any()


def test_capture_safe_and_allocates_nothing_once_warm() -> None:
    inputs = made(lengths=LENGTHS, **HISTORY | RULES["fp8"])
    got = outputs(inputs[0])
    _workspace._buffers.clear()
    for warm in (False, True):
        with capture_safe(allocations=not warm):
            backends.implementation(OP, CPU)(*inputs, *got)
