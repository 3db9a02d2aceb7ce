"""Tests of an op run on every backend that this process has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from dmtp_kernels import backends, use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kernel_backends(*ops: str) -> list[str]:
    """Backends that run all of `ops` on CPU tensors here: triton alone when kernels are interpreted."""
    wanted = ("triton",) if INTERPRETED else ("reference", "cpu")
    cpu = torch.device("cpu")
    return [b for b in wanted if all(backends.unavailable(op, b, cpu) is None for op in ops)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # a module that declares KERNEL_OPS = ("op", ...) runs once per backend
    ops = getattr(metafunc.module, "KERNEL_OPS", None)
    if ops is not None:
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", kernel_backends(*ops), indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with ExitStack() as stack:
        stack.enter_context(use_backend(request.param))
        if INTERPRETED:
            from dmtp_kernels.testing import interpreter, watch

            interpreter.install()
            # no access outside the arguments, no need of an order of the programs
            stack.enter_context(watch.bounds_checked())
            stack.enter_context(watch.shuffled_programs(0))
        yield request.param
