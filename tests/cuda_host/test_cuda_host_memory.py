"""What the harness makes of memory that blocks of a cluster share, of rows that a warp loads, and what it records."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.cuda_host import host
from tests.cuda_host.fence import Fence

SEEDS = range(30)
CLUSTER = 8
VALUES = 256 * 4  # bytes of the variable that the probes keep in dynamic memory


@pytest.fixture(autouse=True)
def probes() -> ctypes.CDLL:
    library = host.library()
    for name in ("matrices", "cluster", "stragglers", "reach", "accesses"):
        getattr(library, f"probe_{name}").restype = ctypes.c_char_p
    library.probe_cluster.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 3 + [ctypes.c_int64]
    library.probe_reach.argtypes = [ctypes.c_void_p] + [ctypes.c_int] * 3 + [ctypes.c_int64]
    return library


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def test_rows_and_their_transposes(probes: ctypes.CDLL) -> None:
    given = torch.arange(256, dtype=torch.int16).view(4, 8, 8) * 77
    pairs = {0: given.reshape(4, 32, 2), 1: given.transpose(1, 2).reshape(4, 32, 2)}
    for seed in SEEDS:
        got = torch.zeros(2, 32, 4, 2, dtype=torch.int16)  # [plain | transposed, lane, matrix, element]
        host.seed(seed)
        assert probes.probe_matrices(pointer(given), pointer(got), 0, 1) is None
        for which, want in pairs.items():
            assert torch.equal(got[which], want.transpose(0, 1))


@pytest.mark.parametrize(
    ("skipped", "shared", "said"), [(2, 1, "is not a multiple of 16"), (0, 0, "not shared memory")]
)
def test_rows_at_other_addresses_are_refused(probes: ctypes.CDLL, skipped: int, shared: int, said: str) -> None:
    given, got = torch.zeros(264, dtype=torch.int16), torch.zeros(512, dtype=torch.int16)
    assert given.data_ptr() % 16 == 0
    assert said in probes.probe_matrices(pointer(given), pointer(got), skipped, shared).decode()


def clusters(library: ctypes.CDLL, seed: int, blocks: int = 3 * CLUSTER, threads: int = 40) -> str | None:
    """Null, what the launch said, or `wrong`."""
    given = torch.randint(0, 1000, (blocks, threads), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    got = torch.zeros_like(given)
    host.seed(seed)
    said = library.probe_cluster(pointer(given), pointer(got), blocks, CLUSTER, threads, VALUES)
    if said is not None:
        return str(said.decode())
    each = given.view(-1, CLUSTER, threads)
    before = (torch.arange(CLUSTER, dtype=torch.int32) - 1) % CLUSTER
    left = 1000 * before[:, None] + each.roll(-1, 2)
    want = 1000 * left + each.roll(-2, 1)
    return None if torch.equal(got.view_as(each), want) else "wrong"


def test_blocks_of_a_cluster_share_memory(probes: ctypes.CDLL) -> None:
    host.barriers()
    assert [clusters(probes, seed) for seed in SEEDS] == [None] * len(SEEDS)
    assert len(host.barriers()) == 3


def test_every_removed_cluster_barrier_fails_on_some_schedule(probes: ctypes.CDLL) -> None:
    host.barriers()
    assert clusters(probes, 0) is None
    first, middle, last = sorted(host.barriers(), key=lambda name: int(name.split(":")[1]))
    said = {}
    for barrier in (first, middle, last):
        with host.without(barrier):
            said[barrier] = [str(clusters(probes, seed)) for seed in SEEDS]
    assert "wrong" in said[middle]
    for one in (first, last):
        assert any("shared memory of a block that has not begun, or has ended, at" in found for found in said[one])
    assert clusters(probes, 0) is None


def test_threads_that_have_returned_are_not_waited_for(probes: ctypes.CDLL) -> None:
    threads = 34
    some = torch.arange(threads) % 3 != 1
    want = 10 * (torch.arange(16)[:, None] % CLUSTER ^ 1) + torch.arange(threads)
    for seed in SEEDS:
        got = torch.full((16, threads), -1, dtype=torch.int32)
        host.seed(seed)
        assert probes.probe_stragglers(pointer(got), 16, threads, 0) is None
        assert torch.equal(got[:, some].long(), want[:, some]) and (got[:, ~some] == -1).all()


def test_threads_that_wait_elsewhere_are_named(probes: ctypes.CDLL) -> None:
    got = torch.zeros(8, 34, dtype=torch.int32)
    for seed in range(4):
        host.seed(seed)
        said = probes.probe_stragglers(pointer(got), 8, 34, 1).decode()
        start, *sites = said.rsplit(" ", 2)
        assert start == "threads wait for others that never come:", said
        assert all(site.startswith("probes_memory.cu:") for site in sites) and len(set(sites)) == 2


@pytest.mark.parametrize(
    ("seed", "rank", "foreign", "said"),
    [
        (0, 7, False, None),  # which is the last to end
        (1, 7, False, "shared memory of a block that has ended"),  # the first
        (0, 8, False, "no block 8 in its cluster"),
        (0, 1, True, "not shared memory of its block"),
    ],
)
def test_what_can_be_reached(probes: ctypes.CDLL, seed: int, rank: int, foreign: bool, said: str | None) -> None:
    other = torch.zeros(4, dtype=torch.int32)
    host.seed(seed)
    got = probes.probe_reach(pointer(other) if foreign else None, rank, 0, CLUSTER, 100)
    assert got is None if said is None else said in got.decode()


@pytest.mark.parametrize("bytes_", [1, 100, 128, 4096, 227 * 1024 - VALUES])
def test_a_write_beyond_dynamic_memory_is_caught(probes: ctypes.CDLL, bytes_: int) -> None:
    for at in (0, bytes_ - 1):
        assert probes.probe_reach(None, -1, at, 1, bytes_) is None
    for at in (-1, bytes_, bytes_ + 200):
        said = probes.probe_reach(None, -1, at, 1, bytes_)
        assert said is not None and (b"outside of" in said), at
    assert probes.probe_reach(None, -1, 0, 1, bytes_) is None


@pytest.mark.parametrize(
    ("blocks", "cluster", "bytes_", "said"),
    [
        (12, 8, VALUES, "a grid that clusters do not fill"),
        (16, 16, VALUES, "a cluster of more than eight blocks"),
        (8, 8, 227 * 1024 + 1, "more dynamic shared memory than a block has"),
        (8, 8, VALUES - 1, "more dynamic shared memory than the launch asked for"),
        (8, 8, 227 * 1024 - VALUES + 1, "more shared memory than a block has"),  # beside a static variable
        (8, 8, 227 * 1024 - VALUES, None),
    ],
)
def test_what_a_launch_may_ask_for(
    probes: ctypes.CDLL, blocks: int, cluster: int, bytes_: int, said: str | None
) -> None:
    given, out = torch.zeros(2, blocks, 4, dtype=torch.int32)
    got = probes.probe_cluster(pointer(given), pointer(out), blocks, cluster, 4, bytes_)
    assert got is None if said is None else said in got.decode()


def test_the_device_that_is_claimed(probes: ctypes.CDLL) -> None:
    shared = ctypes.c_int64()
    assert probes.probe_device(ctypes.byref(shared)) == 132 and shared.value == 232448
    with host.processors(7):
        assert probes.probe_device(ctypes.byref(shared)) == 7
    assert probes.probe_device(ctypes.byref(shared)) == 132


DTYPES = {torch.float32: 1, torch.float64: 2, torch.float16: 3, torch.bfloat16: 4, torch.int64: 7, torch.int32: 8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [16, 5, 0])
def test_accesses_are_recorded(probes: ctypes.CDLL, dtype: torch.dtype, count: int) -> None:
    blocks = 2
    read, written = torch.arange(64).to(dtype), torch.zeros(64, dtype=dtype)
    pieces, copied = torch.ones(64, 16, dtype=torch.uint8), torch.zeros(64, 16, dtype=torch.uint8)

    def launch() -> None:
        host.seed(3)
        said = probes.probe_accesses(DTYPES[dtype], *map(pointer, (read, written, pieces, copied)), blocks, count)
        assert said is None

    launch()
    with host.recorded() as accesses:
        assert len(accesses()) == 0
        launch()
        launch()
    got = accesses()
    launch()
    assert np.array_equal(accesses(), got)
    want = set()
    for number in range(2):
        for i in range(64):
            for tensor, size, store in ((read, 0, 0), (written, 0, 1), (pieces, count, 0), (copied, 16, 1)):
                row = tensor.stride(0) * tensor.element_size()
                if size or tensor.dim() == 1:
                    want.add((tensor.data_ptr() + i * row, size or row, i // 32, number, store))
    assert len(got) == len(want) and set(got.tolist()) == want
    assert torch.equal(written, read) and copied.sum() == 64 * count


def test_a_misaligned_access_is_named(probes: ctypes.CDLL) -> None:
    tensors = [torch.zeros(64, 16, dtype=torch.uint8) for _ in range(4)]
    read, written, pieces, copied = map(pointer, tensors)
    for name, address in (("read", read), ("pieces", pieces)):
        assert address.value is not None
        address.value += 2
        said = probes.probe_accesses(DTYPES[torch.int64], read, written, pieces, copied, 1, 16)
        assert f"is not a multiple of {8 if name == 'read' else 16}" in said.decode()
        address.value -= 2


def test_accesses_outside_are_recorded_before_they_fail(probes: ctypes.CDLL) -> None:
    fence = Fence(31 * 4, True)
    others = [torch.zeros(64, 16, dtype=torch.uint8) for _ in range(3)]
    host.seed(0)
    with host.recorded() as accesses:
        said = probes.probe_accesses(DTYPES[torch.int32], pointer(fence.inside), *map(pointer, others), 1, 16)
    assert said is not None and b"outside of memory" in said
    assert int(accesses()["address"].max()) >= fence.inside.data_ptr()
