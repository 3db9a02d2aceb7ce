"""Rounds through `GraphRunner`: eagerly here, under the rules of a capture; tests/gpu captures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels._library import _OPS
from dmtp_kernels.backends import unavailable
from dmtp_kernels.decode import round as round_module
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.graphs import GROUPS, GraphRunner, graph_sizes
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Request
from dmtp_kernels.decode.round import STAGES
from dmtp_kernels.ops._spec import Spec
from dmtp_kernels.ops.accept.spec import SPECS as ACCEPT
from dmtp_kernels.ops.advance.spec import SPECS as ADVANCE
from dmtp_kernels.ops.commit_kv.spec import SPECS as COMMIT
from dmtp_kernels.ops.draft_pages.spec import SPECS as PAGES
from dmtp_kernels.ops.sample.spec import SPECS as SAMPLE
from dmtp_kernels.testing.capture import CaptureError, capture_safe
from tests.decode.engine_cases import REQUESTS, engine_of, prompt, run

SHORT = [Request(prompt(5, 1), 9), Request(prompt(11, 2), 6, temperature=0.8, seed=3)]

ROUND_SPECS = (*ACCEPT, *ADVANCE, *COMMIT, *PAGES, *SAMPLE)
PLAIN = [c.tokens for c in run(SHORT, "autoregressive")]


def guarded(method: Any, **options: Any) -> Engine:
    """An engine whose rounds run under the rules of a capture, and that has run some."""
    engine = engine_of(method, graphs="exact", **options)
    assert engine.graphs is not None
    engine.graphs.guard = lambda: capture_safe(numpy=True)
    for request in SHORT:
        engine.submit(request)
    engine.step()
    return engine


@pytest.mark.parametrize(
    ("method", "verification"),
    [*((m, "target") for m in METHODS), *((m, v) for m in ("dmtp", "dflash", "mtp4") for v in ("rejection", "block"))],
)
@torch.no_grad()
def test_a_steady_round_can_be_captured(method: str, verification: str) -> None:
    """Row 141: no read from the host, no shape from data, no copy between host and device."""
    engine = guarded(method, verification=verification)
    while engine.busy:
        engine.step()
    completions = list(engine.completions.values())
    assert [len(c.tokens) for c in completions] == [r.max_new_tokens for r in SHORT]
    if verification == "target":
        assert [c.tokens for c in completions] == PLAIN


@pytest.mark.parametrize("plant", ["item", "bool", "mask", "copy"])
@pytest.mark.parametrize("name", STAGES)
@torch.no_grad()
def test_one_planted_read_is_refused(name: str, plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plants: dict[str, Callable[[torch.Tensor], object]] = {
        "item": lambda t: t[0].item(),
        "bool": lambda t: 1 if t[0] > 0 else 0,
        "mask": lambda t: t[t > 0],
        "copy": lambda t: t.cpu(),
    }
    original = getattr(round_module, name)

    def spoiled(stack: Any, state: Any) -> None:
        original(stack, state)
        plants[plant](state.length)

    engine = guarded("dmtp")
    monkeypatch.setattr(round_module, name, spoiled)
    with pytest.raises(CaptureError):
        engine.step()


@pytest.mark.parametrize("mode", ["exact", "padded"])
@pytest.mark.parametrize("method", ["dmtp", "dflash", "mtp4", "mask_residual", "context_fusion"])
def test_modes_decode_alike(method: str, mode: str) -> None:
    """Rows 146, 158: with buckets, requests that join and leave at different moments get what exact counts give."""
    requests = [Request(prompt(3 + 5 * i % 17, i), 3 + 4 * i % 13, temperature=0.6 * (i % 2), seed=i) for i in range(6)]
    eager = run(requests, method, max_batch=5)
    assert [c.tokens for c in run(requests, method, max_batch=5, graphs=mode)] == [c.tokens for c in eager]


def test_sizes() -> None:
    assert graph_sizes("exact", 5) == (1, 2, 3, 4, 5)
    assert graph_sizes("padded", 5) == (1, 2, 4, 5)
    assert graph_sizes("padded", 32) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes("padded", 1) == (1,)
    with pytest.raises(ValueError, match="graphs: is 'full', must be one of exact, padded"):
        graph_sizes("full", 4)
    assert tuple(name for group in GROUPS for name in group) == STAGES


@pytest.mark.parametrize("method", ["dmtp", "dflash", "mtp4"])
@torch.no_grad()
def test_rows_155_157_padded_rows_may_hold_anything_but_a_budget(method: str) -> None:
    """vllm#41841, vllm-ascend#16168: garbage in every input of the padding changes no live row, cache or guard."""
    outputs = []
    for garbage in (False, True):
        engine = engine_of(method, max_batch=8, graphs="padded")
        for request in REQUESTS[:3]:
            engine.submit(request)
        engine.step()
        state, live = engine.state, len(engine.seats)
        assert live == 3 and engine.graphs is not None and engine.graphs.size_of(live) == 4
        before = {n: t[live:].clone() for n, t in state._tensors().items()}
        if garbage:
            for name, tensor in state._tensors().items():
                rows = tensor[live:]
                if name not in ("grants", "idle"):
                    rows.fill_(float("nan") if rows.is_floating_point() else torch.iinfo(rows.dtype).max)
            state.budget[live:] = torch.iinfo(torch.int64).min
            state.sampling.temperature[live:] = float("nan")
            state.index.slots[live:] = -1
        while engine.busy:
            engine.step()
        outputs.append([c.tokens for c in engine.completions.values()])
        if not garbage:
            assert all(torch.equal(before[n], t[live:]) for n, t in state._tensors().items() if n == "budget")
    assert outputs[0] == outputs[1] == [c.tokens for c in run(REQUESTS[:3], "autoregressive")]


def test_row_157_sizes_beyond_the_state_are_refused() -> None:
    engine = engine_of("dmtp", max_batch=6)
    with pytest.raises(ValueError, match=r"sizes: are \[4, 8\], must be between 1 and the state's 6 rows"):
        GraphRunner(engine.stack, engine.state, [4, 8])
    runner = GraphRunner(engine.stack, engine.state, [2, 4])
    with pytest.raises(ValueError, match="view: has 5 rows, the largest prepared size is 4"):
        runner(engine.stack, engine.state.rows(0, 5))
    with pytest.raises(ValueError, match="not made of the first rows"):
        runner(engine.stack, engine.state.rows(1, 3))


@torch.no_grad()
def test_row_153_tables_hold_a_whole_round_past_the_longest_request() -> None:
    """sglang#29695: a request of max_tokens still looks at eight rows, which have columns of their own."""
    engine = engine_of("dmtp", max_tokens=64, page_size=8)
    for table in (engine.state.target_table, engine.state.drafter_table, engine.state.mtp_table):
        assert table.shape[1] * 8 >= 64 + engine.stack.rows
    request = Request(prompt(20, 1), 44)
    assert len(engine.run([request])[0].tokens) == 44


@torch.no_grad()
def test_row_154_a_size_is_prepared_once_and_reused() -> None:
    """llama.cpp#28549: one set of views per size, whatever the order of sizes; nothing is made anew in the steady
    state."""
    engine = engine_of("dmtp", graphs="exact")
    runner = engine.graphs
    assert runner is not None
    runner.warmup()
    views = dict(runner._views)
    engine.run(REQUESTS)
    assert runner._views == views and sorted(views) == [1, 2, 3, 4]


@torch.no_grad()
def test_warmup_changes_no_state_and_refuses_a_seated_request(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of("dmtp", graphs="exact")
    before = {n: t.clone() for n, t in engine.state._tensors().items()}
    engine.warmup(progress=True)
    assert "4/4" in capsys.readouterr().err
    after = engine.state._tensors()
    assert all(torch.equal(before[n], after[n]) for n in before)
    engine.submit(Request(prompt(5, 1), 9))
    engine.step()
    with pytest.raises(RuntimeError, match="a row holds a request"):
        engine.warmup()
    plain = engine_of("dmtp")
    plain.warmup()
    assert [c.tokens for c in plain.run(REQUESTS)] == [c.tokens for c in run(REQUESTS, "autoregressive")]


@pytest.mark.parametrize("spec", ROUND_SPECS, ids=lambda s: s.op)
@torch.no_grad()
def test_kernels_of_a_round_allocate_nothing_in_their_out_form(spec: Spec) -> None:
    """Outputs are written where a graph will find them again, and scratch is kept from call to call."""
    if unavailable(spec.op, "cpu", torch.device("cpu")) is not None:
        pytest.skip("has no compiled kernel here")
    op = _OPS[spec.op]
    inputs = spec.cases[0].make(torch.Generator().manual_seed(0))
    with use_backend("cpu", spec.op):
        names = [a.name for a in op.out._schema.arguments]
        made = op.functional(**dict(zip(names, inputs, strict=False)))
        outputs = list(made) if isinstance(made, list | tuple) else [made]
        call = dict(zip(names, [*inputs, *outputs], strict=True))
        op.out(**call)
        with capture_safe(allocations=False) as mode:
            op.out(**call)
    assert mode.calls > 0


@torch.no_grad()
def test_rows_147_149_every_input_has_the_rows_of_its_size() -> None:
    """vLLM-2080Ti#208, sglang#9687: padding has eight rows of its own, every input the rows of the size it runs at."""
    engine = engine_of("dmtp", max_batch=24, graphs="padded")
    runner = engine.graphs
    assert runner is not None and runner.size_of(17) == 24
    for size, view in runner._views.items():
        named = {**view._tensors(), **view.index._asdict(), **vars(view.sampling)}
        assert {name: t.shape[0] for name, t in named.items()} == dict.fromkeys(named, size)
        assert view.index.slots.shape[1:] == (3, engine.stack.rows)
        assert view.sampling.seed.shape == view.index.positions.shape == (size, engine.stack.rows)
    for _ in range(17):
        engine.submit(Request(prompt(3, 1), 6))
    engine.step()
    assert len(engine.seats) == 17
    assert [len(t) for t in engine.seating.round_view().work.accepted or ()] == [17] * 5
    assert len(runner._views[24].work.accepted.out_tokens) == 24  # type: ignore[union-attr]
