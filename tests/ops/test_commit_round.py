"""commit_round against one commit_kv a cache: caches that differ in everything, padded requests, errors, poison."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import dmtp_kernels
from dmtp_kernels.ops.commit_kv import BAD_COUNT, BAD_OWNER, BAD_SLOT, commit_round
from dmtp_kernels.testing.poison import guarded
from tests.ops.commit_kv_oracle import same
from tests.ops.commit_round_cases import Cache, call, check, make_cache

KERNEL_OPS = ("commit_round",)
EVERY_CAPABILITY = True
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
NAN = float("nan")


def three(batch: int = 3, **mtp: Any) -> list[Cache]:
    """Paged bf16, flat fp16 with int32 slots, and MTP's."""
    return [
        make_cache(batch, layers=2, heads=3, dims=(8, 24), page_size=4, rows_dtype=BF16, seed=1),
        make_cache(batch, layers=3, heads=1, dims=(20, 4), rows_dtype=torch.float16, index=torch.int32, seed=2),
        make_cache(batch, tail=True, seed=3, **mtp),
    ]


@pytest.mark.parametrize("count", range(-1, 10))
def test_caches_that_agree_in_nothing(count: int) -> None:
    error = check(commit_round, three(), torch.tensor([count, 3, 8]))
    assert error.tolist() == [0 if 0 <= count <= 8 else BAD_COUNT, 0, 0]


@pytest.mark.parametrize("methods", [1, 2], ids=["target", "target_drafter"])
def test_methods_without_mtp_only_append(methods: int) -> None:
    check(commit_round, three()[:methods], torch.tensor([1, 8, 0], dtype=torch.int32))


@pytest.mark.parametrize("absent", ["scratch_dst", "hidden", "lengths", "pending_slot"])
def test_what_is_not_given_is_not_done(absent: str) -> None:
    caches = three()
    for name in {"hidden": ("hidden", "next_hidden"), "pending_slot": ("pending_slot", "promote_dst")}.get(
        absent, (absent,)
    ):
        del caches[-1].options[name]
    check(commit_round, caches, torch.tensor([2, 8, 5]))


@pytest.mark.parametrize("seed", range(4))
def test_slots_that_requests_share(seed: int) -> None:
    # in every cache, slots beyond it and skipped ones too: each decides alone who comes last
    caches = [
        make_cache(4, slots=9, page_size=3, layers=2, seed=seed),
        make_cache(4, slots=7, heads=1, dims=(4, 4), seed=seed + 50),
        make_cache(4, slots=12, tail=True, seed=seed + 100),
    ]
    check(commit_round, caches, torch.tensor([3, 8, 1, 5]))


def test_one_slot_number_in_two_caches_is_two_slots() -> None:
    # request 1 writes slot 5 of the target's cache; MTP's slot 5, request 0's pending one, still has one owner
    target, mtp = make_cache(2, seed=1), make_cache(2, tail=True, seed=2)
    target.dst = torch.arange(16).view(2, 8)
    target.dst[1, 0] = 5
    mtp.options["pending_slot"] = torch.tensor([5, 20])
    mtp.options["promote_dst"] = torch.tensor([6, 21])
    mtp.dst = torch.arange(16).view(2, 8) + 40 - 16
    mtp.options["scratch_dst"] = torch.full((2, 8), -1)
    old = mtp.caches[0][0][5].clone()
    error = check(commit_round, [target, mtp], torch.tensor([4, 1]))
    assert error.tolist() == [0, 0] and torch.equal(mtp.caches[0][0][6], old)
    assert torch.equal(target.caches[0][0][5], target.rows[0][0][1, 0])


def test_errors_of_all_caches_come_together() -> None:
    caches = three(4)
    caches[0].dst[1, 0] = 10**9  # beyond the target's cache
    caches[2].options["pending_slot"][2] = caches[2].dst[3, 0]  # another request's row
    error = check(commit_round, caches, torch.tensor([9, 2, 3, 4]))
    assert error.tolist() == [BAD_COUNT, BAD_SLOT, BAD_OWNER, 0]


def test_first_slot_of_each_cache() -> None:
    # null pages of other sizes
    caches = three()
    for cache, first in zip(caches, (4, 0, 16), strict=True):
        cache.options["first_slot"] = first
        cache.dst[0, :4] = torch.tensor([first - 1, first, 0, 3], dtype=cache.dst.dtype)
    check(commit_round, caches, torch.tensor([8, 5, 2]))
    one = [make_cache(2, seed=s) for s in (1, 2)]
    for cache in one:
        cache.options["first_slot"] = 9
    positional, named = call(one, torch.tensor([8, 8]))
    both = [[t.clone() for t in one[0].caches[0]], [t.clone() for t in one[1].caches[0]]]
    commit_round(*positional, **named | {"first_slot": 9})
    for cache, before in zip(one, both, strict=True):
        assert torch.equal(cache.caches[0][0][:9], before[0][:9]) and not torch.equal(cache.caches[0][0], before[0])


@pytest.mark.parametrize(("first", "last"), [(E4M3, None), (None, E5M2), (E5M2, E4M3)], ids=["first", "last", "both"])
def test_fp8_caches_among_others(first: torch.dtype | None, last: torch.dtype | None) -> None:
    # the drafter's between them has none
    caches = three(3, rows_dtype=BF16, dtype=last)
    caches[0] = make_cache(3, layers=2, heads=3, dims=(8, 16), page_size=4, rows_dtype=BF16, dtype=first, seed=1)
    if first:
        caches[0].options |= {"k_scale": [torch.rand(3, 3) + 0.5, torch.tensor(0.1)], "v_scale": torch.rand(3) + 0.1}
    if last:
        caches[2].options |= {"k_scale": torch.tensor([0.02]), "v_scale": torch.rand(2) + 0.5}
    for rows in caches[0].rows[0]:
        rows[0, 0, 0, 0], rows[0, 1, 0, 0] = NAN, 1e30
    check(commit_round, caches, torch.tensor([4, 8, 1]))


def test_scales_of_one_a_cache() -> None:
    caches = three()
    scales = [torch.rand(3) + 0.5, None, 2.0]
    for cache, scale in zip(caches, scales, strict=True):
        if scale is not None:
            cache.options["v_scale"] = scale
    alone = [c.options.get("v_scale") for c in caches]

    def run(*positional: Any, **named: Any) -> torch.Tensor:
        return commit_round(*positional, **named | {"v_scale": alone})

    check(run, caches, torch.tensor([4, 8, 1]))


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_rows_of_another_dtype(wide: bool) -> None:
    caches = [
        make_cache(2, rows_dtype=torch.float64 if wide else BF16, dtype=torch.float16, layers=2, seed=1),
        make_cache(2, rows_dtype=torch.float32, dtype=torch.float64 if wide else BF16, tail=True, seed=2),
    ]
    check(commit_round, caches, torch.tensor([4, 7]))


def test_dead_requests_and_poison() -> None:
    # rows of dead requests are NaN and their slots name live ones'; rows beyond the count are never stored
    caches = three(4)
    live = torch.tensor([True, False, True, False])
    for cache in caches:
        for rows in (*cache.rows[0], *cache.rows[1]):
            rows[1], rows[3] = NAN, NAN
        cache.dst[1] = cache.dst[0]
        for stored in (*cache.caches[0], *cache.caches[1]):
            stored.fill_(1.0)
        if "scratch_dst" in cache.options:
            cache.options["scratch_dst"][1] = cache.dst[0]
    for cache in caches[:2]:
        for rows in (*cache.rows[0], *cache.rows[1]):
            rows[2, 3:] = NAN
    error = check(commit_round, caches, torch.tensor([5, 99, 3, -4]), live=live)
    assert error.tolist() == [0] * 4
    for cache in caches:
        assert not any(t.isnan().any() for t in (*cache.caches[0], *cache.caches[1]))


def test_rows_that_lie_in_their_own_scratch() -> None:
    # MTP's rows are a view of the slots that the ones beyond the count stay in
    caches = three(2)
    store = caches[-1].caches
    base = torch.arange(8) + 8
    for kind in range(2):
        store[kind][0] = torch.randn(40, 2, 8)
        caches[-1].rows[kind][0] = store[kind][0][8:24].view(2, 8, 2, 8)
    caches[-1].dst = torch.tensor([[9, 10, 11, 8, 12, 13, 14, 15], [31, 30, 32, 33, 34, 35, 36, 37]])
    caches[-1].options |= {
        "scratch_dst": torch.stack((base, base + 8)),
        "pending_slot": torch.tensor([0, 1]),
        "promote_dst": torch.tensor([2, 3]),
    }
    before = [store[kind][0].clone() for kind in range(2)]
    positional, named = call(caches, torch.tensor([5, 3]))
    assert commit_round(*positional, **named).tolist() == [0, 0]
    for kind in range(2):
        after, old = store[kind][0], before[kind]
        assert torch.equal(after[2:4], old[:2]) and torch.equal(after[0], old[12]) and torch.equal(after[1], old[18])
        assert torch.equal(after[[9, 10, 11, 8]], old[8:12]) and torch.equal(after[[31, 30]], old[16:18])


def test_layers_of_other_strides_stay_inside_their_buffers() -> None:
    caches = three()
    inside = []
    for cache in caches:
        for kind in range(2):
            for layer, (rows, stored) in enumerate(zip(cache.rows[kind], cache.caches[kind], strict=True)):
                odd = torch.full((*rows.shape[:-1], rows.shape[-1] + layer), NAN, dtype=rows.dtype)
                cache.rows[kind][layer] = odd[..., : rows.shape[-1]].copy_(rows)
                guard = guarded(stored.shape, stored.dtype)
                cache.caches[kind][layer] = guard.tensor.copy_(stored)
                inside.append(guard)
    check(commit_round, caches, torch.tensor([8, 5, 1]))
    for guard in inside:
        guard.check(written=False)


def test_one_request_alone_writes_the_same_bits() -> None:
    valid = torch.tensor([b % 9 for b in range(12)])
    together = three(12)
    alone = three(12)
    positional, named = call(together, valid)
    commit_round(*positional, **named)
    for b in range(12):
        for cache in alone:
            cache.options = dict(cache.options)
        mine = [
            Cache(
                tuple([r[b : b + 1] for r in kind] for kind in c.rows),  # type: ignore[arg-type]
                c.caches,
                c.dst[b : b + 1],
                {name: value[b : b + 1] for name, value in c.options.items()},
            )
            for c in alone
        ]
        positional, named = call(mine, valid[b : b + 1])
        commit_round(*positional, **named)
    for got, want in zip(alone, together, strict=True):
        for kind in range(2):
            assert all(same(g, w) for g, w in zip(got.caches[kind], want.caches[kind], strict=True))
        assert all(torch.equal(got.options[n], want.options[n]) for n in got.options)


def test_nothing_happens_without_requests_slots_or_heads() -> None:
    check(commit_round, three(0), torch.zeros(0, dtype=torch.int64))
    caches = three()
    caches[1] = make_cache(3, layers=2, heads=0, seed=2)
    caches[0].caches = tuple([t[:0] for t in kind] for kind in caches[0].caches)  # type: ignore[assignment]
    error = check(commit_round, caches, torch.tensor([2, 0, 8]))
    assert error.tolist() == [BAD_SLOT, 0, BAD_SLOT]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"layers": []}, "layers: is empty, must have one entry per cache"),
    "layers": ({"layers": [2, 3, 2]}, "layers: adds up to 7, must be 6, the layers of rows_k"),
    "layer": ({"layers": [6, 0, 0]}, "layers[1]: is 0, must be at least 1"),
    "layers of": ({"layers": 6}, "layers: is 6, must be a list, one whole number per cache"),
    "border": ({"layers": [3, 2, 1]}, "rows_k[2]: dtype is torch.float16, must be torch.bfloat16"),
    "dst": ({"dst": torch.zeros(3, 8)}, "dst: is one tensor, must be a list, one tensor per cache"),
    "dsts": ({"dst": [torch.zeros(3, 8).long()] * 2}, "dst: has 2 tensors, must be 3 like layers"),
    "dst R": (
        {"dst": [torch.zeros(3, r).long() for r in (8, 7, 8)]},
        "dst[1]: dimension 1 (R) is 7, must be 8 like dst[0]",
    ),
    "dst dtype": ({"dst": [torch.zeros(3, 8)] * 3}, "dst[0]: dtype is torch.float32"),
    "rows": ({"rows_v": (3, torch.zeros(3, 8, 1, 4))}, "rows_v[3]: dtype is torch.float32, must be torch.float16"),
    "heads": (
        {"k_caches": (4, torch.zeros(54, 2, 20).half())},
        "k_caches[4]: dimension 1 (Hkv) is 2, must be 1 like rows_k[2]",
    ),
    "slots": (
        {"v_caches": (3, torch.zeros(9, 1, 4).half())},
        "v_caches[3]: dimension 0 (num_slots) is 9, must be 54 like k_caches[2]",
    ),
    "pages": ({"v_caches": (5, torch.zeros(9, 6, 2, 8))}, "v_caches[5]: has 4 dimensions, must be 3 like k_caches[5]"),
    "batch": ({"valid": torch.zeros(4).long()}, "dst[0]: dimension 0 (B) is 3, must be 4 like valid"),
    "pending": ({"promote_dst": None}, "promote_dst: is None, must be given together with pending_slot"),
    "scratch": ({"scratch_dst": torch.zeros(3, 6).long()}, "scratch_dst: dimension 1 (R) is 6, must be 8 like dst[0]"),
    "first": ({"first_slot": [0, 1]}, "first_slot: has 2 entries, must be 1 or 3 like layers"),
    "first low": ({"first_slot": [0, 1, -1]}, "first_slot[2]: is -1, must be at least 0"),
    "scales": ({"k_scale": [1.0, 1.0]}, "k_scale: has 2 tensors, must be 3 like layers or 6 like rows_k"),
    "scale": ({"v_scale": [None, torch.ones(3), None]}, "v_scale[1]: shape is (3,), must be [], [1], [1] or [3, 1]"),
    "scale text": ({"v_scale": [1.0, "1", None]}, "v_scale[1]: is '1', must be a number"),
    "some scales": (
        {"v_scale": [1.0, None, 1.0, 1.0, 1.0, 1.0]},
        "v_scale[1]: is empty, which none or all layers of a cache may be",
    ),
    "device": (
        {"rows_k": (3, torch.zeros(3, 8, 1, 20, device="meta").half())},
        "rows_k[3]: is on meta, must be on cpu",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    change, message = FAULTS[name]
    positional, named = call(three(), torch.tensor([1, 2, 3]))
    names = ["rows_k", "rows_v", "k_caches", "v_caches", "valid", "dst"]
    arguments = dict(zip(names, positional, strict=True)) | named
    for argument, value in change.items():
        if isinstance(value, tuple):
            arguments[argument] = list(arguments[argument])
            arguments[argument][value[0]] = value[1]
        else:
            arguments[argument] = value
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        commit_round(**arguments)


def test_fp8_needs_its_scales_and_supports_says_so() -> None:
    caches = three(3, dtype=E4M3)
    positional, named = call(caches, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"k_scale: is None, must be given for k_caches\[5\] of torch.float8_e4m3fn"):
        commit_round(*positional, **named)
    reason = dmtp_kernels.supports("commit_round", *positional, **named)
    assert reason is not None and reason.startswith("k_scale: is None")
    with pytest.raises(ValueError, match=r"k_scale\[2\]: is empty, which none or all"):
        commit_round(*positional, **named, k_scale=[1.0, 1.0, None], v_scale=1.0)
    scales = [torch.ones(()), torch.empty(0), torch.ones(())]
    assert dmtp_kernels.supports("commit_round", *positional, **named, k_scale=scales, v_scale=scales) is None
