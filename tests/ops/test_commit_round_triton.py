"""All caches of a round in one launch of the commit's Triton kernel, as a GPU would run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.commit_kv import commit_round
from dmtp_kernels.testing import watch
from dmtp_kernels.testing.capture import capture_safe
from dmtp_kernels.testing.poison import guarded
from tests.ops.commit_round_cases import Cache, call, check, make_cache
from tests.ops.conftest import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with use_backend("triton", "commit_round"), planned_for(132):
        yield


def three(batch: int = 2, **shared: Any) -> list[Cache]:
    """Caches of 4, 5 and 1 layers of which none takes as many heads a program as another."""
    return [
        make_cache(batch, layers=2, heads=5, dims=(100, 72), page_size=4, seed=1, **shared),
        make_cache(batch, layers=3, heads=6, dims=(48, 48), seed=2, **shared),
        make_cache(batch, heads=2, dims=(130, 130), tail=True, seed=3, **shared),
    ]


def test_one_launch_for_all_caches() -> None:
    launched = set()
    with watch.watch(lambda access: launched.add(access.launch)):
        check(commit_round, three(), torch.tensor([8, 3]))
    (launch,) = launched
    assert launch.arguments["STARTS"] == (0, 2, 5, 6) and launch.arguments["GROUP"] == (2, 4, 1)


@pytest.mark.parametrize("seed", range(2))
def test_tiles_of_long_requests_in_few_slots(seed: int) -> None:
    caches = [
        make_cache(2, width=40, heads=1, dims=(4, 4), slots=50, seed=seed),
        make_cache(2, width=40, heads=2, dims=(4, 8), slots=30, page_size=3, tail=True, seed=seed + 9),
    ]
    with watch.shuffled_programs(seed):
        check(commit_round, caches, torch.tensor([40, 17]))


def test_layers_whose_strides_differ_in_one_cache_alone() -> None:
    caches = three()
    for layer, stored in enumerate(caches[1].caches[0]):
        wide = torch.full((*stored.shape[:-1], 48 + layer), float("nan"))[..., :48]
        caches[1].caches[0][layer] = wide.copy_(stored)
    check(commit_round, caches, torch.tensor([5, 8]))


def test_out_form_allocates_nothing_and_stays_inside_its_buffers() -> None:
    caches = three()
    guards = []
    for cache in caches:
        for kind in range(2):
            for layer, stored in enumerate(cache.caches[kind]):
                guards.append(guarded(stored.shape, stored.dtype))
                cache.caches[kind][layer] = guards[-1].tensor.copy_(stored)
    error, hidden = guarded((2,), torch.int32), guarded((2, 40), torch.float32)
    positional, named = call(caches, torch.tensor([4, 8]))
    named["next_hidden"] = hidden.tensor
    for _ in range(2):
        with capture_safe(allocations=False):
            torch.ops.dmtp.commit_round_out(*positional, **named, error=error.tensor)
    error.check()
    hidden.check()
    for guard in guards:
        guard.check(written=False)


def test_only_what_moves_is_read_and_once() -> None:
    from triton.runtime.interpreter import interpreter_builder

    caches = three()
    del caches[-1].options["scratch_dst"]
    moved: dict[tuple[str, str], Counter[int]] = {}
    tiles: dict[object, set[str]] = {}  # whose rows a program loads

    def note(access: watch.Access) -> None:
        owner = access.owner()
        if owner is not None and owner.startswith(("rows", "k_caches", "v_caches")):
            tensor = access.launch.tensors[owner]
            offsets = (access.addresses.astype("int64") - tensor.data_ptr()) // tensor.element_size()
            moved.setdefault((access.kind, owner), Counter()).update(offsets.tolist())
            if owner.startswith("rows"):
                tiles.setdefault(interpreter_builder.grid_idx, set()).add(owner)

    with watch.watch(note):
        check(commit_round, caches, torch.tensor([3, 8]))
    layers = [f"{k}[{i}]" for k in ("rows_k", "rows_v") for i in range(6)]
    assert {owner for kind, owner in moved if kind == "load" and "rows" in owner} == set(layers)
    assert {len(owners) for owners in tiles.values()} == {1}
    assert {n for elements in moved.values() for n in elements.values()} == {1}
    for cache, first in zip(caches, (0, 2, 5), strict=True):
        size = cache.rows[0][0][0, 0].numel()
        rows = {offset // size for offset in moved["load", f"rows_k[{first}]"]}
        assert rows == {0, 1, 2, *range(8, 16)}
        assert len(moved["store", f"k_caches[{first}]"]) == (11 + 2 * (first == 5)) * size
    # of the caches only MTP's is read, where its pending rows are
    read = {owner: elements for (kind, owner), elements in moved.items() if kind == "load" and "caches" in owner}
    assert set(read) == {"k_caches[5]", "v_caches[5]"}
    pending = {offset // (2 * 130) for offset in read["k_caches[5]"]}
    assert pending == set(caches[-1].options["pending_slot"].tolist())
