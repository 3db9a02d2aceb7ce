"""What the plugin refuses, in one line, and what it leaves alone."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (make test-engines)")

import vllm
from vllm.engine.arg_utils import EngineArgs

from dmtp_kernels.engines.vllm import plugin, repairs, settings
from dmtp_kernels.engines.vllm.switches import Switches
from tests.engines.vllm.harness import export, log_lines

ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 64}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return export(tmp_path_factory.mktemp("models"), "dmtp")


def configure(places: tuple[Path, Path], **spec: Any) -> Any:
    given = {"method": "dmtp", "model": str(places[1])} | spec
    return EngineArgs(str(places[0]), speculative_config=given, **ENGINE).create_engine_config().speculative_config


def test_a_configuration_says_where_the_parts_are(places: tuple[Path, Path]) -> None:
    made = configure(places)
    assert (made.method, made.num_speculative_tokens) == ("dflash", 7)
    marked = getattr(made.draft_model_config.hf_config, settings.MARK)
    assert marked == {"drafter": str(places[1]), "mtp": str(places[1].parent / "mtp"), "method": "dmtp"}
    other = configure(places, mtp=str(places[0]))
    assert getattr(other.draft_model_config.hf_config, settings.MARK)["mtp"] == str(places[0])


def test_the_flags_of_the_command_line_do_the_same(places: tuple[Path, Path]) -> None:
    args = EngineArgs(str(places[0]), spec_method="dmtp", spec_model=str(places[1]), spec_tokens=7, **ENGINE)
    for _ in range(2):  # the arguments are as they were
        made = args.create_engine_config().speculative_config
        assert getattr(made.draft_model_config.hf_config, settings.MARK)["method"] == "dmtp"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_speculative_tokens": 5}, "dmtp: num_speculative_tokens is 5, must be 7 for this drafter"),
        ({"model": "nowhere"}, "dmtp: model is 'nowhere', must be the directory of a DMTP drafter"),
        ({"disable_padded_drafter_batch": True}, "dmtp: disable_padded_drafter_batch is true, must be false"),
    ],
)
def test_what_cannot_be_done_is_one_line(places: tuple[Path, Path], spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(places, **spec)


def test_a_drafter_of_another_method_is_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    fields = json.loads((places[1] / "config.json").read_text())
    fields["dmtp_config"]["method"] = "dflash"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="is for the method 'dflash', must be one that takes its first candidate"):
        configure(places, model=str(tmp_path))


def test_a_sharded_target_is_refused(places: tuple[Path, Path]) -> None:
    made = configure(places)
    parallel = made.target_parallel_config
    plugin.check(parallel, made)
    parallel.tensor_parallel_size = 2
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, must be 1"):
        plugin.check(parallel, made)


def test_another_release_of_vllm_is_named(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    installed = EngineArgs.create_speculative_config
    monkeypatch.setattr(EngineArgs, "create_speculative_config", installed.__wrapped__)
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    plugin.install()
    with pytest.raises(ValueError, match=r"vLLM is 0\.99\.1, the plugin supports 0\.32\.x"):
        configure(places)


def test_a_second_registration_changes_nothing() -> None:
    before = EngineArgs.create_speculative_config
    plugin.install()
    assert EngineArgs.create_speculative_config is before


@pytest.mark.parametrize(
    ("version", "known"), [("0.32.0", True), ("0.32", True), ("0.320.0", False), ("0.33.0", False), ("1.0.32", False)]
)
def test_releases_are_compared_by_their_parts(version: str, known: bool) -> None:
    assert settings.supported_version(version) is known


def test_ops_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DMTP_VLLM_OPS", raising=False)
    assert settings.chosen_ops(settings.OPS) == settings.OPS
    assert settings.chosen_ops(()) == ()
    monkeypatch.setenv("DMTP_VLLM_OPS", " commit_kv, lm_head_select,")
    assert settings.chosen_ops(()) == ("commit_kv", "lm_head_select")
    monkeypatch.setenv("DMTP_VLLM_OPS", "none")
    assert settings.chosen_ops(settings.OPS) == ()
    monkeypatch.setenv("DMTP_VLLM_OPS", "commit_kv,attention")
    with pytest.raises(ValueError, match="DMTP_VLLM_OPS: names attention, must list some of"):
        settings.chosen_ops(())


def test_a_refused_op_says_why_once_and_stays_off() -> None:
    switches = Switches(["commit_kv"])
    with log_lines() as lines:
        answers = [switches.takes("commit_kv", [], [], [], [], torch.zeros(1), torch.zeros(1, 1)) for _ in range(3)]
        switches.takes("lm_head_select", torch.zeros(1, 4))
    assert answers == [False] * 3
    assert len(lines) == 1 and lines[0].startswith("dmtp: commit_kv falls back to vLLM's own: ")


@pytest.mark.parametrize("values", [[0.5, 0.0, 1.25], [3, 0, 5]])
def test_expanded_settings_are_those_of_each_token(values: list[float]) -> None:
    x, counts = torch.tensor(values), torch.tensor([2, 3, 7], dtype=torch.int32)
    wanted = torch.repeat_interleave(torch.where(x == 0, 1, x).to(x.dtype), torch.tensor([2, 1, 4]))
    assert torch.equal(repairs.expand_batch_to_tokens(x, counts, 7, 0, 1), wanted)


def test_vllm_finds_the_plugin() -> None:
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "dmtp"]
    assert [entry.value for entry in found] == ["dmtp_kernels.engines.vllm:register"]
