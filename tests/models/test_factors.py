"""Trained low-rank factors travel in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmtp_kernels.models.factors import load_factors, save_factors
from dmtp_kernels.ops.lm_head import lm_head_screen, pack_lm_head
from tests.ops.lm_head_cases import random


def test_trained_factors_travel_in_a_file(tmp_path: Path) -> None:
    w, h = random(300, 64), random(7, 64, seed=1)
    down, up = random(8, 64, seed=2), random(300, 8, seed=3)
    path = tmp_path / "factors.safetensors"
    save_factors(path, down, up)
    direct = pack_lm_head(w, format="low_rank", factors=(down, up), fallback="none", up_format="int8")
    loaded = pack_lm_head(w, format="low_rank", factors=load_factors(path), fallback="none", up_format="int8")
    assert torch.equal(lm_head_screen(h, direct)[0], lm_head_screen(h, loaded)[0])
    assert torch.equal(load_factors(path, rows=slice(100, 200))[1], up[100:200])
    for broken, message in ((b"", "not a readable"), (path.read_bytes()[:200], "not a readable")):
        (tmp_path / "broken").write_bytes(broken)
        with pytest.raises(ValueError, match=message):
            load_factors(tmp_path / "broken")
    with pytest.raises(FileNotFoundError, match="not a file"):
        load_factors(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"up: shape is \(300, 7\)"):
        save_factors(tmp_path / "odd", down, up[:, :7])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "factors.safetensors"]
