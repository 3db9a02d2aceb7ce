"""Buffers on huge pages are ordinary tensors."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.ops import _pages


@pytest.mark.parametrize("advise", [True, False])
@pytest.mark.parametrize("rows", [0, 3, 70_001])
def test_zeros(monkeypatch: pytest.MonkeyPatch, rows: int, advise: bool) -> None:
    calls: list[tuple[int, int, int]] = []
    if advise:
        monkeypatch.setattr(_pages, "_madvise", lambda: lambda *args: calls.append(args))
    else:
        monkeypatch.setattr(_pages, "_madvise", lambda: None)
    got = _pages.zeros((rows, 130), torch.int8, torch.device("cpu"))
    assert got.shape == (rows, 130) and got.is_contiguous() and got.dtype == torch.int8 and not got.any()
    if not advise or rows < 70_001:
        assert not calls
        return
    (start, length, advice), end = calls[0], got.data_ptr() + got.nbytes
    # whole pages, all of them inside the buffer
    assert start == got.data_ptr() and start % (1 << 21) == length % (1 << 21) == 0 and start + length <= end
    assert advice == 14
    got.fill_(1)
    assert int(got.sum(dtype=torch.int64)) == got.numel()


def test_a_refusal_changes_nothing() -> None:
    advise = _pages._madvise()
    if advise is None:
        pytest.skip("no madvise here")
    assert advise(1, 1 << 21, 14) != 0
    assert not _pages.zeros((9_000_000,), torch.uint8, torch.device("cpu")).any()
