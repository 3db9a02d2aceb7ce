"""Pages: what a request needs, who owns what, who waits and who is refused."""

from __future__ import annotations

import random

import pytest
import torch

from dmtp_kernels.decode.caches import OutOfPages, PagePool, pages_for
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.stack import MAX_ROWS
from tests.decode.engine_cases import CHECKPOINT, REQUESTS, assert_accounted, caches, engine_of, prompt, run


@torch.no_grad()
def test_row_095_freed_pages_equal_allocated_pages() -> None:
    """sglang#31616: lengths around a page edge leave no page behind."""
    engine = engine_of(page_size=64, max_tokens=192, max_batch=5)
    lengths = [1, 63, 64, 65, 127]
    for n in lengths:
        engine.submit(Request(prompt(n, n), 9, seed=n))
    engine.step()
    assert_accounted(engine)
    assert engine.stack.target_cache.pool.used == sum(pages_for(n + 9, 64) for n in lengths)
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    assert [cache.pool.used for cache in caches(engine)] == [0, 0, 0]


@pytest.mark.parametrize(("rows", "page", "pages"), [(11, 4, 3), (11, 1, 11), (64, 64, 1), (65, 64, 2), (0, 8, 0)])
def test_row_109_pages_for_a_round_of_rows(rows: int, page: int, pages: int) -> None:
    """ATOM#250: a round of 8 rows after 3 crosses more than one page."""
    assert pages_for(rows, page) == pages


def test_row_110_pages_are_never_owned_twice() -> None:
    """sglang#25805: a thousand random allocations and releases keep the books exact."""
    pool, rng = PagePool(40), random.Random(1)
    held: dict[int, list[int]] = {}
    for step in range(1000):
        if held and rng.random() < 0.5:
            owner = rng.choice(sorted(held))
            pool.release(held.pop(owner), owner)
        else:
            count = rng.randint(0, 12)
            if count > pool.free:
                with pytest.raises(OutOfPages):
                    pool.allocate(count, step)
            else:
                held[step] = pool.allocate(count, step)
        pages = [page for owned in held.values() for page in owned]
        assert len(pages) == len(set(pages)) == pool.used == pool.num_pages - pool.free
        assert 0 not in pages
    owner, pages = next((o, p) for o, p in held.items() if p)
    pool.release(pages, owner)
    with pytest.raises(ValueError, match="not owned"):
        pool.release(pages, owner)


@torch.no_grad()
def test_a_request_that_cannot_get_pages_waits_while_others_go_on() -> None:
    need = pages_for(17 + 14 + 17 % 5, 8)
    engine = engine_of(num_pages=need + 2, max_batch=4)
    ids = [engine.submit(REQUESTS[3]), engine.submit(REQUESTS[2])]
    engine.step()
    assert engine.live == ids[:1]
    assert engine.waiting == ids[1:]
    while engine.busy:
        engine.step()
        assert_accounted(engine)
    assert [engine.completions[i].tokens for i in ids] == [run([r])[0].tokens for r in (REQUESTS[3], REQUESTS[2])]


def test_a_request_that_can_never_fit_is_refused_and_nothing_is_queued() -> None:
    engine = engine_of(num_pages=3)
    with pytest.raises(ValueError, match="needs 5 pages of the target cache, its pool has 3"):
        engine.submit(Request(prompt(20, 1), 20))
    with pytest.raises(ValueError, match="the cache holds 96 per request"):
        engine.submit(Request(prompt(90, 1), 20))
    with pytest.raises(ValueError, match=r"token id outside 0\.\.19"):
        engine.submit(Request((1, 20), 4))
    assert not engine.busy
    assert engine.completions == {}


@torch.no_grad()
def test_rows_077_153_request_of_the_full_length_fits() -> None:
    """sglang#35985, sglang#29695: tables hold the length limit plus a round's rows; one token more is refused."""
    engine = engine_of(max_tokens=64)
    assert engine.state.target_table.shape[1] >= pages_for(64 + MAX_ROWS, 8)
    completion = engine.run([Request(prompt(40, 2), 24)])[0]
    assert len(completion.tokens) == 24
    with pytest.raises(ValueError, match="the cache holds 64"):
        engine.submit(Request(prompt(40, 2), 25))


def test_row_078_requests_stay_inside_the_position_range() -> None:
    """vllm#57941: the engine refuses lengths whose last round would leave the model's positions."""
    limit = CHECKPOINT.target.config.max_positions
    assert engine_of(max_tokens=limit - MAX_ROWS).max_tokens == limit - MAX_ROWS
    with pytest.raises(ValueError, match=f"must be between 2 and {limit - MAX_ROWS}"):
        engine_of(max_tokens=limit - MAX_ROWS + 1)
