"""commit_kv against a dictionary model of the caches, on poisoned pools, and the public reports of wrong commits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.commit_kv import BAD_COUNT, BAD_SLOT, commit_kv

R, HKV, D, H = 8, 2, 4, 6
NAN = float("nan")


def _model(
    rows: torch.Tensor,
    cache: torch.Tensor,
    valid: list[int],
    dst: torch.Tensor,
    *,
    pending: list[int] | None = None,
    promote: list[int] | None = None,
    scratch: torch.Tensor | None = None,
    live: list[bool] | None = None,
    first_slot: int = 0,
) -> tuple[torch.Tensor, list[int]]:
    """One cache after the commit and the error bits, slot by slot in plain Python."""
    before = {slot: cache[slot].clone() for slot in range(len(cache))}
    after = dict(before)
    errors = [0] * len(valid)
    writes: list[tuple[int, int, torch.Tensor]] = []
    counts = []
    for b, count in enumerate(valid):
        if live is not None and not live[b]:
            counts.append(0)
            continue
        if not 0 <= count <= rows.shape[1]:
            errors[b] |= BAD_COUNT
        counts.append(min(max(count, 0), rows.shape[1]))
        if counts[b] and pending is not None and promote is not None and first_slot <= pending[b] < len(cache):
            writes.append((b, promote[b], before[pending[b]]))
    for b, count in enumerate(counts):
        for j in range(rows.shape[1] if count else 0):
            if j == count - 1 and pending is not None:
                slot = pending[b]
            elif j < count:
                slot = int(dst[b, j])
            else:
                slot = -1 if scratch is None else int(scratch[b, j])
            writes.append((b, slot, rows[b, j].clone()))
    for b, slot, value in writes:
        if slot >= len(cache):
            errors[b] |= BAD_SLOT
        elif slot >= first_slot:
            after[slot] = value.to(cache.dtype)
    return torch.stack([after[slot] for slot in range(len(cache))]), errors


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def _rows(batch: int, seed: int = 0, **kwargs: Any) -> torch.Tensor:
    return torch.randn(batch, R, HKV, D, generator=torch.Generator().manual_seed(seed), **kwargs)


class Pool:
    """Caches filled with NaN and one request's slots in them: history 0..39 behind a guard, pending, scratch."""

    def __init__(self, batch: int = 1, slots: int = 64) -> None:
        self.k = torch.full((batch * slots, HKV, D), NAN)
        self.v = torch.full((batch * slots, HKV, D), NAN)
        base = torch.arange(batch)[:, None] * slots
        self.history = base + torch.arange(4, 44)
        self.pending = (base + 50)[:, 0]
        self.scratch = base + torch.arange(52, 60)
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.next_hidden = torch.full((batch, H), NAN)

    def commit(
        self, rows: torch.Tensor, valid: list[int], hidden: torch.Tensor | None = None, **overrides: Any
    ) -> torch.Tensor:
        """Unshifted indexing: the pending row sits at position length - 1, row j goes to position length + j."""
        offsets = self.lengths[:, None] + torch.arange(R)
        promote = self.history.gather(1, (self.lengths - 1).clamp(min=0)[:, None])[:, 0]
        arguments: dict[str, Any] = {
            "pending_slot": self.pending,
            "promote_dst": torch.where(self.lengths > 0, promote, -1),
            "scratch_dst": self.scratch,
            "lengths": self.lengths,
        }
        if hidden is not None:
            arguments |= {"hidden": hidden, "next_hidden": self.next_hidden}
        count = torch.tensor(valid)
        return commit_kv(
            [rows], [-rows], [self.k], [self.v], count, self.history.gather(1, offsets), **(arguments | overrides)
        )


@pytest.mark.parametrize("accepted", range(8))
def test_row_086_history_pending_scratch_over_two_rounds(accepted: int) -> None:
    pool = Pool()
    first, second = _rows(1, 1), _rows(1, 2)
    hidden = torch.randn(1, R, H)
    error = pool.commit(first, [accepted + 1], hidden)
    assert error.tolist() == [0] and pool.lengths.tolist() == [accepted + 1]
    assert torch.equal(pool.next_hidden[0], hidden[0, accepted])
    for cache, sign in ((pool.k, 1), (pool.v, -1)):
        assert torch.equal(cache[pool.history[0, :accepted]], sign * first[0, :accepted])
        assert torch.equal(cache[pool.pending[0]], sign * first[0, accepted])
        assert torch.equal(cache[pool.scratch[0, accepted + 1 :]], sign * first[0, accepted + 1 :])
        assert cache.isnan().all(dim=(1, 2)).sum() == len(cache) - R  # nothing else was touched

    pool.commit(second, [3], hidden)
    assert pool.lengths.tolist() == [accepted + 4]
    history = torch.cat((first[0, : accepted + 1], second[0, :2]))  # the old pending row was promoted
    assert torch.equal(pool.k[pool.history[0, : accepted + 3]], history)
    assert torch.equal(pool.k[pool.pending[0]], second[0, 2])
    assert pool.k[pool.history[0, accepted + 3 :]].isnan().all()


def test_row_087_a_view_taken_before_sees_only_committed_rows() -> None:
    pool = Pool()
    view = pool.k[pool.history[0, 0] : pool.history[0, 0] + 8]
    rows = _rows(1)
    pool.commit(rows, [3])
    assert torch.equal(view[:2], rows[0, :2]) and view[2:].isnan().all()


def test_row_089_a_round_without_rows_changes_nothing() -> None:
    pool, other = Pool(2), Pool(2)
    one, two, three = (_rows(2, seed) for seed in (1, 2, 3))
    hidden = torch.randn(2, R, H)
    for valid, rows in (([8, 1], one), ([0, 4], two), ([3, 2], three)):
        before = pool.k[:64].clone()
        pool.commit(rows, valid, hidden)
        if valid[0] == 0:
            assert _same(pool.k[:64], before)
    other.commit(one, [8, 1], hidden)
    other.commit(three, [3, 1], hidden)
    assert pool.lengths.tolist() == [11, 7]
    assert _same(pool.k[:64], other.k[:64]) and torch.equal(pool.next_hidden[0], other.next_hidden[0])


@pytest.mark.parametrize("padding", ["negative", "sink", "dead"])
def test_row_090_padded_rows_leave_live_slots_alone(padding: str) -> None:
    rows, valid = _rows(8), [3, 8, 1, 2, 5, 8, 8, 8]
    want, got = Pool(8), Pool(8)
    want.commit(rows, [*valid[:5], 0, 0, 0])
    rows[5:] = NAN
    overrides: dict[str, Any] = {}
    if padding == "dead":
        overrides["live"] = torch.arange(8) < 5  # their slots still name live ones
    else:
        fill = -1 if padding == "negative" else 63
        for name, tensor in (
            ("pending_slot", got.pending),
            ("promote_dst", torch.full((8,), -1)),
            ("scratch_dst", got.scratch),
        ):
            overrides[name] = tensor.clone()
            overrides[name][5:] = fill
        got.history[5:] = fill
    error = got.commit(rows, valid, **overrides)
    assert error.tolist() == [0] * 8
    # the sink, slot 63, is the only one the padded rows may have written; it held NaN before and after
    assert _same(got.k, want.k) and _same(got.v, want.v)
    assert got.lengths.tolist()[:5] == valid[:5]


def test_row_091_reserved_slots_are_never_written() -> None:
    cache_k, cache_v = torch.zeros(20, HKV, D), torch.zeros(20, HKV, D)
    rows = torch.randn(1, 4, HKV, D)
    rows[0, [0, 2]] = NAN
    error = commit_kv(
        [rows], [rows], [cache_k], [cache_v], torch.tensor([4]), torch.tensor([[0, 17, 0, 18]]), first_slot=1
    )
    assert error.tolist() == [0]
    for cache in (cache_k, cache_v):
        assert torch.equal(cache[17], rows[0, 1]) and torch.equal(cache[18], rows[0, 3])
        assert not cache.isnan().any() and cache[:17].eq(0).all() and cache[19].eq(0).all()


def test_row_091_a_reserved_pending_slot_promotes_nothing() -> None:
    cache = torch.zeros(6, HKV, D)
    rows = torch.ones(1, 2, HKV, D)
    arguments = {"pending_slot": torch.tensor([0]), "promote_dst": torch.tensor([4]), "first_slot": 1}
    cache[4] = 7.0
    commit_kv([rows], [rows], [cache], [cache.clone()], torch.tensor([2]), torch.tensor([[2, 3]]), **arguments)
    assert cache[4].eq(7).all() and cache[0].eq(0).all() and cache[2].eq(1).all() and cache[3].eq(0).all()


def test_row_093_padded_rows_do_not_advance() -> None:
    lengths = torch.tensor([37, 0, 12, 0], dtype=torch.int32)
    cache = torch.zeros(60, HKV, D)
    rows = _rows(4)[:, :1]
    dst = torch.tensor([[37], [-1], [12], [-1]], dtype=torch.int32)
    valid = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    error = commit_kv([rows], [rows], [cache], [cache.clone()], valid, dst, lengths=lengths)
    assert lengths.tolist() == [38, 0, 13, 0] and error.tolist() == [0] * 4
    assert cache.abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == [12, 37]


def test_row_094_rows_before_the_committed_ones_stay_unwritten() -> None:
    pool = Pool()
    pool.lengths += 32
    pool.commit(_rows(1), [2])
    assert pool.k[pool.history[0, :31]].isnan().all()
    assert not pool.k[pool.history[0, 32]].isnan().any()


def test_row_098_a_request_that_died_after_verify_writes_nothing() -> None:
    # its slots now belong to request 1
    pool = Pool(2)
    for name in ("history", "scratch", "pending"):
        getattr(pool, name)[0] = getattr(pool, name)[1]
    rows, hidden = _rows(2), torch.randn(2, R, H)
    pool.next_hidden[0] = 5.0
    error = pool.commit(rows, [99, 4], hidden, live=torch.tensor([False, True]))
    assert error.tolist() == [0, 0] and pool.lengths.tolist() == [0, 4]
    assert pool.next_hidden[0].eq(5).all() and pool.k[:64].isnan().all()
    assert torch.equal(pool.k[pool.history[1, :3]], rows[1, :3])


def test_row_101_count_zero_keeps_the_old_hidden() -> None:
    # the row before the buffer is poison: index -1 would fetch it
    whole = torch.full((4, R, H), NAN)
    hidden = whole[1:]
    hidden.copy_(torch.randn(3, R, H))
    pool = Pool(3)
    old = torch.randn(3, H)
    pool.next_hidden.copy_(old)
    pool.commit(_rows(3), [0, 1, 8], hidden)
    assert torch.equal(pool.next_hidden, torch.stack((old[0], hidden[1, 0], hidden[2, 7])))
    assert pool.k[:64].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_102_counts_beyond_the_rows_clamp_and_flag(dtype: torch.dtype) -> None:
    counts = [2, 8, 9, 2**31 - 1, -1, -(2**31)]
    clamped = [2, 8, 8, 8, 0, 0]
    got, want = Pool(6), Pool(6)
    rows, hidden = _rows(6), torch.randn(6, R, H)
    want.commit(rows, clamped, hidden)
    offsets = got.history[:, :R]
    error = commit_kv(
        [rows],
        [-rows],
        [got.k],
        [got.v],
        torch.tensor(counts, dtype=dtype),
        offsets.to(dtype),
        pending_slot=got.pending.to(dtype),
        promote_dst=torch.full((6,), -1, dtype=dtype),
        scratch_dst=got.scratch.to(dtype),
        hidden=hidden,
        next_hidden=got.next_hidden,
        lengths=got.lengths,
    )
    assert error.tolist() == [0, 0, BAD_COUNT, BAD_COUNT, BAD_COUNT, BAD_COUNT]
    assert got.lengths.tolist() == clamped
    assert _same(got.k, want.k) and _same(got.v, want.v) and _same(got.next_hidden, want.next_hidden)


def test_row_103_the_last_row_wins_a_shared_slot() -> None:
    rows = _rows(3)
    dst = torch.arange(24).view(3, 8)
    dst[0, 5] = dst[0, 2] = 30  # inside one request
    dst[2, 0] = dst[1, 1]  # between requests
    want, _ = _model(rows, torch.zeros(32, HKV, D), [8, 8, 8], dst)
    assert torch.equal(want[30], rows[0, 5]) and torch.equal(want[9], rows[2, 0])
    for _ in range(200):
        cache = torch.zeros(32, HKV, D)
        commit_kv([rows], [rows], [cache], [cache.clone()], torch.tensor([8, 8, 8]), dst)
        assert torch.equal(cache, want)


def test_promoted_rows_lose_against_the_rounds_rows_and_read_the_old_cache() -> None:
    # request 0 promotes into the slot where request 1's pending row lives: 1's old row is read first, its new one stays
    rows = _rows(2)
    cache = torch.arange(10.0)[:, None, None].expand(10, HKV, D).clone()
    pending, promote = torch.tensor([2, 5]), torch.tensor([5, 7])
    commit_kv(
        [rows],
        [rows],
        [cache],
        [cache.clone()],
        torch.tensor([1, 1]),
        torch.full((2, R), 9),
        pending_slot=pending,
        promote_dst=promote,
    )
    assert torch.equal(cache[2], rows[0, 0]) and torch.equal(cache[5], rows[1, 0])
    assert cache[7].eq(5).all() and cache[9].eq(9).all()


def test_without_pending_the_last_row_is_history() -> None:
    rows = _rows(2)
    cache = torch.full((20, HKV, D), NAN)
    dst = torch.arange(16).view(2, 8)
    commit_kv([rows], [rows], [cache], [cache.clone()], torch.tensor([3, 8]), dst)
    assert torch.equal(cache[:3], rows[0, :3]) and torch.equal(cache[8:16], rows[1])
    assert cache[3:8].isnan().all() and cache[16:].isnan().all()


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
    want, _ = _model(copy, cache, [4], dst, pending=[9], promote=[0], scratch=scratch)
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
    model: dict[str, Any] = {"first_slot": first_slot}
    if rng.random() < 0.7:
        kwargs |= {"pending_slot": pending, "promote_dst": promote}
        model |= {"pending": pending.tolist(), "promote": promote.tolist()}
    if rng.random() < 0.7:
        kwargs["scratch_dst"] = model["scratch"] = scratch
    if rng.random() < 0.7:
        kwargs["live"], model["live"] = live, live.tolist()
    want = [
        [_model(r, c, valid.tolist(), dst, **model) for r, c in zip(*kind, strict=True)]
        for kind in zip(layers, caches, strict=True)
    ]
    error = commit_kv(*layers, *caches, valid, dst, **kwargs)
    for kind, expected in zip(caches, want, strict=True):
        for cache, (after, errors) in zip(kind, expected, strict=True):
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
    assert _same(k.reshape(20, HKV, D), flat_k) and _same(v.reshape(20, HKV, D), flat_v)


def test_addresses_need_64_bits() -> None:
    # slot stride 2^28 elements: slot 8 starts at 2^31. NumPy's empty commits no memory, and nothing is filled here
    cache = torch.from_numpy(np.empty(8 * 2**28 + HKV * D, dtype=np.float16)).as_strided((9, HKV, D), (2**28, D, 1))
    rows = _rows(1, dtype=torch.float16)
    small = torch.zeros(1, dtype=torch.float16).expand(9, HKV, D).clone()
    commit_kv([rows[:, :2]], [rows[:, :2]], [cache], [small], torch.tensor([2]), torch.tensor([[8, 7]]))
    assert torch.equal(cache[8], rows[0, 0]) and torch.equal(cache[7], rows[0, 1])


def test_one_request_alone_writes_the_same_bits() -> None:
    rows, hidden = _rows(32), torch.randn(32, R, H)
    valid = [b % 10 for b in range(32)]
    together = Pool(32)
    together.commit(rows, valid, hidden)
    for b in (0, 7, 31):
        alone = Pool(1)
        alone.commit(rows[b : b + 1], valid[b : b + 1], hidden[b : b + 1])
        assert _same(together.k[64 * b : 64 * b + 64], alone.k)
        assert _same(together.next_hidden[b : b + 1], alone.next_hidden)


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
