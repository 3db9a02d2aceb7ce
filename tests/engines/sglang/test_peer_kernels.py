"""Our ops against SGLang's own kernels on the same tensors: 200 random batches each, padded rows, stale tails."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.engines.sglang import tensors
from dmtp_kernels.ops.lm_head import combine_keys, key_token, lm_head_select
from dmtp_kernels.ops.t1_prep import Fusion
from tests.engines import peers
from tests.engines.sglang.batches import draw_batch

MISSING = peers.missing("sglang", "tests/engines/sglang/requirements.txt")
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("mended")]

CASES, INTERPRETED = 200, 20
BLOCK = 8
WORKER = (peers.package("sglang") or Path()) / "srt/speculative/dflash_worker_v2.py"


@contextmanager
def backend(case: int) -> Iterator[None]:
    """Every tenth case runs our kernel interpreted too, the others what a CPU runs."""
    with use_backend("triton" if case % (CASES // INTERPRETED) == 0 else None):
        yield


def kernels(name: str) -> Any:
    return importlib.import_module(f"sglang.kernels.ops.{name}")


def poison(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, -(2**30), dtype=dtype)


def test_acceptance() -> None:
    peer, eager = kernels("speculative.dflash"), 0
    for case in range(CASES):
        draw = random.Random(case)
        batch = draw_batch(draw, page_size=1, block_size=BLOCK)
        bs, ids = len(batch.prefix_lens), draw.choice([2, 3, 250_000])
        generator = torch.Generator().manual_seed(case)
        candidates = torch.randint(ids, (bs, BLOCK), generator=generator)
        target = torch.randint(ids, (bs, BLOCK), generator=generator)
        # long prefixes too, and padded rows of zeros that accept everything
        for row in range(0, bs, 2):
            kept = draw.randint(0, BLOCK - 1)
            target[row, :kept] = candidates[row, 1 : 1 + kept]
        candidates[~batch.live], target[~batch.live] = 0, 0
        lens, commits, news = poison(bs, dtype=torch.int32), poison(bs, dtype=torch.int32), poison(bs)
        bonus, tokens = poison(bs), poison(bs, BLOCK)
        peer._compute_dflash_accept_bonus_triton_unchecked(
            candidates=candidates,
            target_top1=target,
            accept_lens_out=lens,
            commit_lens_out=commits,
            bonus_ids_out=bonus,
            out_tokens_out=tokens,
            prefix_lens=batch.prefix_lens,
            new_seq_lens_out=news,
        )
        with backend(case):
            ours = tensors.accept(candidates, target, batch.prefix_lens)
        emitted = torch.arange(BLOCK) < commits[:, None]
        wanted = (lens, commits, bonus, torch.where(emitted, tokens, -1), news)
        for mine, theirs in zip(ours, wanted, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), case
        counts, last = peer.compute_dflash_correct_drafts_and_bonus(candidates=candidates, target_predict=target)
        assert torch.equal(ours[0], counts) and torch.equal(ours[2], last), case
        eager += int(ours[0].sum())
    assert eager > CASES


def test_draft_block() -> None:
    peer = kernels("speculative.dflash")
    embedding = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    for case in range(CASES):
        draw = random.Random(1000 + case)
        batch = draw_batch(draw, page_size=draw.choice([1, 4]), block_size=BLOCK)
        bs, mask = len(batch.prefix_lens), draw.choice([0, 7, 49])
        bonus, t1 = torch.randint(50, (2, bs), generator=torch.Generator().manual_seed(case))
        ids, positions, slots = (poison(bs, BLOCK) for _ in range(3))
        peer._prepare_dflash_draft_block_unchecked(
            bonus_tokens=bonus,
            prefix_lens=batch.prefix_lens,
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token,
            block_ids_out=ids,
            positions_out=positions,
            cache_loc_out=slots,
            mask_token_id=mask,
        )
        with backend(case):
            ours = tensors.prepare_block(
                bonus,
                batch.prefix_lens,
                batch.req_pool_indices,
                batch.req_to_token,
                torch.zeros(bs, 16),
                None,
                embedding,
                Fusion(mode="none"),
                block_size=BLOCK,
                mask_token_id=mask,
                t1=t1,
            )
        ids[:, 1] = t1  # the one slot in which a DMTP block differs from DFlash's
        assert torch.equal(ours[0], ids) and torch.equal(ours[1], positions), case
        assert ours[2].dtype == slots.dtype and torch.equal(ours[2], slots), case
        assert torch.equal(ours[3], embedding[ids.flatten()]), case


def test_a_block_that_does_not_fit_has_the_dummy_slot() -> None:
    batch = draw_batch(random.Random(0), page_size=1, block_size=BLOCK)
    width = batch.req_to_token.shape[1]
    late = torch.full_like(batch.prefix_lens, width - BLOCK + 1)
    slots = tensors.block_slots(late, batch.req_pool_indices, batch.req_to_token, BLOCK)
    assert not slots.any()
    fits = tensors.block_slots(late - 1, batch.req_pool_indices, batch.req_to_token, BLOCK)
    assert torch.equal(fits[batch.live], batch.req_to_token[batch.req_pool_indices][batch.live, -BLOCK:].long())


def test_window_table() -> None:
    locs, metadata = kernels("speculative.cache_locs"), kernels("attention.metadata")
    compact_lens = peers.taken(WORKER, "DFlashWorkerV2._compute_compact_draft_seq_lens")
    skipped = 0
    for case in range(CASES):
        draw = random.Random(2000 + case)
        page_size, window = draw.choice([1, 1, 2, 8, 16]), draw.choice([1, 5, 16, 200])
        batch = draw_batch(draw, page_size=page_size, block_size=BLOCK, window=window)
        bs, pool, lens = len(batch.prefix_lens), batch.req_pool_indices, batch.prefix_lens
        worker = SimpleNamespace(draft_window_size=window, page_size=page_size, device=torch.device("cpu"))
        draft_lens = compact_lens(worker, lens)
        block_slots = tensors.block_slots(lens, pool, batch.req_to_token, BLOCK)
        rows, width = batch.req_to_token.shape
        draft_table = torch.full((rows, width + page_size), 7, dtype=torch.int32)  # stale rows of other requests
        locs.rebuild_compact_draft_req_to_token_func(
            draft_req_to_token=draft_table,
            target_req_to_token=batch.req_to_token,
            req_pool_indices=pool,
            suffix_start=lens - draft_lens,
            draft_prefix_lens=draft_lens,
            verify_out_cache_loc_2d=block_slots,
            batch_size=bs,
            block_size=BLOCK,
        )
        pages = -(-draft_table.shape[1] // page_size)
        table, seqlens, cumulative = (
            poison(bs, pages, dtype=torch.int32),
            *(poison(n, dtype=torch.int32) for n in (bs, bs + 1)),
        )
        metadata.normal_decode_set_metadata(
            seqlens, cumulative, table, draft_table, pool, pages, draft_lens, BLOCK, page_size
        )
        with backend(case):
            ours = tensors.window_table(
                batch.req_to_token, pool, lens, window=window, page_size=page_size, block_size=BLOCK
            )
        assert torch.equal(ours.draft_len, draft_lens) and torch.equal(ours.draft_len + BLOCK, seqlens), case
        used = torch.arange(ours.draft_table.shape[1]) * page_size < seqlens[:, None]
        theirs = table[:, : used.shape[1]]
        assert torch.equal(ours.draft_table[used], theirs[used]), case
        assert not ours.draft_table[~used].any(), case
        # what they let the drafter see beyond the window
        assert torch.equal(ours.kv_skip, ours.draft_len - lens.clamp(max=window).int()), case
        skipped += int(ours.kv_skip.sum())
    assert skipped > 0


def test_commit() -> None:
    move = kernels("kvcache.cache_move")
    for case in range(CASES):
        draw = random.Random(3000 + case)
        batch = draw_batch(draw, page_size=draw.choice([1, 4]), block_size=BLOCK)
        bs, layers, dtype = len(batch.prefix_lens), draw.choice([1, 1, 2]), draw.choice([torch.bfloat16, torch.float32])
        heads, dim = draw.choice([(1, 8), (2, 16), (3, 24)])
        generator = torch.Generator().manual_seed(case)
        rows = torch.randn(2, layers, bs * BLOCK, heads * dim, generator=generator).to(dtype)
        caches = torch.randn(2, layers, batch.num_slots, heads, dim, generator=generator).to(dtype)
        wanted, dummy = caches.clone(), caches[:, :, 0].clone()
        slots = tensors.block_slots(batch.prefix_lens, batch.req_pool_indices, batch.req_to_token, BLOCK)
        commits = torch.tensor([draw.randint(0, BLOCK) if live else BLOCK for live in batch.live], dtype=torch.int32)
        for layer in range(layers):
            size = heads * dim * dtype.itemsize
            move.set_kv_buffer_prefix_valid_tiled[(bs, BLOCK, -(-size // 256))](
                *rows[:, layer],
                *wanted[:, layer],
                slots,
                commits,
                *[size] * 4,
                BLOCK,
                ROW_BYTES=size,
                BYTES_PER_TILE=256,
            )
        with backend(case):
            error = tensors.commit(list(rows[0]), list(rows[1]), list(caches[0]), list(caches[1]), slots, commits)
        assert not error.any(), case
        # slot 0 is the dummy, which we leave alone and nobody reads
        assert torch.equal(caches[:, :, 1:], wanted[:, :, 1:]) and torch.equal(caches[:, :, 0], dummy), case


def test_tokens_of_the_head() -> None:
    """The draft sampler, on whole numbers: every dot is exact in bfloat16, and most rows have ties."""
    sampler = peers.taken(WORKER, "_DflashDraftSampler")
    for case in range(CASES):
        draw = random.Random(4000 + case)
        bs, width = draw.randint(1, 4), 16
        valid, padding, start = draw.choice([1, 63, 130]), draw.choice([0, 1, 62]), draw.choice([0, 0, 500])
        generator = torch.Generator().manual_seed(case)
        weight = torch.randint(-1, 2, (valid + padding, width), generator=generator).bfloat16()
        weight[valid:] = 100.0  # padding would win
        hidden = torch.randint(-2, 3, (bs * BLOCK, width), generator=generator).bfloat16()
        theirs = sampler(weight=weight, block_size=BLOCK, num_org=valid, org_vocab_start=start, max_bs=bs)
        theirs(hidden)
        rows = hidden.view(bs, BLOCK, width)[:, 1:].reshape(-1, width)
        with backend(case):
            head = tensors.head_of(weight, num_org=valid, org_vocab_start=start)
            assert torch.equal(tensors.select(rows, head), theirs.out), case
            assert torch.equal(tensors.select(rows, head, logit_dtype="bfloat16"), theirs.out), case
            # the same from two shards, the second of which may have no row at all
            cut = draw.randint(0, valid)
            keys = [
                lm_head_select(rows, tensors.head_of(weight[lo:hi], num_org=hi - lo, org_vocab_start=start + lo))[0]
                for lo, hi in ((0, cut), (cut, valid))
                if hi > lo
            ]
            assert torch.equal(key_token(combine_keys(torch.stack(keys))).flatten(), theirs.out), case
