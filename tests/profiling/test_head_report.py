"""`python -m profiling.head_report` on a head from a file; the real one is in tests/ops/test_lm_head_smollm2.py."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from profiling import head_report


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    # states in eight directions of 64
    states = torch.randn(80, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    save_file({"weight": torch.randn(3000, 64, generator=generator).bfloat16(), "states": states.bfloat16()}, path)
    return str(path)


def test_json(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    head_report.main(["--head", head, "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"dense", "int8", "int6_g64", "deflated H/8", "int4_g32, 32 rows", "low_rank H/8 int8, 512 rows"} <= set(
        rows
    )
    assert all(row["states"] == 40 for row in rows.values())
    assert all(rows[name]["kept"] == 1.0 for name in ("dense", "int8", "int8_g64", "int6_g64", "deflated H/4"))
    # the first half of the states gives the directions of the second
    assert rows["low_rank H/8, 64 rows"]["kept"] > 0.9
    assert rows["deflated H/8"]["survivors"]["0.5"] < rows["int6_g64"]["survivors"]["0.5"]
    assert rows["int8"]["bytes_per_row"] == 64 + 8


def test_tables(head: str, capsys: pytest.CaptureFixture[str]) -> None:
    head_report.main(["--head", head])
    out = capsys.readouterr().out
    certified, uncertified = out.split("\n\n")[1:]
    assert out.startswith("3000 rows x 64, torch.bfloat16; 40 states")
    assert "| int8 | 72 |" in certified and "low_rank" not in certified
    assert "| int4_g32, 32 rows |" in uncertified and "deflated" not in uncertified
