"""commit_kv against a dictionary model of the caches: aliasing, duplicates, strides, dtypes, bad arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.commit_kv import BAD_OWNER, BAD_SLOT, commit_kv
from tests.ops.commit_kv_oracle import model, same
from tests.ops.conftest import INTERPRETED

KERNEL_OPS = ("commit_kv",)
R, HKV, D, H = 8, 2, 4, 6
NAN = float("nan")


def _rows(batch: int, seed: int = 0, **kwargs: Any) -> torch.Tensor:
    return torch.randn(batch, R, HKV, D, generator=torch.Generator().manual_seed(seed), **kwargs)


def test_row_103_the_last_row_wins_a_shared_slot() -> None:
    rows = _rows(3)
    dst = torch.arange(24).view(3, 8)
    dst[0, 5] = dst[0, 2] = 30  # inside one request
    dst[2, 0] = dst[1, 1]  # between requests
    want, _ = model(rows, torch.zeros(32, HKV, D), [8, 8, 8], dst)
    assert torch.equal(want[30], rows[0, 5]) and torch.equal(want[9], rows[2, 0])
    for _ in range(10 if INTERPRETED else 1000):
        cache = torch.zeros(32, HKV, D)
        commit_kv([rows], [rows], [cache], [cache.clone()], torch.tensor([8, 8, 8]), dst)
        assert torch.equal(cache, want)


def test_promoted_rows_lose_against_the_rounds_rows() -> None:
    # request 0 promotes into the slot that request 1's first row goes to
    rows = _rows(2)
    cache = torch.arange(10.0)[:, None, None].expand(10, HKV, D).clone()
    error = commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.clone()],
        torch.tensor([1, 2]),
        torch.tensor([[9] * R, [6] * R]),
        pending_slot=torch.tensor([2, 5]),
        promote_dst=torch.tensor([6, 7]),
    )
    assert error.tolist() == [0, 0]
    assert torch.equal(cache[2], rows[0, 0]) and torch.equal(cache[5], rows[1, 1])
    assert torch.equal(cache[6], rows[1, 0]) and cache[7].eq(5).all() and cache[9].eq(9).all()


@pytest.mark.parametrize("by", ["promotion", "row", "pending"])
def test_a_pending_slot_that_another_request_writes_is_not_promoted(by: str) -> None:
    # request 1's pending row sits in slot 5
    rows = _rows(2)
    cache = torch.arange(10.0)[:, None, None].expand(10, HKV, D).clone()
    dst = torch.tensor([[9] * R, [8] * R])
    if by == "row":
        dst[0, 0] = 5
    error = commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.clone()],
        torch.tensor([2, 1]),
        dst,
        pending_slot=torch.tensor([5 if by == "pending" else 2, 5]),
        promote_dst=torch.tensor([5 if by == "promotion" else 3, 7]),
    )
    # two requests that share a pending slot both lose its row
    assert error.tolist() == [BAD_OWNER if by == "pending" else 0, BAD_OWNER]
    assert cache[7].eq(7).all() and torch.equal(cache[5], rows[1, 0])
    assert cache[3].eq(2 if by == "row" else 3).all()


def test_padded_requests_may_share_a_sink() -> None:
    # slot 0 in every place of requests 1 and 2: promoting it onto itself is no promotion
    rows, cache = _rows(3), torch.zeros(30, HKV, D)
    dst = torch.zeros(3, R, dtype=torch.int64)
    dst[0] = torch.arange(1, R + 1)
    error = commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.clone()],
        torch.tensor([2, 1, 1]),
        dst,
        pending_slot=torch.tensor([20, 0, 0]),
        promote_dst=torch.tensor([21, 0, 0]),
        scratch_dst=torch.zeros(3, R, dtype=torch.int64),
    )
    assert error.tolist() == [0, 0, 0]
    assert torch.equal(cache[1], rows[0, 0]) and torch.equal(cache[20], rows[0, 1])
    assert torch.equal(cache[0], rows[2, R - 1])


def test_rows_may_live_in_the_caches_own_scratch() -> None:
    # the forward wrote its rows to slots 8..15 of the cache it commits into; the pending slot is one of them
    cache = torch.randn(24, HKV, D)
    rows = cache[8:16][None]
    copy = rows.clone()
    scratch = torch.arange(8, 16).flip(0)[None]
    arguments: dict[str, Any] = {
        "pending_slot": torch.tensor([9]),
        "promote_dst": torch.tensor([0]),
        "scratch_dst": scratch,
    }
    valid, dst = torch.tensor([4]), torch.arange(1, 9)[None]
    want, _ = model(copy, cache, [4], dst, pending=[9], promote=[0], scratch=scratch)
    commit_kv([rows], [copy], [cache], [cache.clone()], valid, dst, **arguments)
    assert torch.equal(cache, want)


def test_slots_beyond_the_cache_flag_and_skip_only_themselves() -> None:
    rows = _rows(3)
    cache = torch.zeros(16, HKV, D)
    dst = torch.full((3, R), 2**40)
    dst[:, 0], dst[0, 1], dst[1, 1] = torch.tensor([0, 4, 8]), 1, 16
    error = commit_kv([rows], [rows], [cache], [cache.clone()], torch.tensor([2, 2, 1]), dst)
    # slots of rows that are not committed are garbage and never looked at
    assert error.tolist() == [0, BAD_SLOT, 0]
    assert torch.equal(cache[[0, 1, 4, 8]], torch.stack((rows[0, 0], rows[0, 1], rows[1, 0], rows[2, 0])))
    assert cache.abs().sum(dim=(1, 2)).count_nonzero() == 4


@pytest.mark.parametrize("seed", range(25))
def test_random_commits_equal_the_dictionary_model(seed: int) -> None:
    """Everything at once: K wider than V, two layers, odd sizes, duplicates, skips, bad counts and slots, dead rows."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, width, slots = int(rng.integers(1, 6)), int(rng.integers(1, 10)), int(rng.integers(1, 40))
    first_slot = int(rng.integers(0, 3))
    index = torch.int32 if seed % 2 else torch.int64
    layers = [[torch.randn(batch, width, 3, d, generator=generator) for _ in range(2)] for d in (5, 3)]
    caches = [[torch.randn(slots, 3, d + 2, generator=generator)[..., :d] for _ in range(2)] for d in (5, 3)]
    valid = torch.tensor(rng.integers(-2, width + 3, batch), dtype=index)
    dst, scratch = (torch.tensor(rng.integers(-3, slots + 2, (batch, width)), dtype=index) for _ in range(2))
    pending, promote = (torch.tensor(rng.integers(-2, slots + 2, batch), dtype=index) for _ in range(2))
    live = torch.tensor(rng.random(batch) < 0.8)
    kwargs: dict[str, Any] = {"first_slot": first_slot}
    expected: dict[str, Any] = {"first_slot": first_slot}
    if rng.random() < 0.7:
        kwargs |= {"pending_slot": pending, "promote_dst": promote}
        expected |= {"pending": pending.tolist(), "promote": promote.tolist()}
    if rng.random() < 0.7:
        kwargs["scratch_dst"] = expected["scratch"] = scratch
    if rng.random() < 0.7:
        kwargs["live"], expected["live"] = live, live.tolist()
    want = [
        [model(r, c, valid.tolist(), dst, **expected) for r, c in zip(*kind, strict=True)]
        for kind in zip(layers, caches, strict=True)
    ]
    error = commit_kv(layers[0], layers[1], caches[0], caches[1], valid, dst, **kwargs)
    for kind, wanted in zip(caches, want, strict=True):
        for cache, (after, errors) in zip(kind, wanted, strict=True):
            assert torch.equal(cache, after)
            assert error.tolist() == errors


def test_paged_caches_of_any_strides_equal_flat_ones() -> None:
    # K and V interleaved in one allocation with heads outside tokens: no flat view exists
    pages, size = 5, 4
    whole = torch.full((pages, HKV, size, 2 * D), NAN)
    k, v = whole.transpose(1, 2).split(D, dim=-1)
    flat_k, flat_v = torch.full((pages * size, HKV, D), NAN), torch.full((pages * size, HKV, D), NAN)
    rows = _rows(2)
    valid, dst = torch.tensor([5, 3]), torch.randperm(20)[:16].view(2, 8)
    commit_kv([rows], [-rows], [k], [v], valid, dst)
    commit_kv([rows], [-rows], [flat_k], [flat_v], valid, dst)
    assert same(k.reshape(20, HKV, D), flat_k) and same(v.reshape(20, HKV, D), flat_v)


def test_addresses_need_64_bits() -> None:
    # slot stride 2^28 elements: slot 8 starts at 2^31. NumPy's empty commits no memory, and nothing is filled here
    cache = torch.from_numpy(np.empty(8 * 2**28 + HKV * D, dtype=np.float16)).as_strided((9, HKV, D), (2**28, D, 1))
    rows = _rows(1, dtype=torch.float16)
    small = torch.zeros(1, dtype=torch.float16).expand(9, HKV, D).clone()
    commit_kv([rows[:, :2]], [rows[:, :2]], [cache], [small], torch.tensor([2]), torch.tensor([[8, 7]]))
    assert torch.equal(cache[8], rows[0, 0]) and torch.equal(cache[7], rows[0, 1])


def test_other_dtypes_round_to_the_caches_and_promotion_copies_bits() -> None:
    cache = torch.randn(6, HKV, D).to(torch.bfloat16)
    old = cache[1].clone()
    rows = _rows(1, dtype=torch.float64)
    commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.float()],
        torch.tensor([2]),
        torch.full((1, R), 3),
        pending_slot=torch.tensor([1]),
        promote_dst=torch.tensor([2]),
    )
    assert torch.equal(cache[2], old)
    assert torch.equal(cache[3], rows[0, 0].to(torch.bfloat16)) and torch.equal(cache[1], rows[0, 1].to(torch.bfloat16))


def test_strided_vectors_and_empty_sizes() -> None:
    table = torch.tensor([[7, 0], [8, 1]])
    cache, rows = torch.zeros(10, HKV, D), _rows(2)
    commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.clone()],
        torch.tensor([1, 1]),
        torch.zeros(2, R, dtype=torch.int64),
        pending_slot=table[:, 0],
        promote_dst=table[:, 1] - 5,
    )
    assert torch.equal(cache[7:9], rows[:, 0])
    none = torch.zeros(0, dtype=torch.int64)
    assert commit_kv([rows[:0]], [rows[:0]], [cache], [cache.clone()], none, none.view(0, R)).shape == (0,)
    empty = torch.zeros(0, HKV, D)
    error = commit_kv(
        [rows], [rows], [empty], [empty.clone()], torch.tensor([1, 0]), torch.zeros(2, R, dtype=torch.int64)
    )
    assert error.tolist() == [BAD_SLOT, 0]


def _arguments() -> dict[str, Any]:
    rows, cache = _rows(2), torch.zeros(9, HKV, D)
    return {
        "rows_k": [rows],
        "rows_v": [rows],
        "k_caches": [cache],
        "v_caches": [cache.clone()],
        "valid": torch.tensor([1, 1]),
        "dst": torch.zeros(2, R, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"valid": torch.tensor([1.0, 1.0])}, TypeError, "valid: dtype"),
        ({"dst": torch.zeros(2, R - 1, dtype=torch.int64)}, ValueError, r"rows_k\[0\]: dimension 1 \(R\)"),
        ({"dst": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "dst: has no rows"),
        ({"rows_k": [], "k_caches": []}, ValueError, "rows_k: has 0 layers"),
        ({"v_caches": []}, ValueError, "v_caches: has 0 layers, must be 1"),
        (
            {"v_caches": [torch.zeros(8, HKV, D)]},
            ValueError,
            r"v_caches\[0\]: dimension 0 \(num_slots\) is 8, must be 9",
        ),
        (
            {"k_caches": [torch.zeros(9, HKV, 2 * D)[..., ::2]]},
            ValueError,
            r"k_caches\[0\]: last dimension has stride 2",
        ),
        ({"k_caches": [torch.zeros(9, HKV, D, dtype=torch.int8)]}, TypeError, "k_caches: dtype is torch.int8"),
        ({"k_caches": [torch.zeros(3, 3, HKV, D)]}, ValueError, "v_caches: has 3 dimensions, must be 4"),
        (
            {"pending_slot": torch.tensor([1, 1])},
            ValueError,
            "promote_dst: is None, must be given together with pending_slot",
        ),
        ({"next_hidden": torch.zeros(2, H)}, ValueError, "hidden: is None"),
        ({"hidden": torch.zeros(2, R, H), "next_hidden": torch.zeros(2, H).half()}, TypeError, "next_hidden: dtype"),
        ({"scratch_dst": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"scratch_dst: dimension 1 \(R\)"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, ValueError, r"lengths: dimension 0 \(B\)"),
        ({"live": torch.ones(2, dtype=torch.int32)}, TypeError, "live: dtype"),
        ({"first_slot": -1}, ValueError, "first_slot: is -1"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        commit_kv(**(_arguments() | change))
