"""The command line: what it prints, and one clear line with exit code 2 for every bad input."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dmtp_kernels.cli import app
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models.checkpoint import save_checkpoint
from dmtp_kernels.testing.models import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random trio that reads bytes: these tests are about the commands, not about the trained weights."""
    path = tmp_path_factory.mktemp("cli") / "trio.safetensors"
    save_checkpoint(path, tiny_checkpoint(0, vocab_size=260, num_valid=258, mask_token_id=258))
    return str(path)


def dmtp(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: Any) -> str:
    """The command's only line on stderr; its exit code must be 2 and stdout empty."""
    result = dmtp(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("dmtp: error: ")
    return lines[0]


def test_generate_prints_prompt_and_text_and_checks_it(checkpoint: str) -> None:
    result = dmtp("generate", "def main", "--checkpoint", checkpoint, "--max-new-tokens", 12, "--check")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("def main")
    assert "identical to autoregressive decoding: 1 of 1" in result.stderr


def test_generate_json_of_a_batch(checkpoint: str) -> None:
    options = ("--checkpoint", checkpoint, "--batch", 3, "--temperature", 0.8, "--seed", 5, "--max-new-tokens", 9)
    result = dmtp("generate", "x = [", *options, "--method", "mtp3", "--check", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["method"] == "mtp3"
    assert [len(o["tokens"]) for o in found["outputs"]] == [9, 9, 9]
    assert found["check"]["identical"] is True
    # continuation i draws with seed + i, whatever the batch
    alone = dmtp("generate", "x = [", *options[:2], "--temperature", 0.8, "--seed", 6, "--max-new-tokens", 9, "--json")
    assert json.loads(alone.stdout)["outputs"][0]["tokens"] == found["outputs"][1]["tokens"]


def test_generate_reads_a_file_and_held_out_prompts(checkpoint: str, tmp_path: Path) -> None:
    source = tmp_path / "prompt.py"
    source.write_text("import os\n")
    result = dmtp("generate", "--file", source, "--checkpoint", checkpoint, "--max-new-tokens", 2)
    assert result.stdout.startswith("import os\n")
    assert dmtp("generate", "--heldout", 3, "--checkpoint", checkpoint, "--max-new-tokens", 2).exit_code == 0


def test_compare_json_has_the_documented_keys(checkpoint: str, tmp_path: Path) -> None:
    plot = tmp_path / "acceptance.png"
    options = ("--prompts", 3, "--max-new-tokens", 10, "--checkpoint", checkpoint, "--temperature", 1.0)
    result = dmtp("compare", *options, "--methods", "autoregressive,dflash,dmtp", "--check", "--json", "--plot", plot)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["temperature"] == 1.0
    assert set(found["methods"]) == {"autoregressive", "dflash", "dmtp"}
    for name in ("dflash", "dmtp"):
        row = found["methods"][name]
        assert row["identical"] is True
        assert row["prompts"] == 3
        histogram = row["histogram"]
        assert row["t1_acceptance"] == pytest.approx(1 - histogram[0] / sum(histogram))
        mean = 1 + sum(k * n for k, n in enumerate(histogram)) / sum(histogram)
        assert row["per_verify_length"] == pytest.approx(mean)
        assert row["per_request_length"] >= 1
        assert len(row["cumulative"]) == len(row["conditional"]) == len(row["teacher_forced"]) == 7
        low, high = row["t1_acceptance_interval"]
        assert low <= row["t1_acceptance"] <= high
    assert found["methods"]["autoregressive"]["target_forwards_per_token"] == 1
    assert plot.stat().st_size > 10_000


def test_compare_record_replaces_the_same_temperature(tmp_path: Path) -> None:
    path = tmp_path / "trio.safetensors"
    trio = tiny_checkpoint(0, vocab_size=260, num_valid=258, mask_token_id=258)
    trio.record = {"seed": 0}
    save_checkpoint(path, trio)
    options = (
        "--prompts",
        2,
        "--max-new-tokens",
        5,
        "--methods",
        "dmtp",
        "--checkpoint",
        path,
        "--no-agreement",
        "--json",
    )
    for temperature in (1.0, 0.6, 1.0):
        assert dmtp("compare", *options, "--temperature", temperature, "--record").exit_code == 0
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["seed"] == 0
    assert [r["temperature"] for r in record["compare"]] == [0.6, 1.0]
    assert record["compare"][1]["prompts"] == 2
    path.with_suffix(".json").unlink()
    assert "does not exist" in dmtp("compare", *options, "--record").stderr


def test_compare_prints_a_table_by_default(checkpoint: str) -> None:
    result = dmtp(
        "compare", "--prompts", 2, "--max-new-tokens", 6, "--methods", "dflash,dmtp", "--checkpoint", checkpoint
    )
    assert result.exit_code == 0, result.output
    assert "temperature 0.6" in result.stdout
    assert "dmtp" in result.stdout


def test_compare_reports_a_mismatch_and_fails(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmtp_kernels.decode import round as rounds

    original = rounds.accept_prefix

    def lenient(candidates: Any, target: Any, **kwargs: Any) -> Any:
        if candidates.shape[1] == 8 and int(kwargs["num_candidates"].max()) == 7:
            target = target.clone()
            target[:, 0] = candidates[:, 1]
        return original(candidates, target, **kwargs)

    monkeypatch.setattr(rounds, "accept_prefix", lenient)
    result = dmtp(
        "compare",
        "--prompts",
        2,
        "--max-new-tokens",
        8,
        "--methods",
        "dmtp",
        "--checkpoint",
        checkpoint,
        "--check",
        "--json",
    )
    assert result.exit_code == 1, result.output
    row = json.loads(result.stdout)["methods"]["dmtp"]
    assert row["identical"] is False
    assert len(row["mismatches"]) > 0


def test_doctor_names_every_op() -> None:
    result = dmtp("doctor", "--json")
    assert result.exit_code == 0
    assert {"accept_prefix", "block_attention", "commit_kv", "fused_t1_prep"} <= set(json.loads(result.stdout)["ops"])
    assert "fused_t1_prep" in dmtp("doctor").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "give one of PROMPT, --file, --heldout (got none)"),
        (("generate", "a", "--heldout", 0), "got PROMPT, --heldout"),
        (("generate", ""), "prompt: is empty"),
        (("generate", "a", "--batch", 0), "batch: is 0, must be between 1 and 4096"),
        (("generate", "a", "--method", "fastest"), "no method 'fastest', must be one of autoregressive"),
        (("generate", "a", "--max-new-tokens", 0), "max_new_tokens: is 0"),
        (("generate", "a", "--temperature", -1), "temperature: is -1.0"),
        (("generate", "a", "--temperature", "nan"), "temperature: is nan"),
        (("generate", "a", "--heldout", 99), "got PROMPT, --heldout"),
        (("generate", "--heldout", 9999), "heldout: is 9999"),
        (("generate", "--file", "/no/such/file"), "No such file"),
        (("generate", "a" * 700, "--max-new-tokens", 4), "the cache holds 504 per request"),
        (("compare", "--methods", "dmtp,none"), "no method 'none'"),
        (("compare", "--methods", ","), "methods: names none"),
        (("compare", "--prompts", 100_000), "prompts: is 100000"),
        (("compare", "--batch", 0, "--prompts", 1), "batch: is 0"),
        (("compare", "--plot", "/no/such/folder/a.png"), "plot: is /no/such/folder/a.png"),
        (("compare", "--plot", "figure.txt"), "must end in .png"),
        (("compare", "--plot", "x" * 300 + ".png"), "its name must have at most 255 bytes"),
        (("train", "--methods", ","), "methods: names none"),
        (("compare", "--record"), "does not exist"),
        (("generate", "a", "--temperature", 1e39), "temperature: is 1e"),
        (("generate", "a", "--top-k", 2**63), "top_k: is 9223372036854775808"),
        (("generate", "a", "--batch", 10**8), "batch: is 100000000, must be between 1 and 4096"),
        (("train", "--seed", 10**20, "--out", "/tmp"), "seed is 100000000000000000000"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[Any, ...], message: str, checkpoint: str) -> None:
    trio = () if arguments[0] == "train" else ("--checkpoint", checkpoint)
    assert message in refused(*arguments, *trio)


def test_bad_checkpoints_are_one_line_and_exit_code_2(checkpoint: str, tmp_path: Path) -> None:
    whole = Path(checkpoint).read_bytes()
    for name, content in {"short": whole[: len(whole) // 2], "text": b"not a checkpoint", "empty": b""}.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        assert str(path) in refused("generate", "a", "--checkpoint", path)
    assert "no such file" in refused("generate", "a", "--checkpoint", tmp_path / "none.safetensors")


def test_training_on_a_full_disk_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the full disk: the write fails half way in both."""
    command = [sys.executable, "-m", "dmtp_kernels.cli", "train", "--out", str(tmp_path / "run"), "--budget", "smoke"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=environment, timeout=300)
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("dmtp: error: ")]
    assert len(errors) == 1
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_help_lists_every_method() -> None:
    # typer wraps its help: compare without line breaks
    text = "".join(dmtp("generate", "--help").stdout.split())
    assert all(name in text for name in METHODS)


def test_text_outside_the_terminal_s_encoding_is_no_error(checkpoint: str) -> None:
    command = [sys.executable, "-m", "dmtp_kernels.cli", "generate", "\u00e9", "--max-new-tokens", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([*command, "--checkpoint", checkpoint], capture_output=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"?")
