"""Choosing an implementation: what is picked, what is refused and with which words."""

from __future__ import annotations

import importlib.util
import types

import pytest
import torch

import dmtp_kernels
from dmtp_kernels import BackendUnavailable, _library, backends

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OP = "example"
RAN: list[str] = []


def run_reference() -> None:
    RAN.append("reference")


def run_cpu() -> None:
    RAN.append("cpu")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty registry, so that the tests say nothing about the ops of today."""
    monkeypatch.setattr(backends, "_implementations", {})
    monkeypatch.setattr(backends, "_loaded", {})
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setattr(backends, "_forced", {})
    module = types.ModuleType("_C")
    module.signature = lambda values: None  # type: ignore[attr-defined]
    module.allocate = lambda wanted, device: [torch.empty(s, dtype=d, device=device) for s, d in wanted]  # type: ignore[attr-defined]
    monkeypatch.setattr(backends, "_compiled", module)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    RAN.clear()


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def register(*names: str) -> None:
    backends.register(OP, {name: f"missing.{name}:run" for name in names})


@pytest.mark.parametrize(
    ("names", "device", "chosen"),
    [
        (("reference",), CPU, "reference"),
        (("reference",), CUDA, "reference"),
        (("reference", "cpu"), CPU, "cpu"),
        (("reference", "cpu"), CUDA, "reference"),
        (("reference", "triton"), CUDA, "triton"),
        (("reference", "triton"), CPU, "reference"),
        (("reference", "triton", "cuda", "cpu"), CUDA, "triton"),
        (("reference", "triton", "cuda", "cpu"), CPU, "cpu"),
    ],
)
def test_best_backend_per_device(with_triton: None, names: tuple[str, ...], device: torch.device, chosen: str) -> None:
    register(*names)
    assert backends.choose(OP, device) == chosen


def test_without_triton_a_gpu_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    register("reference", "triton")
    assert backends.choose(OP, CUDA) == "reference"
    assert backends.unavailable(OP, "triton", CUDA) == "triton is not installed"


def test_interpreter_lets_triton_take_cpu_tensors(with_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    register("reference", "triton")
    with backends.use_backend("triton"):
        with pytest.raises(BackendUnavailable, match="only under TRITON_INTERPRET=1"):
            backends.choose(OP, CPU)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert backends.choose(OP, CPU) == "triton"


@pytest.mark.parametrize(
    ("backend", "device", "reason"),
    [
        ("cuda", CPU, "cuda kernels need CUDA tensors, got cpu"),
        ("cpu", CUDA, "cpu kernels need CPU tensors, got cuda"),
        ("triton", CPU, "triton runs CPU tensors only under TRITON_INTERPRET=1"),
        ("opencl", CPU, "no backend named 'opencl', must be one of triton, cuda, cpu, reference, flash"),
    ],
)
def test_reason_names_what_is_wrong(with_triton: None, backend: str, device: torch.device, reason: str) -> None:
    register(*backends.NAMES)
    assert backends.unavailable(OP, backend, device) == reason


def test_an_op_without_the_backend_says_so() -> None:
    register("reference")
    assert backends.unavailable(OP, "cpu", CPU) == f"{OP} has no cpu implementation"
    assert backends.unavailable("unheard_of", "reference", CPU) == "unheard_of has no reference implementation"
    with pytest.raises(BackendUnavailable, match="nothing runs on cpu"):
        backends.choose("unheard_of", CPU)


def test_use_backend_takes_effect_at_once_and_restores() -> None:
    register("reference", "cpu")
    with backends.use_backend("reference"):
        assert backends.choose(OP, CPU) == "reference"
        with backends.use_backend(None):
            assert backends.choose(OP, CPU) == "cpu"
        assert backends.choose(OP, CPU) == "reference"
    assert backends.choose(OP, CPU) == "cpu"
    backends.use_backend("reference")
    assert backends.choose(OP, CPU) == "reference"


def test_one_op_can_be_forced_alone() -> None:
    register("reference", "cpu")
    backends.register("other", {"reference": "missing.reference:run", "cpu": "missing.cpu:run"})
    with backends.use_backend("reference", OP):
        assert (backends.choose(OP, CPU), backends.choose("other", CPU)) == ("reference", "cpu")
        with backends.use_backend("cpu", "other"):
            assert (backends.choose(OP, CPU), backends.choose("other", CPU)) == ("reference", "cpu")
        with backends.use_backend("reference"):
            assert backends.choose("other", CPU) == "reference"
            with backends.use_backend("cpu", OP):
                assert (backends.choose(OP, CPU), backends.choose("other", CPU)) == ("cpu", "reference")
            with backends.use_backend(None, OP):
                assert backends.choose(OP, CPU) == "reference"
        with backends.use_backend(None, OP):
            assert backends.choose(OP, CPU) == "cpu"
        assert backends.choose(OP, CPU) == "reference"
    assert backends.choose(OP, CPU) == "cpu"


def test_a_choice_reaches_an_op_that_has_run() -> None:
    backends._loaded.update({(OP, "reference"): run_reference, (OP, "cpu"): run_cpu})
    register("reference", "cpu")
    backends.implementation(OP, CPU)()
    with backends.use_backend("reference", OP):
        backends.implementation(OP, CPU)()
    backends.implementation(OP, CPU)()
    backends.register(OP, {"reference": "missing.reference:run"})
    backends.implementation(OP, CPU)()
    assert RAN == ["cpu", "reference", "cpu", "reference"]


def test_use_backend_restores_after_an_error() -> None:
    register("reference", "cpu")
    with pytest.raises(ZeroDivisionError), backends.use_backend("reference"):
        _ = 1 // 0
    assert backends.choose(OP, CPU) == "cpu"


def test_a_forced_backend_never_falls_back() -> None:
    register("reference")
    with (
        backends.use_backend("cpu"),
        pytest.raises(BackendUnavailable, match=f"{OP}: backend 'cpu' was forced, but {OP} has no cpu implementation"),
    ):
        backends.implementation(OP, CPU)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="name: no backend 'tpu', must be one of triton, cuda, cpu, reference, flash"):
        backends.use_backend("tpu")
    with pytest.raises(ValueError, match=r"ops: no op 't1_prep', must be among "):
        backends.use_backend("cpu", "t1_prep")
    with pytest.raises(ValueError, match=r"implementations: unknown backend \['tpu'\]"):
        backends.register(OP, {"tpu": "module:function"})
    register("reference")
    assert backends.choose(OP, CPU) == "reference"


def test_module_of_a_backend_is_imported_at_first_call_only() -> None:
    register("reference")
    assert backends.choose(OP, CPU) == "reference"
    with pytest.raises(ModuleNotFoundError, match="missing"):
        backends.implementation(OP, CPU)


def test_implementation_follows_the_choice() -> None:
    backends._loaded.update({(OP, "reference"): run_reference, (OP, "cpu"): run_cpu})
    register("reference", "cpu")
    backends.implementation(OP, CPU)()
    with backends.use_backend("reference"):
        backends.implementation(OP, CPU)()
    assert RAN == ["cpu", "reference"]


def test_supports_gives_one_reason_and_raises_nothing() -> None:
    backends.register("accept_prefix", {"reference": "dmtp_kernels.ops.accept.reference:accept_prefix"})
    ids, budget = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    stop = torch.zeros(0, dtype=torch.int64)
    assert dmtp_kernels.supports("accept_prefix", ids, ids, stop, budget) is None
    reason = dmtp_kernels.supports("accept_prefix", ids, ids[:, :7], stop, budget)
    assert reason == "target: dimension 1 (R) is 7, must be 8"
    reason = dmtp_kernels.supports("accept_prefix", ids, ids.float(), stop, budget)
    assert reason is not None and reason.startswith("target: dtype is torch.float32")
    reason = dmtp_kernels.supports("no_such_op", ids)
    assert reason is not None and all(op in reason for op in _library.registered())
    with backends.use_backend("cuda"):
        reason = dmtp_kernels.supports("accept_prefix", ids, ids, stop, budget)
    assert reason == "accept_prefix: backend 'cuda' was forced, but accept_prefix has no cuda implementation"


def test_supports_takes_keywords_and_names_what_is_missing_or_wrong() -> None:
    ids, stop, budget = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1)
    backends.register("accept_prefix", {"reference": "dmtp_kernels.ops.accept.reference:accept_prefix"})
    budget = budget.long()
    assert dmtp_kernels.supports("accept_prefix", ids, target=ids, stop_ids=stop, budget=budget) is None
    assert dmtp_kernels.supports("accept_prefix") == "candidates: is missing, must be a tensor"
    assert dmtp_kernels.supports("accept_prefix", ids, ids, [2], budget) == "stop_ids: is a list, must be a tensor"
    reason = dmtp_kernels.supports("accept_prefix", ids, ids, stop, budget, 7)
    assert reason == "num_candidates: is a int, must be a tensor or None"
    for unknown in ({"temperature": stop}, {"candidates": ids}):
        assert "not among the arguments" in str(
            dmtp_kernels.supports("accept_prefix", ids, ids, stop, budget, **unknown)
        )


def test_output_buffers_must_be_where_the_inputs_are() -> None:
    backends.register("accept_prefix", {"reference": "dmtp_kernels.ops.accept.reference:accept_prefix"})
    ids, stop = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    op = _library._OPS["accept_prefix"]
    outputs = op.functional(ids, ids, stop, stop)
    names = [a.name for a in op.out._schema.arguments[-len(outputs) :]]
    buffers = dict(zip(names, outputs, strict=True))
    buffers["bonus"] = torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="bonus is on meta, must be on cpu"):
        op.out(ids, ids, stop, stop, **buffers)
