"""T1 preparation over real process groups: every rank gives the bits of one rank with the whole head."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.t1_prep import fused_t1_prep
from tests.ops import t1_prep_ranks
from tests.ops.conftest import INTERPRETED, kernel_backends

ROOT = Path(__file__).parents[2]
BACKENDS = kernel_backends("fused_t1_prep")
CASES = t1_prep_ranks.cases()
SECONDS = 300
BY_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
BY_WORLD = pytest.mark.parametrize("world", [2, 4])


class Ranks:
    """What the four processes left behind."""

    def __init__(self, folder: Path, said: list[str]) -> None:
        results, errors = ([folder / f"{rank}.{end}" for rank in range(4)] for end in ("pt", "error"))
        assert all(r.exists() for r in results), "\n".join(said)
        self.results = [torch.load(r) for r in results]
        self.errors = [torch.load(e) if e.exists() else "" for e in errors]

    def outputs(self, backend: str, world: int, name: str) -> list[tuple[torch.Tensor, ...]]:
        """Of every rank."""
        return [r[backend, world, name][0] for r in self.results]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.t1_prep_ranks", str(rank), str(folder), *BACKENDS],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [child.communicate(timeout=SECONDS)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return Ranks(folder, said)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@functools.cache
def alone(backend: str, name: str) -> tuple[torch.Tensor, ...]:
    case = CASES[name]
    if INTERPRETED:
        from dmtp_kernels.testing import interpreter

        interpreter.install()
    with t1_prep_ranks.forced(backend):
        return fused_t1_prep(case.anchor, case.hidden, case.head, case.table, case.fusion, **case.options)


@BY_BACKEND
@BY_WORLD
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("table cut", "an unproved rank", "states differ")])
def test_every_rank_gives_the_bits_of_one(ranks: Ranks, backend: str, world: int, name: str) -> None:
    want = alone(backend, name)
    for rank, outputs in enumerate(ranks.outputs(backend, world, name)):
        for got, wanted in zip(outputs, want, strict=True):
            assert same(got, wanted), f"rank {rank}: {got} is not {wanted}"


@BY_BACKEND
@BY_WORLD
def test_one_collective(ranks: Ranks, backend: str, world: int) -> None:
    for result in ranks.results:
        counts = {name: result[backend, world, name][1] for name in CASES}
        assert counts == dict.fromkeys(CASES, 1) | {"no request": 0, "table cut, reduced": 2}


@BY_BACKEND
@BY_WORLD
def test_tokens_that_the_cases_are_about(ranks: Ranks, backend: str, world: int) -> None:
    def tokens(name: str) -> list[int]:
        return ranks.outputs(backend, world, name)[-1][0].tolist()

    # sglang#37106: an id above 256 in bf16, above 2^24 in fp32 is rounded
    assert tokens("large ids")[0] == 248_319
    # lattice#280: the lowest id of equal ones, wherever the cut is
    assert tokens("equal maxima on both sides of a cut") == [511, 499, 0, 999, 0]
    assert max(tokens("shards of padding")) < 200
    assert tokens("NaN and zero states")[1::2] == [-1, 0]
    assert min(tokens("a rank of NaN rows")) >= t1_prep_ranks.V // 2
    assert ranks.outputs(backend, world, "a rank of NaN rows")[0][3].all()


@BY_BACKEND
@BY_WORLD
def test_one_unproved_rank_leaves_nothing_proved(ranks: Ranks, backend: str, world: int) -> None:
    certified = alone(backend, "an unproved rank")[3]
    first = ranks.outputs(backend, world, "an unproved rank")[0]
    for outputs in ranks.outputs(backend, world, "an unproved rank"):
        assert not outputs[3].any() and all(same(a, b) for a, b in zip(outputs, first, strict=True))
    assert certified.all() and (first[0] >= t1_prep_ranks.V // world).any(), "a proved rank must win a row"


@BY_BACKEND
@BY_WORLD
def test_blocks_of_a_cut_table_add_up(ranks: Ranks, backend: str, world: int) -> None:
    t1, ids, block, certified = alone(backend, "table cut")
    total, rows = torch.zeros_like(block), t1_prep_ranks.V // world
    for rank, outputs in enumerate(ranks.outputs(backend, world, "table cut")[:world]):
        assert torch.equal(outputs[0], t1) and torch.equal(outputs[1], ids)
        total += outputs[2]
        mine = (t1 >= rank * rows) & (t1 < (rank + 1) * rows)
        assert torch.equal(outputs[3][mine], certified[mine])
    torch.testing.assert_close(total, block, rtol=0, atol=0, equal_nan=True)
    assert block[..., 3].signbit().all(), "the sum of bytes in `reduce_blocks` must have a sign to keep"


@BY_BACKEND
@BY_WORLD
def test_row_133_ranks_whose_states_differ_agree(ranks: Ranks, backend: str, world: int) -> None:
    # sglang#33614: each rank decided alone; a last bit apart, they took other tokens
    case, apart = CASES["states differ"], set()
    for rank in range(world):
        head, options = case.shard(rank, world)
        with use_backend("reference"):
            apart.add(int(fused_t1_prep(case.anchor, options["h_mtp"], head, case.table, case.fusion, mask_id=7)[0]))
    assert apart == {3, 4}, "alone the ranks must disagree"
    got = ranks.outputs(backend, world, "states differ")
    assert all(same(a, b) for outputs in got for a, b in zip(outputs, got[0], strict=True))


def test_a_rank_that_raises_does_not_hang_the_others(ranks: Ranks) -> None:
    assert ranks.errors[0] == "ValueError: mask_id: is 1000, must be in [0, 1000), the rows of the embedding table"
    assert all(error.startswith("RuntimeError") for error in ranks.errors[1:]), ranks.errors
