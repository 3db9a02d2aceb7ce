"""`capture_safe` refuses what a CUDA graph cannot hold and passes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.request import Request
from dmtp_kernels.testing.capture import CaptureError, capture_safe, suspended
from dmtp_kernels.testing.models import tiny_checkpoint

X = torch.arange(20.0).reshape(4, 5)
MASK, INDEX, FLAG = X > 3, torch.tensor([1, 2]), torch.tensor(True)
OUT = torch.zeros(4, 5)

READS: dict[str, Callable[[], object]] = {
    "item": lambda: X[0, 0].item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "np.asarray": lambda: np.asarray(X),
    "bool": lambda: bool(FLAG),
    "if": lambda: 1 if FLAG else 0,
    "int": lambda: int(INDEX[0]),
    "float": lambda: float(X[0, 0]),
    "list index": lambda: [1, 2, 3][INDEX[0]],
    "slice end": lambda: X[: INDEX[0]],
    "repr": lambda: repr(X),
    "in": lambda: 1.0 in X,
    "equal": lambda: torch.equal(X, OUT),
    "allclose": lambda: torch.allclose(X, OUT),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[MASK],
    "mask assignment": lambda: X.clone().__setitem__(MASK, 0.0),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: INDEX.unique(),
    "repeat_interleave": lambda: torch.repeat_interleave(X[0, :2], INDEX),
    "tensor": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.zeros(3)),
    "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu"),
    "to cuda": lambda: X.to("cuda"),
    "synchronize": lambda: torch.cuda.synchronize(),
}
FINE: dict[str, Callable[[], object]] = {
    "to device": lambda: X.to(INDEX.device),
    "cast": lambda: X.to(torch.float64),
    "full": lambda: torch.full((3,), 1.0),
    "where": lambda: torch.where(MASK, X, 0.0),
    "gather": lambda: X[INDEX],
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "matmul": lambda: X @ X.T,
    "sort": lambda: X.sort(),
    "scalar assignment": lambda: OUT.__setitem__(0, 1.0),
    "iterate": lambda: list(X),
    "length": lambda: len(X),
}
ALLOCATES: dict[str, Callable[[], object]] = {
    "add": lambda: X + 1,
    "empty": lambda: torch.empty(2),
    "copy to contiguous": lambda: X.T.contiguous(),
    "cast": lambda: X.to(torch.float64),
    "gather": lambda: X[INDEX],
}
ALLOCATES_NOT: dict[str, Callable[[], object]] = {
    "views": lambda: X.view(20)[3:7].view(torch.int32).unbind(0)[0].expand(4),
    "transpose": lambda: X.T.detach(),
    "in place": lambda: OUT.add_(1).zero_().copy_(X),
    "out form": lambda: torch.add(X, 1, out=OUT),
    "no-op contiguous": lambda: X.contiguous(),
    "no-op cast": lambda: X.to(torch.float32),
    "scalar assignment": lambda: OUT.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_read_or_copy_raises(name: str) -> None:
    with pytest.raises(CaptureError), capture_safe():
        READS[name]()


@pytest.mark.parametrize("name", FINE)
def test_what_can_be_captured_passes(name: str) -> None:
    with capture_safe() as mode:
        FINE[name]()
    assert mode.calls > 0 or name in ("to device", "length")


@pytest.mark.parametrize("name", ALLOCATES)
def test_an_allocation_raises_when_asked(name: str) -> None:
    with capture_safe():
        ALLOCATES[name]()
    with pytest.raises(CaptureError, match="allocates"), capture_safe(allocations=False):
        ALLOCATES[name]()


@pytest.mark.parametrize("name", ALLOCATES_NOT)
def test_views_and_writes_are_no_allocation(name: str) -> None:
    with capture_safe(allocations=False):
        ALLOCATES_NOT[name]()


def test_everything_works_again_outside() -> None:
    with pytest.raises(CaptureError), capture_safe():
        X.tolist()
    assert X.tolist()[0] == [0, 1, 2, 3, 4] and X.numpy().shape == (4, 5) and bool(FLAG)
    assert "tolist" not in vars(torch.Tensor) and torch.tensor([1]).item() == 1 and X.to("cpu") is X


def test_numpy_may_be_allowed_alone() -> None:
    with capture_safe(numpy=True):
        torch.from_numpy(X.numpy().copy())
    with pytest.raises(CaptureError), capture_safe(numpy=True):
        X.tolist()


def test_a_stand_in_for_a_kernel_is_not_watched() -> None:
    with capture_safe(allocations=False) as mode:
        with suspended():
            assert torch.tensor(X.tolist()).sum().item() == 190
        assert mode.calls == 0
        with pytest.raises(CaptureError):
            X + 1


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("dmtp_capture", "DEF")
    yield library
    library._destroy()


@pytest.mark.parametrize("what", ["read", "allocation", "fine"])
def test_the_inside_of_a_custom_op_is_watched(library: torch.library.Library, what: str) -> None:
    def double_(x: torch.Tensor) -> None:
        if what == "read":
            x.mul_(2 if x[0].item() > -1 else 1)
        elif what == "allocation":
            x.copy_(x * 2)
        else:
            x.mul_(2)

    library.define("double_(Tensor(a!) x) -> ()")
    library.impl("double_", double_, "CPU")
    x = torch.ones(3)
    if what == "fine":
        with capture_safe(allocations=False) as mode:
            torch.ops.dmtp_capture.double_(x)
        assert mode.calls == 2 and x.eq(2).all()
    else:
        with pytest.raises(CaptureError), capture_safe(allocations=False):
            torch.ops.dmtp_capture.double_(x)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_every_decode_round_can_be_captured(method: str) -> None:
    engine = Engine(tiny_checkpoint(3), method, max_batch=2, max_tokens=64, page_size=8)
    inner, seen = engine.round_function, []

    def watched(*args: Any) -> Any:
        # references look at CPU tensors through numpy
        with capture_safe(numpy=True) as mode:
            result = inner(*args)
        seen.append(mode.calls)
        return result

    engine.round_function = watched
    engine.run([Request((1, 2, 3), 6, temperature=t, seed=1) for t in (0.0, 0.8)])
    assert len(seen) > 1 and min(seen) > 50


@torch.no_grad()
def test_a_read_planted_in_a_round_is_caught() -> None:
    engine = Engine(tiny_checkpoint(3), "dmtp", max_batch=1, max_tokens=64, page_size=8)
    inner = engine.round_function

    def watched(stack: Any, state: Any) -> Any:
        with capture_safe(numpy=True):
            result = inner(stack, state)
            if result.accepted.commit_len.max() > 3:
                state.length += 0
        return result

    engine.round_function = watched
    with pytest.raises(CaptureError, match="__bool__"):
        engine.run([Request((1, 2, 3), 12)])
