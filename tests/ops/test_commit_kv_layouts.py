"""commit_kv on the caches, slots and padded requests of engines, and on memory that is shared or far away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.accept import accept_prefix
from dmtp_kernels.ops.commit_kv import BAD_COUNT, commit_kv
from tests.ops.commit_kv_oracle import model, same

KERNEL_OPS = ("commit_kv",)
R, HKV, D, H = 8, 2, 8, 6
NAN = float("nan")
E4M3 = torch.float8_e4m3fn


def _rows(batch: int, seed: int = 0, **kwargs: Any) -> torch.Tensor:
    return torch.randn(batch, R, HKV, D, generator=torch.Generator().manual_seed(seed), **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=["fp32", "bf16", "fp8"])
def test_vllm_packs_k_and_v_of_a_block_and_pads_pages(dtype: torch.dtype) -> None:
    # [blocks, heads, block_size, 2 * D] with padding behind each block; -1 skips, block 0 is never written
    blocks, size = 6, 4
    whole = torch.full((blocks, HKV * size * 2 * D + 10), 1.0).to(dtype)
    packed = whole[:, : HKV * size * 2 * D].view(blocks, HKV, size, 2 * D)
    k, v = packed.transpose(1, 2).split(D, dim=-1)
    rows = _rows(2)
    slots = torch.tensor([[5, 9, -1, 20, 3, 7, 8, 22], [4, -1, 10, 11, 12, 13, 0, 14]])
    scale = torch.ones(()) if dtype == E4M3 else None
    error = commit_kv(
        [rows], [-rows], [k], [v], torch.tensor([8, 7]), slots.to(torch.int32), first_slot=size,
        k_scale=scale, v_scale=scale,
    )  # fmt: skip
    assert error.tolist() == [0, 0]
    for cache, sign in ((k, 1), (v, -1)):
        flat = cache.float().reshape(blocks * size, HKV, D)
        written = [(b, j) for b, n in ((0, 8), (1, 7)) for j in range(n) if slots[b, j] >= size]
        for b, j in written:
            assert torch.equal(flat[slots[b, j]], (sign * rows[b, j]).to(dtype).float())
        untouched = sorted(set(range(blocks * size)) - {int(slots[b, j]) for b, j in written})
        assert len(written) == 11 and flat[untouched].eq(1).all()
    assert whole[:, HKV * size * 2 * D :].float().eq(1).all()


def test_sglang_slots_are_rows_of_layers_that_are_stacked() -> None:
    # all layers are views of one buffer, slot 0 is the sink of padded requests
    layers, slots = 3, 30
    pool = torch.zeros(2, layers, slots, HKV, D)
    rows = torch.randn(layers, 3, R, 2, HKV, D, generator=torch.Generator().manual_seed(1))
    dst = torch.zeros(3, R, dtype=torch.int64)
    dst[:2] = torch.randperm(slots - 1)[: 2 * R].view(2, R) + 1
    k, v = rows[:, :, :, 0].unbind(0), rows[:, :, :, 1].unbind(0)
    error = commit_kv(k, v, pool[0].unbind(0), pool[1].unbind(0), torch.tensor([3, 8, 1]), dst)
    assert error.tolist() == [0, 0, 0]
    for layer in range(layers):
        for part in range(2):
            assert torch.equal(pool[part, layer, dst[0, :3]], rows[layer, 0, :3, part])
            assert torch.equal(pool[part, layer, dst[1]], rows[layer, 1, :, part])
            assert torch.equal(pool[part, layer, 0], rows[layer, 2, 0, part])
    assert pool.flatten(3).any(dim=-1).sum() == 2 * layers * 12


@pytest.mark.parametrize(("pages", "size"), [(9, 2), (1, 18)])
def test_pages_whose_strides_pass_32_bits(pages: int, size: int) -> None:
    # slots are 2^27 elements apart: slot 16 starts at 2^31, in page 8 or in the only one
    memory = np.empty(17 * 2**27 + HKV * D, dtype=np.float16)
    cache = torch.from_numpy(memory).as_strided((pages, size, HKV, D), (size * 2**27, 2**27, D, 1))
    flat = torch.from_numpy(memory).as_strided((18, HKV, D), (2**27, D, 1))
    rows = _rows(1, dtype=torch.float16)[:, :2]
    small = torch.zeros(pages, size, HKV, D, dtype=torch.float16)
    flat[15] = 3.0
    error = commit_kv(
        [rows], [rows], [cache], [small], torch.tensor([1]), torch.tensor([[0, 0]]),
        pending_slot=torch.tensor([15], dtype=torch.int32), promote_dst=torch.tensor([17], dtype=torch.int32),
        scratch_dst=torch.tensor([[-1, 16]], dtype=torch.int32),
    )  # fmt: skip
    assert error.tolist() == [0]
    assert flat[17].eq(3).all() and torch.equal(flat[16], rows[0, 1]) and torch.equal(flat[15], rows[0, 0])


def test_rows_far_apart_need_64_bits() -> None:
    memory = np.empty(8 * 2**28 + R * HKV * D, dtype=np.float16)
    rows = torch.from_numpy(memory).as_strided((9, 1, HKV, D), (2**28, HKV * D, D, 1))
    rows[8] = _rows(1, dtype=torch.float16)[0, 0]
    hidden = torch.from_numpy(memory).as_strided((9, 1, H), (2**28, H, 1))
    next_hidden = torch.zeros(9, H, dtype=torch.float16)
    cache = torch.zeros(4, HKV, D, dtype=torch.float16)
    live = torch.arange(9) == 8
    commit_kv(
        [rows], [rows], [cache], [cache.clone()], torch.ones(9, dtype=torch.int32), torch.full((9, 1), 2),
        hidden=hidden, next_hidden=next_hidden, live=live,
    )  # fmt: skip
    assert torch.equal(cache[2], rows[8, 0]) and torch.equal(next_hidden[8], hidden[8, 0])
    assert not next_hidden[:8].any() and not cache[[0, 1, 3]].any()


@pytest.mark.parametrize("row", range(R))
def test_next_hidden_may_be_a_row_of_hidden(row: int) -> None:
    hidden = torch.randn(3, R, H, generator=torch.Generator().manual_seed(row))
    before = hidden.clone()
    rows, cache = _rows(3), torch.zeros(1, HKV, D)
    valid = torch.tensor([1, 0, R])
    skip = torch.full((3, R), -1)
    commit_kv([rows], [rows], [cache], [cache.clone()], valid, skip, hidden=hidden, next_hidden=hidden[:, row])
    before[0, row], before[2, row] = before[0, 0].clone(), before[2, R - 1].clone()
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pending_and_scratch_are_both_optional(pending: bool, scratch: bool, index: torch.dtype) -> None:
    rows, cache = _rows(4), torch.randn(90, HKV, D)
    slots = torch.randperm(88)[: 4 * 18].view(4, 18).to(index)
    named: dict[str, Any] = {}
    given: dict[str, Any] = {}
    if pending:
        named |= {"pending_slot": slots[:, 16], "promote_dst": slots[:, 17]}
        given |= {"pending": slots[:, 16].tolist(), "promote": slots[:, 17].tolist()}
    if scratch:
        named["scratch_dst"] = given["scratch"] = slots[:, 8:16]
    valid = torch.tensor([0, 1, 5, R], dtype=index)
    hidden, next_hidden = torch.randn(4, R, H), torch.zeros(4, H)
    want, errors = model(rows, cache, valid.tolist(), slots[:, :8], **given)
    error = commit_kv(
        [rows], [rows], [cache], [cache.clone()], valid, slots[:, :8], hidden=hidden, next_hidden=next_hidden, **named
    )
    assert same(cache, want) and error.tolist() == errors == [0] * 4
    assert torch.equal(next_hidden[1:], hidden[torch.arange(1, 4), valid[1:].long() - 1])
    assert not next_hidden[0].any()


def test_row_097_only_emitted_tokens_are_committed() -> None:
    # https://github.com/sgl-project/sglang/pull/35694: rows past the stop or the budget went into the cache
    candidates = torch.arange(100, 108).repeat(4, 1)
    target = torch.cat((candidates[:, 1:7], torch.full((4, 2), 7)), dim=1)
    target[0, 2] = candidates[0, 3] = target[1, 4] = candidates[1, 5] = 1  # the stop token
    accepted = accept_prefix(candidates, target, stop_ids=torch.tensor([1]), budget=torch.tensor([5, 2, 9, 0]))
    assert accepted.commit_len.tolist() == [3, 2, 7, 0]
    rows, cache = _rows(4), torch.full((4 * R, HKV, D), NAN)
    lengths = torch.zeros(4, dtype=torch.int64)
    dst = torch.arange(4 * R).view(4, R)
    error = commit_kv([rows], [rows], [cache], [cache.clone()], accepted.commit_len, dst, lengths=lengths)
    assert error.tolist() == [0] * 4 and lengths.tolist() == [3, 2, 7, 0]
    emitted = torch.arange(R) < accepted.commit_len[:, None]
    assert torch.equal(cache[emitted.flatten()], rows[emitted]) and cache[~emitted.flatten()].isnan().all()


def test_row_099_a_reused_slot_shows_nothing_of_its_last_request() -> None:
    # https://github.com/ggml-org/llama.cpp/pull/22105: a pending row of the old request was promoted into the new one
    rows = _rows(2)
    cache, lengths = torch.full((40, HKV, D), NAN), torch.tensor([20])
    arguments: dict[str, Any] = {"pending_slot": torch.tensor([39]), "scratch_dst": torch.arange(30, 38)[None]}
    caches = [cache], [cache.clone()]
    commit_kv(
        [rows[:1]], [rows[:1]], caches[0], caches[1], torch.tensor([4]), torch.arange(20, 28)[None],
        promote_dst=torch.tensor([19]), lengths=lengths, **arguments,
    )  # fmt: skip
    lengths.zero_()
    commit_kv(
        [rows[1:]], [rows[1:]], caches[0], caches[1], torch.tensor([2]), torch.arange(8)[None],
        promote_dst=torch.tensor([-1]), lengths=lengths, **arguments,
    )  # fmt: skip
    assert lengths.tolist() == [2] and torch.equal(cache[0], rows[1, 0]) and torch.equal(cache[39], rows[1, 1])
    assert cache[1:19].isnan().all() and torch.equal(cache[20:23], rows[0, :3])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_row_155_whatever_padded_requests_hold_changes_nothing(index: torch.dtype) -> None:
    # https://github.com/vllm-project/vllm/issues/41841: only some inputs of padded rows were neutralized
    info = torch.iinfo(index)
    slots = torch.randperm(2 * 18)[: 2 * 18].view(2, 18).to(index)
    for poison in (info.max, info.min, 3):
        padded = torch.full((5, 18), poison, dtype=index)
        padded[:2] = slots
        rows, hidden = _rows(5), torch.randn(5, R, H)
        rows[2:] = hidden[2:] = NAN
        results = []
        for batch in (2, 5):
            k, v = torch.zeros(36, HKV, D), torch.zeros(36, HKV, D)
            lengths, next_hidden = torch.full((batch,), 3, dtype=index), torch.zeros(batch, H)
            error = commit_kv(
                [rows[:batch]], [-rows[:batch]], [k], [v],
                torch.tensor([3, 8, poison, 8, 1], dtype=index)[:batch], padded[:batch, :8],
                pending_slot=padded[:batch, 16], promote_dst=padded[:batch, 17], scratch_dst=padded[:batch, 8:16],
                hidden=hidden[:batch], next_hidden=next_hidden, lengths=lengths,
                live=torch.arange(batch) < 2, cos_sin=torch.ones(9, 4), positions=padded[:batch, :8].clamp(max=8),
            )  # fmt: skip
            assert not error[2:].any() and lengths[2:].eq(3).all() and next_hidden[2:].eq(0).all()
            results.append((k, v, lengths[:2], next_hidden[:2], error[:2]))
        for alone, together in zip(*results, strict=True):
            assert torch.equal(alone, together)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_row_102_extreme_counts_and_slots(index: torch.dtype) -> None:
    info = torch.iinfo(index)
    rows, cache = _rows(4), torch.zeros(4 * R, HKV, D)
    valid = torch.tensor([info.min, info.max, -1, R + 1], dtype=index)
    dst = torch.arange(4 * R, dtype=index).view(4, R)
    dst[1, 0], dst[1, 1], dst[3, 7] = info.min, info.max, -1
    lengths = torch.zeros(4, dtype=index)
    error = commit_kv([rows], [rows], [cache], [cache.clone()], valid, dst, lengths=lengths)
    assert error.tolist() == [BAD_COUNT, BAD_COUNT | 2, BAD_COUNT, BAD_COUNT] and lengths.tolist() == [0, R, 0, R]
    want = torch.zeros(4, R, HKV, D)
    want[1, 2:], want[3, :7] = rows[1, 2:], rows[3, :7]
    assert torch.equal(cache, want.view(4 * R, HKV, D))


def test_heads_and_rows_of_no_size() -> None:
    for heads, dim in ((0, 4), (2, 0)):
        rows, cache = torch.zeros(2, 3, heads, dim), torch.zeros(6, heads, dim)
        lengths = torch.zeros(2, dtype=torch.int64)
        hidden, next_hidden = torch.zeros(2, 3, 0), torch.zeros(2, 0)
        error = commit_kv(
            [rows], [rows], [cache], [cache.clone()], torch.tensor([2, 5]), torch.arange(6).view(2, 3), lengths=lengths,
            hidden=hidden, next_hidden=next_hidden,
        )  # fmt: skip
        assert error.tolist() == [0, BAD_COUNT] and lengths.tolist() == [2, 3]
