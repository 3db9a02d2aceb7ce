"""Compiling before a capture, and the refusal to do it inside one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmtp_kernels
from dmtp_kernels import CompileDuringCapture, _warmup, warmup


def test_every_call_runs_once_in_order_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    seconds = warmup({name: lambda name=name: seen.append(name) for name in ("a", "b", "c")}, progress=True)  # type: ignore[misc]
    assert seen == ["a", "b", "c"] == list(seconds)
    assert all(s >= 0 for s in seconds.values())
    assert "3/3" in capsys.readouterr().err
    warmup({"quiet": lambda: None})
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_the_warmup_and_is_seen() -> None:
    seen: list[str] = []

    def fails() -> None:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        warmup({"bad": fails, "never": lambda: seen.append("never")}, progress=True)
    assert seen == []


class _Kernel:
    def __init__(self, module: str) -> None:
        self.module, self.name = module, "some_kernel"


def test_row_150_compiling_inside_a_capture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton#10596: a first call under capture invalidates the stream; it is refused, by name, before it starts."""
    knobs = pytest.importorskip("triton.knobs")
    asked: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **_: asked.append(fn.name))
    monkeypatch.setattr(_warmup, "_installed", False)
    _warmup.refuse_compiling_in_capture()
    hook = knobs.runtime.jit_cache_hook
    _warmup.refuse_compiling_in_capture()
    assert knobs.runtime.jit_cache_hook is hook

    ours, other = _Kernel("dmtp_kernels.ops.advance.kernels"), _Kernel("engine.kernels")
    call = {"key": "", "repr": "", "compile": {}, "is_manual_warmup": False, "already_compiled": False}
    hook(fn=ours, **call)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    hook(fn=other, **call)
    with pytest.raises(CompileDuringCapture, match="some_kernel: was not compiled for these arguments"):
        hook(fn=ours, **call)
    assert asked == ["some_kernel", "some_kernel"]
    with pytest.raises(CompileDuringCapture, match="warm up before"):
        warmup({})


def test_triton_ops_ask_for_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(dmtp_kernels.backends, "refuse_compiling_in_capture", lambda: calls.append(1))
    monkeypatch.setattr(dmtp_kernels.backends, "unavailable", lambda op, backend, device: None)
    monkeypatch.setattr(dmtp_kernels.backends, "_loaded", {})
    with dmtp_kernels.use_backend("triton", "accept_prefix"):
        dmtp_kernels.backends.implementation("accept_prefix", torch.device("cpu"))
    assert calls == [1]
