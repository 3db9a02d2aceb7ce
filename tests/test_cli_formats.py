"""`dmtp export` and `dmtp generate` on directories in public formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmtp_kernels.models.checkpoint import save_checkpoint
from dmtp_kernels.models.formats import read_dmtp
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.test_cli import dmtp, refused


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A byte-level trio's file, and the directory that `dmtp export` wrote of it."""
    root = tmp_path_factory.mktemp("formats")
    trio = tiny_checkpoint(0, vocab_size=260, num_valid=258, mask_token_id=258)
    path = save_checkpoint(root / "trio.safetensors", trio)
    result = dmtp("export", "--output", root / "out", "--checkpoint", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(root / "out" / name) for name in ("target", "mtp", "drafter")]
    return path, root / "out"


def test_the_export_generates_what_the_file_does(exported: tuple[Path, Path]) -> None:
    path, out = exported
    options = ("generate", "def main", "--max-new-tokens", 20, "--temperature", 0.8, "--json")
    parts = ("--target", out / "target", "--drafter", out / "drafter", "--mtp", out / "mtp")
    first, second = dmtp(*options, "--checkpoint", path), dmtp(*options, *parts, "--check")
    assert second.exit_code == 0, second.output
    assert json.loads(first.stdout)["outputs"] == json.loads(second.stdout)["outputs"]
    assert json.loads(second.stdout)["check"]["identical"]
    ids = dmtp("generate", "--ids", ",".join(map(str, b"def main")), *parts, "--max-new-tokens", 20, "--batch", 2)
    assert ids.exit_code == 0, ids.output
    lines = ids.stdout.splitlines()
    assert len(lines) == 2 and all(len(line.split(",")) == 20 for line in lines)


def test_another_dtype_and_method(exported: tuple[Path, Path], tmp_path: Path) -> None:
    result = dmtp(
        "export", "--output", tmp_path, "--checkpoint", exported[0], "--method", "low_rank", "--dtype", "bfloat16"
    )
    assert result.exit_code == 0, result.output
    assert read_dmtp(tmp_path / "drafter").method == "low_rank"
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == "bfloat16"


def test_bad_input_is_one_line(exported: tuple[Path, Path], tmp_path: Path) -> None:
    path, out = exported
    for arguments, message in [
        (("export", "--output", tmp_path, "--method", "context_fusion"), "reads MTP features"),
        (("export", "--output", tmp_path, "--method", "eagle"), "'eagle'"),
        (("export", "--output", tmp_path, "--dtype", "int8"), "dtype: is 'int8'"),
        (("export", "--output", path), str(path)),
        (("generate", "x", "--drafter", out / "drafter"), "target: is missing"),
        (("generate", "x", "--block-size", 8), "target: is missing"),
        (("generate", "x", "--target", out / "target", "--drafter", out / "drafter", "--block-size", 9), "drafter's 8"),
        (("generate", "x", "--target", out / "target", "--checkpoint", path), "not both"),
        (("generate", "x", "--target", out / "target"), "has no MTP module"),
        (("generate", "x", "--target", out / "drafter"), "architectures is ['DFlashDraftModel']"),
        (("generate", "x", "--target", tmp_path / "none"), "no such directory"),
        (("generate", "--ids", "1,x", "--target", out / "target"), "ids: is '1,x'"),
        (("generate", "x", "--ids", "1"), "--ids or a text"),
        (("generate", "--ids", "300", "--target", out / "target", "--method", "autoregressive"), "outside 0..259"),
    ]:
        assert message in refused(*arguments)
