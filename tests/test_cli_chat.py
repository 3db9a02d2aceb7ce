"""`dmtp generate --smollm2`: a chat prompt in, the answer's text out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmtp_kernels import cli_chat
from dmtp_kernels.models import smollm2 as package
from tests.smollm2_cases import smollm2
from tests.test_cli import dmtp, refused

SKY = ("generate", "--smollm2", "Explain in two sentences why the sky is blue.", "--max-new-tokens", 8)


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_chat, "load_smollm2", smollm2)


@pytest.mark.usefixtures("loaded_once")
def test_the_answer_alone_is_printed() -> None:
    result = dmtp(*SKY, "--method", "autoregressive")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sky is blue because of a process\n"
    outputs = json.loads(dmtp(*SKY, "--method", "autoregressive", "--json").stdout)["outputs"]
    assert [o["text"] for o in outputs] == [result.stdout.rstrip("\n")]
    assert len(outputs[0]["tokens"]) == 8


@pytest.mark.usefixtures("loaded_once")
def test_an_ended_answer_has_no_end_token() -> None:
    question = "Answer with one word: what is 1 + 1?"
    result = dmtp("generate", "--smollm2", question, "--method", "autoregressive", "--json", "--max-new-tokens", 12)
    output = json.loads(result.stdout)["outputs"][0]
    assert output["finish_reason"] == "stop" and output["tokens"][-1] == smollm2().end
    assert output["text"] and "<|" not in output["text"]


@pytest.mark.usefixtures("loaded_once")
def test_bad_input_is_one_line(tmp_path: Path) -> None:
    assert "smollm2: takes a text" in refused("generate", "--smollm2", "--ids", "1,2")
    assert "smollm2: takes a text" in refused(*SKY, "--target", tmp_path)
    assert "no such file" in refused(*SKY, "--checkpoint", tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    assert "not a readable safetensors file" in refused(*SKY, "--checkpoint", tmp_path / "cut.safetensors")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    assert "smollm2: gguf is not installed" in refused(*SKY)
