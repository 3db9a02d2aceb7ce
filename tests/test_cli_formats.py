"""`dmtp export`, and `dmtp generate`, `compare` and `profile` on directories in public formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import save_checkpoint
from dmtp_kernels.models.formats import read_dmtp, save_qwen3
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


def places(out: Path) -> tuple[object, ...]:
    return "--target", out / "target", "--drafter", out / "drafter", "--mtp", out / "mtp"


def test_the_export_compares_as_the_file_does(exported: tuple[Path, Path]) -> None:
    path, out = exported
    options = ("compare", "--prompts", 2, "--max-new-tokens", 8, "--json", "--check")
    file = dmtp(*options, "--checkpoint", path, "--methods", "autoregressive,dmtp")
    parts = dmtp(*options, *places(out), "--methods", "autoregressive,dmtp")
    assert parts.exit_code == 0, parts.output
    first, second = (_untimed(json.loads(result.stdout)) for result in (file, parts))
    assert first == second and second["methods"]["dmtp"]["identical"]


def _untimed(result: dict[str, Any]) -> dict[str, Any]:
    for row in result["methods"].values():
        assert row.pop("tokens_per_second") > 0
    return result


def test_compare_runs_what_the_directories_hold_on_ids(exported: tuple[Path, Path], tmp_path: Path) -> None:
    out = exported[1]
    (tmp_path / "ids").write_text("1,2,3\n\n 7 , 8\n5\n")
    options = ("--ids-file", tmp_path / "ids", "--max-new-tokens", 6, "--no-agreement", "--json", "--batch", 2)
    found = json.loads(dmtp("compare", *places(out), *options).stdout)
    assert found["prompts"] == 3
    chains = {name for name, method in METHODS.items() if method.uses_mtp and method.drafter is None}
    assert set(found["methods"]) == {"autoregressive", "dmtp"} | chains
    assert all(row["tokens"] == 18 for row in found["methods"].values())
    alone = dmtp("compare", "--target", out / "target", "--ids", "1,2,3", *options[2:])
    assert list(json.loads(alone.stdout)["methods"]) == ["autoregressive"]


def test_profile_of_directories(exported: tuple[Path, Path], tmp_path: Path) -> None:
    out = exported[1]
    (tmp_path / "ids").write_text("1,2,3\n7\n")
    options = ("profile", *places(out), "--batch", 2, "--rounds", 2, "--warmup", 1, "--device", "cpu", "--json")
    for prompts in ((), ("--ids-file", tmp_path / "ids"), ("--ids", "4,5")):
        result = dmtp(*options, *prompts)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["method"], found["rounds"], found["batch"]) == ("dmtp", 2, 2) and "against" not in found


def test_another_dtype_and_method(exported: tuple[Path, Path], tmp_path: Path) -> None:
    result = dmtp(
        "export", "--output", tmp_path, "--checkpoint", exported[0], "--method", "low_rank", "--dtype", "bfloat16"
    )
    assert result.exit_code == 0, result.output
    assert read_dmtp(tmp_path / "drafter").method == "low_rank"
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["dtype"] == "bfloat16"


def test_bad_input_is_one_line(exported: tuple[Path, Path], tmp_path: Path) -> None:
    path, out = exported
    lines, blank, words = tmp_path / "lines", tmp_path / "blank", tmp_path / "words"
    lines.write_text("1,2\n\n1;2\n")
    blank.write_text(" \n\n")
    save_qwen3(words / "target", tiny_checkpoint(0).target)
    for arguments, message in [
        (("export", "--output", tmp_path, "--method", "context_fusion"), "reads MTP features"),
        (("export", "--output", tmp_path, "--method", "eagle"), "'eagle'"),
        (("export", "--output", tmp_path, "--dtype", "int8"), "dtype: is 'int8'"),
        (("export", "--output", path), str(path)),
        (("generate", "--ids", "1_0", "--target", out / "target"), "ids: is '1_0'"),
        (("generate", "x", "--drafter", out / "drafter"), "target: is missing"),
        (("generate", "x", "--block-size", 8), "target: is missing"),
        (("generate", "x", "--target", out / "target", "--drafter", out / "drafter", "--block-size", 9), "drafter's 8"),
        (("generate", "x", "--target", out / "target", "--checkpoint", path), "not both"),
        (("generate", "x", "--target", out / "target"), "has no MTP module"),
        (("generate", "x", "--target", out / "drafter"), "architectures is ['DFlashDraftModel']"),
        (("generate", "x", "--target", tmp_path / "none"), "no such directory"),
        (("generate", "--ids", "1,x", "--target", out / "target"), "ids: is '1,x'"),
        (("generate", "x", "--ids", "1"), "--ids or a text"),
        (("compare", *places(out), "--checkpoint", path), "not both"),
        (("compare", "--mtp", out / "mtp"), "target: is missing"),
        (("compare", *places(out), "--methods", "dflash"), "has no drafter 'dflash', has dmtp"),
        (("compare", *places(out), "--record"), "record: is of a --checkpoint"),
        (("compare", *places(out), "--block-size", 9), "drafter's 8"),
        (("compare", *places(out), "--ids", "1", "--ids-file", tmp_path / "x"), "ids: give --ids or --ids-file"),
        (("compare", *places(out), "--ids", "1,,2"), "ids: is '1,,2'"),
        (("compare", *places(out), "--ids", "1,260"), "ids: prompt 1 has a token id outside 0..259"),
        (("compare", *places(out), "--ids", "1", "--prompts", 2), "prompts: counts held-out prompts"),
        (("compare", *places(out), "--ids", "1", "--max-new-tokens", 5000), "must be between 2 and 504"),
        (("compare", *places(out), "--ids-file", tmp_path / "none"), f"ids-file: cannot read {tmp_path / 'none'}"),
        (("compare", *places(out), "--ids-file", tmp_path), f"ids-file: cannot read {tmp_path}"),
        (("compare", *places(out), "--ids-file", lines), f"ids-file: line 3 of {lines} is '1;2'"),
        (("compare", *places(out), "--ids-file", blank), f"ids-file: {blank} has no prompt"),
        (("compare", "--all", "--target", out / "target"), "target: means nothing with --all"),
        (("profile", *places(out), "--checkpoint", path), "not both"),
        (("profile", "--drafter", out / "drafter"), "target: is missing"),
        (("profile", *places(out), "--against", "dflash"), "has no drafter 'dflash', has dmtp"),
        (("profile", *places(out), "--ids", "1,-1"), "ids: prompt 1 has a token id outside 0..259"),
        (("profile", *places(out), "--ids", ",".join(["1"] * 127)), "ids: prompt 1 has 127 tokens, must have at most"),
        (("profile", *places(out), "--ids-file", lines), "ids-file: line 3"),
        (("compare", "--target", words / "target"), "ids: is missing, must be given, or --ids-file, for a model of 20"),
        (("profile", "--target", words / "target", "--method", "autoregressive"), "ids: is missing"),
        (("generate", "--ids", "300", "--target", out / "target", "--method", "autoregressive"), "outside 0..259"),
    ]:
        assert message in refused(*arguments)
