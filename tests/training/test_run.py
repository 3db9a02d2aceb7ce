"""The recipe as a whole on a tiny budget: same bits after a kill, and faults that end in one clear line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels.models.checkpoint import load_checkpoint
from dmtp_kernels.training import run
from dmtp_kernels.training.budget import BUDGETS, Budget
from dmtp_kernels.training.data import standard_library
from dmtp_kernels.training.run import TrainingError, train
from dmtp_kernels.training.stages import DRAFTED, STAGES, enter, losses, new_trio

TINY = Budget(4, 3, 2, rows=2, length=40, anchors=3, save_every=2, eval_rows=1)


def quiet(_: str) -> None:
    pass


def stop_at(place: str) -> Callable[[str], None]:
    """A log that kills the run when it reports that step."""

    def log(line: str) -> None:
        if line.startswith(place):
            raise KeyboardInterrupt

    return log


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"), budget=TINY, progress=False, log=quiet)


def test_result_loads_with_every_method_and_its_record(finished: Path) -> None:
    checkpoint = load_checkpoint(finished)
    assert list(checkpoint.drafters) == list(DRAFTED)
    assert set(checkpoint.fusions) == {name for name, method in DRAFTED.items() if method.fusion != "none"}
    assert finished.stat().st_size <= 12_000_000
    record = checkpoint.record
    assert record is not None
    assert record["seed"] == 0 and len(record["data"]["sha256"]) == 64
    assert all(len(curve) <= 50 for stage in record["losses"].values() for curve in stage.values())
    assert set(record["losses"]["methods"]) == set(DRAFTED)
    assert set(record["held_out"]["agreement"]) == {"mtp", *DRAFTED}


def test_killed_run_resumes_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    # between two saves of the first stage, right at a save, and before the first save of the last one
    for place in ("target 3/4", "dflash 2/3", "methods 1/2"):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, budget=TINY, progress=False, log=stop_at(place))
    path = train(tmp_path, budget=TINY, progress=False, log=quiet)
    assert path.read_bytes() == finished.read_bytes()
    resumed, whole = (json.loads(p.with_suffix(".json").read_text()) for p in (path, finished))
    assert resumed["losses"] == whole["losses"] and resumed["held_out"] == whole["held_out"]


def test_another_seed_does_not_continue_a_run(finished: Path) -> None:
    with pytest.raises(TrainingError, match="another seed"):
        train(finished.parent, seed=1, budget=TINY, progress=False, log=quiet)


@pytest.mark.parametrize("state", [b"garbage", b"hello", b"", b"\x80\x02].", b"\xff" * 40], ids=repr)
def test_damaged_state_is_reported(state: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(state)
    with pytest.raises(TrainingError, match="cannot be read") as caught:
        train(tmp_path, budget=TINY, progress=False, log=quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 99},
        {"step": -1},
        {"step": 10**6},
        {"stage": "0"},
        {"weights": {}},
        {"weights": []},
        {"optimizer": {}},
        {"optimizer": None},
        *({name: None} for name in ("key", "stage", "step", "curves")),
    ],
    ids=str,
)
def test_a_state_with_parts_of_another_is_reported(change: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    saved = torch.load(finished.parent / "state.pt", weights_only=True)
    for name, value in change.items():
        if value is None:
            del saved[name]
        else:
            saved[name] = value
    torch.save(saved, tmp_path / "state.pt")
    with pytest.raises(TrainingError, match="cannot be read"):
        train(tmp_path, budget=TINY, progress=False, log=quiet)


def test_a_state_that_is_a_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state.pt").mkdir()
    with pytest.raises(TrainingError, match="cannot be read"):
        train(tmp_path, budget=TINY, progress=False, log=quiet)


def test_full_disk_keeps_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, budget=TINY, progress=False, log=stop_at("target 3/4"))
    before = (tmp_path / "state.pt").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="No space left on device") as caught:
        train(tmp_path, budget=TINY, progress=False, log=quiet)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "state.pt").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainingError, match="cannot write"):
        train(tmp_path / "file" / "run", budget=TINY, progress=False, log=quiet)


def test_diverging_loss_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "losses", lambda *args, **kwargs: iter([("target", torch.tensor(float("nan")))]))
    with pytest.raises(TrainingError, match="not finite at step 0"):
        train(tmp_path, budget=TINY, progress=False, log=quiet)


def test_threads_and_random_state_are_left_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, budget=TINY, progress=False, log=stop_at("target 1/4"))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(1), want)


def test_unknown_budget_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="full, smoke"):
        train(tmp_path, budget="huge", progress=False, log=quiet)


def test_schedules_warm_up_and_come_down() -> None:
    for stage, steps in zip(STAGES, BUDGETS["ablation"].steps, strict=True):
        scales = [stage.scale(step, steps) for step in range(steps)]
        assert max(scales) <= stage.peak and scales[0] < 0.1 * stage.peak
        assert scales[-1] <= (stage.floor + 0.01) * stage.peak + 0.01
        falling = scales[21:]
        assert falling == sorted(falling, reverse=True)


def test_drafters_train_without_touching_target_and_mtp() -> None:
    trio = new_trio()
    enter(trio, 0)
    enter(trio, 1)
    for _, loss in losses(trio, 1, 0, corpus=standard_library(), budget=TINY, seed=0):
        loss.backward()
    assert all(p.grad is None for module in (trio.target, trio.mtp) for p in module.parameters())
    assert any(p.grad is not None for p in trio.drafters["dflash"].parameters())
