"""Our ops against vLLM's own Triton kernels on the same tensors: 200 random batches each, padding included."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops.accept import accept_prefix
from dmtp_kernels.ops.advance import RoundIndex, advance_round
from dmtp_kernels.ops.commit_kv import commit_kv
from tests.engines import peers

MISSING = peers.missing("vllm", "make test-engines")
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("mended")]

CASES, INTERPRETED = 200, 20
PAD, MASK, BLOCK = -1, 49, 8
SOURCE = peers.package("vllm") or Path()


@contextmanager
def backend(case: int) -> Iterator[None]:
    """Every tenth case runs our kernel interpreted too, the others what a CPU runs."""
    with use_backend("triton" if case % (CASES // INTERPRETED) == 0 else None):
        yield


def poison(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, -(2**30), dtype=dtype)


def test_greedy_rejection(tmp_path: Path) -> None:
    """Ragged drafts, requests without any, -1 where none was proposed, all accepted and none."""
    kernel = peers.kernels(
        tmp_path, "vllm_v1", (SOURCE / "v1/sample/rejection_sampler.py", "rejection_greedy_sample_kernel")
    )
    accepted = 0
    for case in range(CASES):
        draw = random.Random(case)
        bs, most, ids = draw.randint(1, 6), BLOCK - 1, draw.choice([2, 3, 250_000])
        counts = [draw.choice([0, 1, most, draw.randint(0, most)]) for _ in range(bs)]
        generator = torch.Generator().manual_seed(case)
        candidates = torch.randint(ids, (bs, BLOCK), generator=generator)
        target = torch.randint(ids, (bs, BLOCK), generator=generator)
        for row, count in enumerate(counts):
            kept = draw.randint(0, count)
            target[row, :kept] = candidates[row, 1 : 1 + kept]
            if draw.random() < 0.3:
                candidates[row, 1 + draw.randint(0, count) :] = -1  # padded draft ids
        last = target[torch.arange(bs), torch.tensor(counts)]
        out = torch.full((bs, BLOCK), PAD, dtype=torch.int32)
        kernel.rejection_greedy_sample_kernel[(bs,)](
            out,
            torch.tensor(counts, dtype=torch.int32).cumsum(0).int(),
            torch.cat([candidates[row, 1 : 1 + count] for row, count in enumerate(counts)]).int(),
            torch.cat([target[row, :count] for row, count in enumerate(counts)]),
            last.int(),
            None,
            most,
            None,
            None,
            SYNTHETIC_MODE=False,
        )
        with backend(case):
            ours = accept_prefix(
                candidates,
                target,
                stop_ids=torch.empty(0, dtype=torch.int64),
                budget=torch.full((bs,), 1 << 40),
                num_candidates=torch.tensor(counts),
            )
        assert torch.equal(ours.out_tokens, out.long()), case
        assert torch.equal(ours.commit_len, (out != PAD).sum(1).int()), case
        accepted += int(ours.accept_len.sum())
    assert accepted > CASES


def draw_tables(draw: random.Random, bs: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables `[bs, MP]` int32 with null blocks among them, and the anchors' positions."""
    pages = draw.randint(-(-16 // page_size), 2 + -(-64 // page_size))
    ids = list(range(1, 1 + bs * pages))
    draw.shuffle(ids)
    table = torch.tensor(ids, dtype=torch.int32).view(bs, pages)
    if draw.random() < 0.5:
        table[torch.rand(table.shape, generator=torch.Generator().manual_seed(draw.randint(0, 99))) < 0.3] = (
            0  # evicted
        )
    # a block past its table has slot -1 here, in vLLM those of the last page
    most = pages * page_size - BLOCK
    return table, torch.tensor([min(draw.choice([1, page_size, draw.randint(1, most)]), most) for _ in range(bs)])


def index(
    table: torch.Tensor, anchors: torch.Tensor, live: torch.Tensor, bonus: torch.Tensor, page_size: int, first: int
) -> RoundIndex:
    """Our index of the rows at and after the anchors; nothing was committed."""
    none = torch.zeros_like(anchors)
    return advance_round(
        anchors.clone(),
        bonus.clone(),
        torch.where(live, 1 << 30, 0),
        none.int(),
        none,
        none,
        none,
        [table.clone()],
        page_sizes=[page_size],
        rows=BLOCK,
        block_slots=BLOCK,
        mask_id=MASK,
        first_page=first,
    )


def test_slot_mappings(tmp_path: Path) -> None:
    """Rows of a verification; padded requests map to no state and their tokens to slot -1."""
    kernel = peers.kernels(
        tmp_path,
        "vllm_slots",
        (SOURCE / "v1/worker/gpu/buffer_utils.py", "_load_ptr"),
        (SOURCE / "v1/worker/gpu/block_table.py", "_compute_slot_mappings_kernel"),
    )
    for case in range(CASES):
        draw = random.Random(1000 + case)
        bs, page_size = draw.randint(1, 5), draw.choice([1, 4, 16])
        table, anchors = draw_tables(draw, bs, page_size)
        live = torch.tensor([draw.random() < 0.8 for _ in range(bs)])
        starts = torch.arange(bs + 1, dtype=torch.int32) * BLOCK
        total = bs * BLOCK + draw.choice([0, 5])
        slots = poison(1, total)
        one = torch.ones(1, dtype=torch.bool)
        kernel._compute_slot_mappings_kernel[(1, bs + 1)](
            total,
            torch.where(live, torch.arange(bs), -1).int(),
            starts,
            (anchors[:, None] + torch.arange(BLOCK)).flatten(),
            torch.tensor([table.data_ptr()], dtype=torch.uint64),
            torch.tensor([table.shape[1]]),
            torch.tensor([page_size], dtype=torch.int32),
            one,
            ~one,
            slots,
            slots.stride(0),
            0,
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=PAD,
            TRITON_BLOCK_SIZE=16,
        )
        with backend(case):
            ours = index(table, anchors, live, torch.zeros_like(anchors), page_size, 0)
        assert torch.equal(ours.slots[:, 0].flatten(), slots[0, : bs * BLOCK]), case
        assert (slots[0, bs * BLOCK :] == PAD).all(), case


def test_draft_block(tmp_path: Path) -> None:
    """Inputs of a draft after a verification: context rows to store, block, lengths; the null block has no slot."""
    kernel = peers.kernels(
        tmp_path,
        "vllm_dflash",
        (SOURCE / "v1/worker/gpu/cp_utils.py", "cp_local_slot"),
        (SOURCE / "v1/worker/gpu/spec_decode/dflash/speculator.py", "_prepare_dflash_inputs_kernel"),
    )
    for case in range(CASES):
        draw = random.Random(2000 + case)
        bs, page_size = draw.randint(1, 5), draw.choice([1, 4, 16])
        table, anchors = draw_tables(draw, bs, page_size)
        # verification ran at positions before the next anchor: `commits` of its rows are true
        commits = torch.tensor([min(draw.randint(1, BLOCK), int(a)) for a in anchors])
        befores = anchors - commits
        more = draw.choice([0, 2])
        made = draft_inputs(kernel, table, befores, commits, page_size, bs + more)
        with backend(case):
            ours = index(table, anchors, torch.ones(bs, dtype=torch.bool), made["bonus"], page_size, 1)
            verified = index(table, befores, torch.ones(bs, dtype=torch.bool), made["bonus"], page_size, 1)
        assert torch.equal(ours.block_ids, made["ids"][: bs * BLOCK].view(bs, BLOCK).long()), case
        assert torch.equal(ours.positions, made["positions"][: bs * BLOCK].view(bs, BLOCK)), case
        assert torch.equal(ours.slots[:, 0].flatten(), made["slots"][: bs * BLOCK]), case
        assert torch.equal(ours.context_len + BLOCK, made["lens"][:bs].long()), case
        assert (made["lens"][bs:] == 0).all() and (made["slots"][bs * BLOCK :] == PAD).all(), case
        true = torch.arange(BLOCK) < commits[:, None]
        assert torch.equal(torch.where(true, verified.slots[:, 0], PAD).flatten(), made["context_slots"]), case
        store_context(case, table, verified.slots[:, 0], commits, made["context_slots"], page_size)


def draft_inputs(
    kernel: Any, table: torch.Tensor, befores: torch.Tensor, commits: torch.Tensor, page_size: int, most: int
) -> dict[str, torch.Tensor]:
    bs = len(befores)
    state = torch.randperm(most, generator=torch.Generator().manual_seed(bs))[:bs].int()
    bonus = torch.arange(bs) + 5
    last = poison(most)
    last[state.long()] = bonus
    i32 = torch.int32
    made = {
        "ids": poison(most * BLOCK, dtype=i32),
        "positions": poison(most * BLOCK),
        "starts": poison(most + 1, dtype=i32),
        "lens": poison(most, dtype=i32),
        "slots": poison(most * BLOCK),
        "context_positions": poison(bs * BLOCK),
        "context_slots": poison(bs * BLOCK),
        "sample_indices": poison(most * BLOCK),
        "sample_positions": poison(most * BLOCK),
        "sample_states": poison(most * BLOCK, dtype=i32),
        "temperature": torch.zeros(most),
        "seeds": torch.zeros(most, dtype=torch.int64),
    }
    kernel._prepare_dflash_inputs_kernel[(bs, 1)](
        *made.values(),
        (befores[:, None] + torch.arange(BLOCK)).flatten(),
        torch.arange(bs + 1, dtype=i32) * BLOCK,
        state,
        last,
        poison(most, dtype=i32),
        commits.int(),
        (BLOCK - commits).int(),
        torch.zeros(most),
        torch.zeros(most, dtype=torch.int64),
        table,
        table.stride(0),
        MASK,
        page_size,
        BLOCK,
        BLOCK - 1,
        most,
        most * BLOCK,
        1 << 20,
        0,
        SAMPLE_FROM_ANCHOR=False,
        PAD_SLOT_ID=PAD,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        BLOCK_SIZE=16,
    )
    return made | {"bonus": bonus}


def store_context(
    case: int, table: torch.Tensor, slots: torch.Tensor, commits: torch.Tensor, theirs: torch.Tensor, page_size: int
) -> None:
    """Our commit writes the rows that vLLM's slot mapping names, and no other."""
    size = (int(table.max()) + 1) * page_size
    rows = torch.arange(1, 1 + slots.numel(), dtype=torch.float32).view(*slots.shape, 1, 1)
    ours, wanted = torch.zeros(size, 1, 1), torch.zeros(size, 1, 1)
    kept = theirs != PAD
    wanted[theirs[kept]] = rows.flatten(0, 1)[kept]
    with backend(case):
        assert not commit_kv([rows], [rows], [ours], [ours.clone()], commits, slots, first_slot=page_size).any()
    assert torch.equal(ours, wanted), case
