"""Settings every test runs under: few threads, poisoned allocations, no GPU tests where there is no GPU."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

torch.set_num_threads(int(os.environ.get("DMTP_TEST_THREADS") or os.environ.get("OMP_NUM_THREADS") or 2))
# deterministic mode fills torch.empty with NaN (integers: the largest value), so reading an unwritten output shows
torch.use_deterministic_algorithms(True, warn_only=True)
warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")

collect_ignore = [] if torch.cuda.is_available() else ["gpu"]

try:
    import hypothesis
except ImportError:
    pass
else:
    # shared machines pause: a slow example is no failure; the same examples every run
    hypothesis.settings.register_profile("dmtp", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("dmtp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
