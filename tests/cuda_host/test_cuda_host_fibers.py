"""What the harness that runs CUDA sources on the CPU finds, and that what it computes is what CUDA's words mean."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.cuda_host import host
from tests.cuda_host.fence import Fence

SEEDS = range(60)


@pytest.fixture(autouse=True)
def probes() -> ctypes.CDLL:
    library = host.library()
    for name in ("neighbours", "warp", "lanes", "grid", "divergent", "write"):
        getattr(library, f"probe_{name}").restype = ctypes.c_char_p
    return library


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def neighbours(library: ctypes.CDLL, seed: int, n: int = 96) -> bool:
    given = torch.randint(0, 1000, (3, n), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    got = torch.zeros_like(given)
    host.seed(seed)
    assert library.probe_neighbours(pointer(given), pointer(got), 3, n) is None
    return torch.equal(got, given.roll(-1, 1) + given.roll(-2, 1))


def test_barriers_hold_under_every_schedule(probes: ctypes.CDLL) -> None:
    assert all(neighbours(probes, seed) for seed in SEEDS)


def test_every_removed_barrier_fails_on_some_schedule(probes: ctypes.CDLL) -> None:
    host.barriers()
    neighbours(probes, 0)
    found = host.barriers()
    assert len(found) == 3
    for barrier in found:
        with host.without(barrier):
            assert not all(neighbours(probes, seed) for seed in range(10)), barrier
    assert all(neighbours(probes, seed) for seed in range(10))


def test_a_removed_warp_barrier_fails_on_some_schedule(probes: ctypes.CDLL) -> None:
    given = torch.arange(64, dtype=torch.int32)

    def right(seed: int) -> bool:
        got = torch.zeros_like(given)
        host.seed(seed)
        assert probes.probe_warp(pointer(given), pointer(got), 64) is None
        return torch.equal(got, given.view(2, 32).roll(1, 1).flatten())

    host.barriers()
    assert all(right(seed) for seed in SEEDS)
    (barrier,) = host.barriers()
    with host.without(barrier):
        assert not all(right(seed) for seed in range(10))


@pytest.mark.parametrize("n", [32, 31, 9])
def test_shuffles_and_votes(probes: ctypes.CDLL, n: int) -> None:
    given = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    values, active = given[:n].tolist(), (1 << n) - 1
    if n == 32:
        sums = [sum(values)] * n
    else:
        sums = values
        for step in (16, 8, 4, 2, 1):
            sums = [own + (sums[i ^ step] if i ^ step < n else 0) for i, own in enumerate(sums)]
    want = [
        [
            sums[i],
            values[3] << 33,
            sum(1 << j for j in range(n) if values[j] % 3 == 0),
            sum(1 << j for j in range(n) if values[j] % 5 == values[i] % 5),
            int(7 in values) + 2,
            values[i - 2] if i >= 2 else values[i],
            None if i + 1 == n < 32 else values[min(i + 1, n - 1)],  # from a lane that has left
            active.bit_count() + 100 + 10000 * (32 - i.bit_length()),
        ]
        for i in range(n)
    ]
    for seed in SEEDS:
        got = torch.full((32, 8), -5, dtype=torch.int64)
        host.seed(seed)
        assert probes.probe_lanes(pointer(given), pointer(got), n) is None
        for i, row in enumerate(want):
            assert [g if w is not None else None for g, w in zip(got[i].tolist(), row, strict=True)] == row
        assert (got[n:] == -5).all()


def test_atomics_and_a_barrier_of_the_grid(probes: ctypes.CDLL) -> None:
    blocks, n = 5, 64
    given = torch.randint(0, 1000, (blocks, n), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    for seed in SEEDS:
        partial, count, out = (torch.zeros(k, dtype=torch.int32) for k in (blocks, 1, blocks))
        host.seed(seed)
        assert probes.probe_grid(*map(pointer, (given, partial, count, out)), blocks, n) is None
        assert out.tolist() == [int(given.sum())] * blocks and int(count) == blocks
        assert host.launches() == 1


def test_lanes_that_wait_at_different_places_are_named(probes: ctypes.CDLL) -> None:
    message = probes.probe_divergent().decode()
    assert message.startswith("threads wait for others that never come: ballot probes.cu:"), message


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("size", [40, 4096])
def test_a_write_outside_is_caught(probes: ctypes.CDLL, size: int, at_end: bool) -> None:
    for at in (-1, size):
        fence = Fence(size, at_end)
        said = probes.probe_write(pointer(fence.inside), at, 1)
        if said is None:
            with pytest.raises(AssertionError, match=f"1 bytes outside were written, the first at {at}"):
                fence.check()
        else:
            assert said.startswith(b"thread 0,0,0 of block 0,0,0: an access outside of memory, at 0x")
            fence.check()
    fence = Fence(size, at_end)
    assert probes.probe_write(pointer(fence.inside), 0, 40) is None
    fence.check()
    assert (fence.inside[:40] == 1).all()
