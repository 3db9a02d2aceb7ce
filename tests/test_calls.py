"""Arguments are checked once per signature, and a signature has all that a check may look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import _calls, backends
from dmtp_kernels._calls import Passed, allocate
from dmtp_kernels.ops.accept import accept_prefix
from dmtp_kernels.ops.commit_kv import commit_kv
from dmtp_kernels.ops.sample import sample_rows
from dmtp_kernels.testing.capture import CaptureError, capture_safe

needs_module = pytest.mark.skipif(backends.compiled_missing() is not None, reason="needs the compiled module")


@pytest.fixture(params=["compiled", "plain"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the compiled module, and as if there were none."""
    if request.param == "plain":
        monkeypatch.setattr(backends, "_compiled", "taken away")
        backends._chosen.clear()
    elif backends.compiled_missing() is not None:
        pytest.skip("needs the compiled module")
    yield request.param
    backends._chosen.clear()


def signature(*values: Any) -> bytes | None:
    found: bytes | None = backends.compiled().signature(list(values))
    return found


@needs_module
def test_signature_tells_calls_apart_that_a_check_could() -> None:
    x = torch.zeros(4, 6)
    calls: list[tuple[Any, ...]] = [
        (x,),
        (x.double(),),
        (torch.zeros(6, 4).T,),
        (torch.zeros(8, 6)[::2],),
        (x[:, :5],),
        (x[::2],),
        (torch.zeros(24),),
        (torch.zeros(4, 6, device="meta"),),
        ([x],),
        ((x,),),
        ([x, x],),
        ([x], x),
        ([x, [x]],),
        (x, None),
        (None, x),
        (x, 1),
        (x, True),
        (x, 1.0),
        (x, "1"),
        (x, 2),
        (x, -(2**63)),
        (x, 0.5),
        (x, "12"),
        (x, ["1", "2"]),
        (),
    ]
    found = [signature(*call) for call in calls]
    assert None not in found
    assert len(set(found)) == len(calls)


@needs_module
def test_signature_is_the_same_for_other_data_and_other_offsets() -> None:
    x = torch.arange(24.0).view(4, 6)
    assert signature(x, 3, None) == signature(torch.full((4, 6), torch.nan), 3, None)
    assert signature(x[:2]) == signature(x[2:])


@needs_module
@pytest.mark.parametrize(
    "value",
    [2**63, torch.zeros(2, 2).to_sparse(), {"a": 1}, object(), torch.float32, [1, object()], [[[1]]]],
    ids=["large", "sparse", "dict", "object", "dtype", "inner", "deep"],
)
def test_what_has_no_signature_is_checked_every_time(value: Any) -> None:
    seen: list[Any] = []
    passed = Passed(lambda *values: seen.append(values), lambda *_: ())
    passed([value])
    passed([value])
    assert signature(value) is None
    assert len(seen) == 2


@needs_module
def test_checked_once_and_shapes_kept() -> None:
    seen: list[Any] = []
    passed = Passed(lambda *values: seen.append(values), lambda x, n: [((n, *x.shape), x.dtype)])
    for _ in range(3):
        assert passed([torch.zeros(2), 5]) == [((5, 2), torch.float32)]
    assert passed([torch.zeros(2), 6]) == [((6, 2), torch.float32)]
    assert len(seen) == 2


def test_refused_calls_stay_refused(module: str) -> None:
    def call(rows: int) -> None:
        ids = torch.zeros(2, 4, dtype=torch.int64)
        stop = torch.full((2, 1), -1)
        accept_prefix(ids, torch.zeros(2, rows, dtype=torch.int64), stop_ids=stop, budget=torch.full((2,), 9))

    for _ in range(2):
        call(4)
        with pytest.raises(ValueError, match=r"^target: dimension 1"):
            call(3)


def test_out_buffers_are_checked_beside_the_inputs(module: str) -> None:
    x = torch.zeros(2, 4, dtype=torch.int64)
    stop, budget = torch.full((2, 1), -1), torch.full((2,), 9)
    names = [a.name for a in torch.ops.dmtp.accept_prefix_out.default._schema.arguments if a.is_out]
    good = dict(zip(names, accept_prefix(x, x, stop_ids=stop, budget=budget), strict=True))
    for _ in range(2):
        torch.ops.dmtp.accept_prefix_out(x, x, stop_ids=stop, budget=budget, **good)
        for name in names:
            with pytest.raises(ValueError, match=f"accept_prefix_out: {name} is"):
                bad = good | {name: good[name].double()}
                torch.ops.dmtp.accept_prefix_out(x, x, stop_ids=stop, budget=budget, **bad)


@needs_module
def test_no_more_calls_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "_MOST", 3)
    seen: list[int] = []
    passed = Passed(lambda n: seen.append(n), lambda *_: ())
    for n in (0, 1, 2, 3, 3, 2):
        passed([n])
        assert len(passed._known) <= 3
    assert seen == [0, 1, 2, 3, 2]


def test_buffers(module: str) -> None:
    wanted = [((3, 2), torch.bfloat16), ((), torch.int64), ((0, 5), torch.bool)]
    for made, (shape, dtype) in zip(allocate(wanted, torch.device("cpu")), wanted, strict=True):
        assert (tuple(made.shape), made.dtype, made.device.type) == (shape, dtype, "cpu")
        assert made.is_contiguous()
    assert allocate([((2,), torch.float32)], torch.device("meta"))[0].device.type == "meta"


def test_buffers_are_seen_by_the_capture_mode_and_filled_where_that_is_asked_for(module: str) -> None:
    with pytest.raises(CaptureError), capture_safe(allocations=False):
        allocate([((2,), torch.float32)], torch.device("cpu"))
    torch.use_deterministic_algorithms(True)
    try:
        assert allocate([((64,), torch.float32)], torch.device("cpu"))[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_outputs_carry_no_gradient(module: str) -> None:
    logits = torch.randn(2, 8, requires_grad=True)
    keys = torch.zeros(2, dtype=torch.int64)
    with torch.enable_grad():
        found = sample_rows(logits, temperature=torch.ones(2), seed=keys, position=keys)
        assert torch.is_grad_enabled()
    first = found[0] if isinstance(found, tuple) else found
    assert not first.requires_grad and logits.grad is None


@needs_module
def test_odd_objects_are_refused_without_a_crash() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert signature(itself) is None
    float32, cpu = torch.float32, torch.device("cpu")
    for wanted, device in (
        ([((2,), float32)], None),
        ([((2,), float32)], "cpu"),
        ([((2,), 5)], cpu),
        ([((2,), None)], cpu),
    ):
        with pytest.raises(TypeError, match=r"^(device|wanted): "):
            backends.compiled().allocate(wanted, device)


@needs_module
def test_calls_with_lists_and_buffers_are_remembered() -> None:
    x = torch.zeros(3)
    assert signature([x, [x, x], 1], [x]) is not None


def test_what_is_written_may_not_repeat_elements(module: str) -> None:
    rows, cache = torch.zeros(2, 3, 1, 4), torch.zeros(8, 1, 4)
    valid, dst = torch.tensor([3, 2]), torch.arange(6).view(2, 3)

    def commit(cache: torch.Tensor = cache, **written: Any) -> None:
        commit_kv([rows], [rows], [cache], [torch.zeros(8, 1, 4)], valid, dst, **written)

    commit(lengths=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^lengths: has strides \(0,\), must not repeat elements"):
        commit(lengths=torch.zeros(1, dtype=torch.int64).expand(2))
    with pytest.raises(ValueError, match=r"^k_caches\[0\]: has strides"):
        commit(torch.zeros(1, 1, 4).expand(8, 1, 4))
    with pytest.raises(ValueError, match=r"^next_hidden: has strides"):
        commit(hidden=torch.zeros(2, 3, 5), next_hidden=torch.zeros(1, 5).expand(2, 5))


def test_a_buffer_that_is_none_is_named() -> None:
    x = torch.zeros(2, 4, dtype=torch.int64)
    stop, budget = torch.full((2, 1), -1), torch.full((2,), 9)
    names = [a.name for a in torch.ops.dmtp.accept_prefix_out.default._schema.arguments if a.is_out]
    good = dict(zip(names, accept_prefix(x, x, stop_ids=stop, budget=budget), strict=True))
    with pytest.raises((TypeError, RuntimeError), match=names[0]):
        torch.ops.dmtp.accept_prefix_out(x, x, stop_ids=stop, budget=budget, **good | {names[0]: None})
