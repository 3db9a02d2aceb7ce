"""The emulated matrix instructions, asynchronous copies and grid barrier: what they compute, and what they find."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.cuda_host import host

TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.int8: 2}
SEEDS = range(20)


@pytest.fixture(autouse=True)
def probes() -> ctypes.CDLL:
    library = host.library()
    for name in ("mma", "mma_of", "copies", "phases"):
        getattr(library, f"probe_{name}").restype = ctypes.c_char_p
    return library


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def multiply(library: ctypes.CDLL, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """`c [16, 8] + a [16, K] @ b [8, K].T`."""
    out = c.clone()
    host.seed(seed)
    assert library.probe_mma(TYPES[a.dtype], pointer(a), pointer(b), pointer(out)) is None
    return out


def whole(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Whole numbers, whose sums are exact in any order."""
    depth = 32 if dtype == torch.int8 else 16
    generator = torch.Generator().manual_seed(seed)
    sums = torch.int32 if dtype == torch.int8 else torch.float32
    top = 128 if dtype == torch.int8 else 64
    a, b, c = (torch.randint(-top, top, shape, generator=generator) for shape in ((16, depth), (8, depth), (16, 8)))
    return [a.to(dtype), b.to(dtype), c.to(sums)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_fragments_and_sums(probes: ctypes.CDLL, dtype: torch.dtype) -> None:
    for seed in SEEDS:
        a, b, c = whole(dtype, seed)
        want = c.long()
        for k in range(a.shape[1]):  # the plain loop
            want += a[:, k, None].long() * b[None, :, k].long()
        assert torch.equal(multiply(probes, a, b, c, seed).long(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_cut_off_below_the_greatest_term(probes: ctypes.CDLL, dtype: torch.dtype) -> None:
    a, b, c = (torch.zeros_like(t) for t in whole(dtype, 0))
    a[0, 0], b[0, 0] = 1, 1
    c[0, 0] = 2**24
    assert multiply(probes, a, b, c)[0, 0] == 2**24  # one bit below the sum's last
    a[0, 1], b[0, 1] = 1, 1
    assert multiply(probes, a, b, c)[0, 0] == 2**24 + 2  # eight products are added at once
    a[0, 1], a[0, 8], b[0, 8] = 0, 1, 1
    assert multiply(probes, a, b, c)[0, 0] == 2**24  # and the next eight after them
    a[0, 0], c[0, 0] = -1, -(2**24)
    a[0, 8] = 0
    assert multiply(probes, a, b, c)[0, 0] == -(2**24)  # toward zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_of_random_sums(probes: ctypes.CDLL, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for seed in SEEDS:
        a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (16, 8))
        c = torch.randn(16, 8, generator=generator)
        exact = c.double() + a.double() @ b.double().T
        size = c.abs().double() + a.abs().double() @ b.abs().double().T
        error = (multiply(probes, a, b, c, seed).double() - exact).abs() / size
        assert 0 < float(error.max()) <= 1.4 * 16 * 2.0**-24


def test_values_that_are_not_finite_stay_in_their_column(probes: ctypes.CDLL) -> None:
    a, b, c = whole(torch.bfloat16, 2)
    want = multiply(probes, a, b, c)
    b[3, 5], b[6, 0] = float("nan"), float("inf")
    got = multiply(probes, a, b, c)
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(got[:, others], want[:, others])
    assert got[:, 3].isnan().all() and not got[:, 6].isfinite().any()


def test_less_than_a_warp_is_refused(probes: ctypes.CDLL) -> None:
    a, b, c = whole(torch.int8, 0)
    said = probes.probe_mma_of(17, pointer(a), pointer(b), pointer(c))
    assert said is not None and b"a join of less than a whole warp" in said


@pytest.mark.parametrize("count", [16, 7, 0])
def test_copies_land_when_they_are_waited_for(probes: ctypes.CDLL, count: int) -> None:
    given = torch.randint(1, 256, (2, 32, 16), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    want = given.roll(1, 1)
    want[1, :, count:] = 0

    def right(seed: int) -> bool:
        got = torch.zeros_like(given)
        host.seed(seed)
        assert probes.probe_copies(pointer(given), pointer(got), count) is None
        return torch.equal(got, want)

    host.barriers()
    assert all(right(seed) for seed in SEEDS)
    found = host.barriers()
    assert len(found) == 4
    for barrier in found:
        with host.without(barrier):
            assert not all(right(seed) for seed in SEEDS), barrier


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_grid_barrier_serves_launch_after_launch(probes: ctypes.CDLL, blocks: int) -> None:
    threads = 33
    n = blocks * threads
    barrier = torch.zeros(2, dtype=torch.int32)

    def right(seed: int) -> bool:
        values, out = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
        once = int(values.sum())
        host.seed(seed)
        assert probes.probe_phases(pointer(values), pointer(out), pointer(barrier), blocks, threads) is None
        twice = n * once + once
        return out.tolist() == [twice] * n and values.tolist() == [twice + i for i in range(n)]

    host.barriers()
    assert all(right(seed) for seed in SEEDS)
    found = host.barriers()
    assert len(found) == 4 and barrier.tolist() == [0, 4 * len(SEEDS)]
    for one in found if blocks > 1 else []:
        with host.without(one):
            missed = not all(right(seed) for seed in SEEDS)
        assert missed, one
        barrier.zero_()
