"""What the tests of engines share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mended() -> None:
    """Triton's interpreter without the faults that our kernels, and others', would meet."""
    from dmtp_kernels.testing import interpreter

    interpreter.install()
