"""The commit's Triton kernel as a GPU would launch it: one launch, tiles of rows and heads, programs in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.commit_kv.config import MAX_ROWS, CacheShape, commit_config
from dmtp_kernels.testing import watch
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.poison import guarded
from tests.ops.commit_kv_oracle import model, same
from tests.ops.conftest import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with use_backend("triton", "commit_kv"), planned_for(132):
        yield


def inputs(
    batch: int, width: int, heads: int, dims: tuple[int, int], layers: int, *, slots: int = 0, seed: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Every argument of a round; `slots` > 0: that many for all, so that requests and rows meet in them."""
    generator = torch.Generator().manual_seed(seed)
    per_request = 2 * width + 2
    count = slots or batch * per_request
    rows = [[torch.randn(batch, width, heads, d, generator=generator) for _ in range(layers)] for d in dims]
    caches = [[torch.randn(count, heads, d, generator=generator) for _ in range(layers)] for d in dims]
    if slots:
        used = torch.randint(-1, slots + 1, (batch, per_request), generator=generator)
    else:
        used = torch.randperm(count, generator=generator).view(batch, per_request)
    valid = torch.randint(1, width + 1, (batch,), generator=generator)
    named = {
        "pending_slot": used[:, -1],
        "promote_dst": used[:, -2],
        "scratch_dst": used[:, width : 2 * width],
        "hidden": torch.randn(batch, width, 1500, generator=generator),
        "next_hidden": torch.zeros(batch, 1500),
        "lengths": torch.arange(batch),
    }
    return [*rows, *caches, valid, used[:, :width]], named


def expected(positional: list[Any], named: dict[str, Any]) -> list[tuple[torch.Tensor, list[int]]]:
    valid, dst = positional[4:]
    given = {
        "pending": named["pending_slot"].tolist(),
        "promote": named["promote_dst"].tolist(),
        "scratch": named["scratch_dst"],
    }
    pairs = zip([*positional[0], *positional[1]], [*positional[2], *positional[3]], strict=True)
    return [model(rows, cache, valid.tolist(), dst, **given) for rows, cache in pairs]


def check(positional: list[Any], named: dict[str, Any]) -> None:
    want = expected(positional, named)
    hidden, lengths = named["hidden"].clone(), named["lengths"].clone()
    error = commit_kv(*positional, **named)
    for cache, (after, errors) in zip([*positional[2], *positional[3]], want, strict=True):
        assert same(cache, after)
        assert error.tolist() == errors
    valid = positional[4]
    assert torch.equal(named["next_hidden"], hidden[torch.arange(len(valid)), valid - 1])
    assert torch.equal(named["lengths"], lengths + valid)


def test_one_launch_for_all_layers_and_everything_else() -> None:
    # 3 layers of 5 heads, two a program, K of 100 elements padded, V narrower, hidden in two parts
    positional, named = inputs(2, 8, 5, (100, 72), 3)
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        check(positional, named)
    (launch,) = launched
    config = commit_config(8, [CacheShape(5, 100, 4, True)], False)
    assert (config.heads, config.columns) == ((2,), 1024)
    assert len(launch.arguments["rows_k"]) == 3 and launch.arguments["PARTS"] == 2


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_several_programs(seed: int) -> None:
    # 70 rows are three tiles; slots are few, so pending slots are overwritten by rows of other tiles and requests
    width = 2 * MAX_ROWS + 6
    positional, named = inputs(2, width, 1, (4, 4), 1, slots=60, seed=seed)
    check(positional, named)


@pytest.mark.parametrize("row", [40, 69])
def test_a_pending_slot_that_a_row_of_another_tile_overwrites(row: int) -> None:
    # row 2 is the pending row, in the first tile; a scratch row of the second or third goes to the same slot
    width = 2 * MAX_ROWS + 6
    for seed in range(6):  # of the order of the programs
        positional, named = inputs(1, width, 1, (4, 4), 1)
        positional[4][:] = 3
        named["scratch_dst"][0, row] = named["pending_slot"][0]
        old = positional[2][0][named["pending_slot"][0]].clone()
        with watch.shuffled_programs(seed):
            check(positional, named)
        assert torch.equal(positional[2][0][named["promote_dst"][0]], old)


def test_many_requests_are_looked_at_in_parts() -> None:
    # 24 requests of 8 rows are two looks at 128 writes; the last request overwrites the first one's slots
    positional, named = inputs(24, 8, 1, (8, 8), 1)
    positional[4][:] = 8
    positional[5][23] = positional[5][0].flip(0)
    named["promote_dst"][23] = named["promote_dst"][5]
    check(positional, named)


@pytest.mark.parametrize("kind", ["rows", "caches"])
def test_layers_of_different_strides(kind: str) -> None:
    positional, named = inputs(2, 4, 2, (8, 8), 3)
    for layer in (0, 1, 2):
        for lists in positional[:2] if kind == "rows" else positional[2:4]:
            wide = torch.full((*lists[layer].shape[:-1], 8 + layer), float("nan"))[..., :8]
            lists[layer] = wide.copy_(lists[layer])
    check(positional, named)


def test_out_form_allocates_nothing_and_stays_inside_its_buffers() -> None:
    positional, named = inputs(3, 8, 2, (16, 16), 2)
    caches = [guarded(c.shape, c.dtype) for c in (*positional[2], *positional[3])]
    positional[2:4] = [c.tensor for c in caches[:2]], [c.tensor for c in caches[2:]]
    buffer, hidden = guarded((3,), torch.int32), guarded((3, 1500), torch.float32)
    named["next_hidden"] = hidden.tensor
    for _ in range(2):
        with capture_safe(allocations=False):
            torch.ops.dmtp.commit_kv_out(*positional, **named, error=buffer.tensor)
    buffer.check()
    hidden.check()
    for cache in caches:
        cache.check(written=False)


def test_only_what_moves_is_read() -> None:
    # rows that go nowhere, hidden rows that are not chosen and cache rows that are not promoted may be on the moon
    positional, named = inputs(2, 8, 1, (8, 8), 1)
    positional[4][:] = torch.tensor([3, 8])
    del named["scratch_dst"]
    read: dict[str, set[int]] = {}

    def note(access: watch.Access) -> None:
        owner = access.owner()
        if access.kind == "load" and owner is not None and access.launch.tensors[owner].dim() > 2:
            tensor = access.launch.tensors[owner]
            offsets = (access.addresses.astype("int64") - tensor.data_ptr()) // tensor.element_size()
            read.setdefault(owner, set()).update((offsets // tensor.stride(-2)).tolist())

    with watch.watch(note):
        commit_kv(*positional, **named)
    assert read["rows_k[0]"] == read["rows_v[0]"] == {0, 1, 2, *range(8, 16)}
    assert read["hidden_ptr"] == {2, 15}
    assert read["k_caches[0]"] == set(named["pending_slot"].tolist())
