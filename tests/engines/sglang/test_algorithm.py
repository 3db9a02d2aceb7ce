"""The speculative algorithm `DMTP` in SGLang: registration, command line, what it answers, what it refuses."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmtp_kernels.engines import sglang as plugin
from dmtp_kernels.engines.sglang import algorithm, switches
from dmtp_kernels.models.checkpoint import load_checkpoint
from dmtp_kernels.models.formats import export_trio
from tests.engines import peers

MISSING = peers.missing("sglang", "tests/engines/sglang/requirements.txt")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

DIFFER = {"supports_mixed_chunk", "supports_prefill_shared_read_done"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = export_trio(tmp_path_factory.mktemp("models"), load_checkpoint(drafters=["dmtp"]), "dmtp")
    return made.target, made.drafter


def server(target: Path, drafter: Path, **fields: Any) -> Any:
    """As much of `ServerArgs` as `resolve` reads."""
    plain: dict[str, Any] = {
        "model_path": str(target),
        "speculative_draft_model_path": str(drafter),
        "speculative_num_draft_tokens": None,
        "speculative_draft_window_size": None,
        "max_running_requests": None,
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(**(plain | dict.fromkeys(("tp_size", "pp_size", "dp_size"), 1) | fields))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's enum of algorithms, `DMTP` in its registry."""
    monkeypatch.delenv(switches.VARIABLE, raising=False)
    for _ in range(2):  # once more changes nothing
        plugin.register()
    return importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm


def test_it_answers_as_dflash(registered: Any) -> None:
    found = registered.from_string("dmtp")
    assert found.name == "DMTP" and found.supports_overlap and registered.from_string("DMTP") is found
    for name in vars(registered):
        if name.startswith(("is_", "supports_", "need_", "has_", "carries_")) and name not in DIFFER:
            assert getattr(found, name)() == getattr(registered.DFLASH, name)(), name
    assert not any(getattr(found, name)() for name in DIFFER)
    assert found.get_num_tokens_per_req_for_target_verify(8, True) == 8


def test_the_scheduler_gets_its_future_map(registered: Any) -> None:
    pytest.importorskip("transformers")
    found = registered.from_string("DMTP")
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32), size=3)
    made = found.create_future_map(torch.device("cpu"), pool, needs_cpu_seq_lens=True)
    assert type(made).__name__ == "FutureMap" and made.spec_algo is found


def test_the_command_line(registered: Any, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through SGLang's parser and its resolution of speculative arguments."""
    pytest.importorskip("transformers")
    server_args = importlib.import_module("sglang.srt.server_args")
    hook = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    # it looks for Gemma 4 in the drafter's configuration by a transformers that wants torchvision
    monkeypatch.setattr(hook, "_resolve_speculative_algorithm_alias", lambda name, *_, **__: name)
    flags = {
        "model-path": places[0],
        "speculative-algorithm": "dmtp",
        "speculative-draft-model-path": places[1],
    }
    args = server_args.prepare_server_args([text for key, value in flags.items() for text in (f"--{key}", str(value))])
    hook.handle_speculative_decoding(args)
    found = overrides.resolving_view(args)
    assert (found.speculative_algorithm, found.speculative_num_draft_tokens) == ("DMTP", 8)
    assert (found.speculative_num_steps, found.speculative_eagle_topk, found.max_running_requests) == (1, 1, 48)
    assert found.speculative_draft_window_size == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 2}, "dmtp: tp_size is 2, must be 1"),
        ({"disaggregation_mode": "decode"}, "dmtp: disaggregation_mode must be null"),
        ({"speculative_num_draft_tokens": 16}, "dmtp: speculative_num_draft_tokens is 16, must be 8"),
        ({"speculative_draft_model_path": None}, "dmtp: model is None, must be the directory of a DMTP drafter"),
    ],
)
def test_what_cannot_be_done_is_one_line(fields: dict[str, Any], message: str, places: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm.resolve(server(*places, **fields))


def test_a_block_of_another_width_is_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    text = (places[1] / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"method": "dmtp"', '"method": "conditioned"'))
    with pytest.raises(ValueError, match="is for the method 'conditioned', must be one whose block starts with A and"):
        algorithm.resolve(server(places[0], tmp_path))


def test_another_release_gets_no_algorithm(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("sglang.srt.speculative.spec_registry")._REGISTRY
    monkeypatch.delitem(registry, "DMTP")
    monkeypatch.setattr(plugin, "version", lambda name: "0.5.24")
    plugin.register()
    with pytest.raises(ValueError, match="Unknown speculative algorithm name: dmtp"):
        registered.from_string("dmtp")
