"""commit_kv on poisoned pools, round by round: the public reports of wrong commits and rollbacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.commit_kv import BAD_COUNT, commit_kv

KERNEL_OPS = ("commit_kv",)
R, HKV, D, H = 8, 2, 4, 6
NAN = float("nan")


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
    arguments: dict[str, Any] = {"pending_slot": torch.tensor([0]), "promote_dst": torch.tensor([4]), "first_slot": 1}
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


def test_without_pending_the_last_row_is_history() -> None:
    rows = _rows(2)
    cache = torch.full((20, HKV, D), NAN)
    dst = torch.arange(16).view(2, 8)
    commit_kv([rows], [rows], [cache], [cache.clone()], torch.tensor([3, 8]), dst)
    assert torch.equal(cache[:3], rows[0, :3]) and torch.equal(cache[8:16], rows[1])
    assert cache[3:8].isnan().all() and cache[16:].isnan().all()


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
