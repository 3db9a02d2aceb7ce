"""Tests of an op run on every backend that this process has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from dmtp_kernels import backends, use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_FIBERS = os.environ.get("DMTP_CUDA_HOST") == "1"  # tests/cuda_host/test_cuda_host_suite.py sets it


def kernel_backends(*ops: str, every_capability: bool = False) -> list[str]:
    """Backends that run all of `ops` on CPU tensors here: triton alone when kernels are interpreted, cuda on fibers.

    With `every_capability` the compiled kernels count once per instruction set, as `cpu-avx2`.
    """
    wanted = ("triton",) if INTERPRETED else ("cuda",) if ON_FIBERS else ("reference", "cpu")
    cpu = torch.device("cpu")
    found = [b for b in wanted if all(backends.unavailable(op, b, cpu) is None for op in ops)]
    if every_capability and "cpu" in found:
        found.remove("cpu")
        found += [f"cpu-{name}" for name in backends.compiled().capabilities()]
    return found


def pytest_configure(config: pytest.Config) -> None:
    if ON_FIBERS:
        from tests.cuda_host import host
        from tests.cuda_host.cases import cuda_ops

        stack = ExitStack()
        stack.enter_context(host.accepted(*cuda_ops()))
        config.add_cleanup(stack.close)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # a module that declares KERNEL_OPS = ("op", ...) runs once per backend
    ops = getattr(metafunc.module, "KERNEL_OPS", None)
    if ops is not None:
        every = getattr(metafunc.module, "EVERY_CAPABILITY", False)
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", kernel_backends(*ops, every_capability=every), indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend that the module's KERNEL_OPS are forced to; other ops run what they run by default."""
    name, _, capability = request.param.partition("-")
    with use_backend(name, *request.module.KERNEL_OPS):
        if not capability:
            yield name
            return
        compiled = backends.compiled()
        before = compiled.capability()
        compiled.set_capability(capability)
        try:
            yield name
        finally:
            compiled.set_capability(before)


@pytest.fixture(autouse=True)
def _on_its_backend(request: pytest.FixtureRequest) -> None:
    # a parametrized fixture that a test does not name is not set up by itself
    if hasattr(request.module, "KERNEL_OPS"):
        request.getfixturevalue("backend")


@pytest.fixture(autouse=INTERPRETED)
def interpreted() -> Iterator[None]:
    """Interpreted kernels may not leave their arguments, nor need an order of their programs."""
    from dmtp_kernels.testing import interpreter, watch

    interpreter.install()
    with watch.bounds_checked(), watch.shuffled_programs(0):
        yield
