"""The ablation, small: both starts of two seeds side by side, its page, its figures, and how it ends when it must."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dmtp_kernels.cli import app
from dmtp_kernels.cli_training import _command
from dmtp_kernels.models.checkpoint import load_checkpoint
from dmtp_kernels.training.ablation.measure import measure_all
from dmtp_kernels.training.ablation.page import write_page
from dmtp_kernels.training.ablation.plan import CLAIMS, STARTS, Claim
from dmtp_kernels.training.ablation.processes import run_beside
from dmtp_kernels.training.ablation.tables import Figures, claim_table, method_table, spread
from dmtp_kernels.training.ablation.train import train_all
from dmtp_kernels.training.budget import Budget
from dmtp_kernels.training.run import TrainingError, train

SMALL = Budget(3, 2, 2, rows=2, length=40, anchors=3, save_every=2, eval_rows=1, drafter_rows=1, scratch=True)
METHODS = ("dflash", "dmtp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ablation")
    train_all(out, budget=SMALL, methods=METHODS)
    return out


@pytest.fixture(scope="module")
def result(runs: Path) -> dict[str, Any]:
    return measure_all(runs, prompts=2, max_new_tokens=4, batches=(2,), repeats=1)


def test_both_starts_of_both_seeds(runs: Path) -> None:
    weights = {}
    for seed in (0, 1):
        for start, file in STARTS.items():
            models = load_checkpoint(runs / f"seed{seed}" / file)
            assert tuple(models.drafters) == METHODS and tuple(models.fusions) == ("dmtp",)
            weights[seed, start] = (
                models.drafters["dmtp"].fc.weight.sum().item(),
                models.target.embed_tokens.weight.sum().item(),
            )
    assert len({drafter for drafter, _ in weights.values()}) == 4
    # one target a seed, the same for both starts
    assert weights[0, "continued"][1] == weights[0, "scratch"][1] != weights[1, "scratch"][1]
    losses = json.loads((runs / "seed0" / "scratch.json").read_text())["losses"]
    assert set(losses["scratch"]) == set(METHODS)


def test_killed_in_the_last_stage_it_resumes_to_the_same_bits(runs: Path, tmp_path: Path) -> None:
    def log(line: str) -> None:
        if line.startswith("scratch 3/4"):
            raise KeyboardInterrupt

    options: dict[str, Any] = {"budget": SMALL, "methods": METHODS, "threads": 1, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, log=log, **options)
    assert not (tmp_path / STARTS["scratch"]).exists()
    train(tmp_path, log=lambda _: None, **options)
    for file in STARTS.values():
        assert (tmp_path / file).read_bytes() == (runs / "seed0" / file).read_bytes()


def test_another_number_of_threads_does_not_continue_a_run(runs: Path) -> None:
    with pytest.raises(TrainingError, match="belongs to another"):
        train(runs / "seed0", budget=SMALL, methods=METHODS, progress=False)


def test_a_seed_that_cannot_go_on_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "seed1").mkdir()
    (tmp_path / "seed1" / "state.pt").write_bytes(b"garbage")
    with pytest.raises(TrainingError, match=r"seed1.*cannot be read"):
        train_all(tmp_path, budget=Budget(10**6, 1, 1), methods=METHODS)


def end_beside_a_sleeper(path: Path, code: int) -> None:
    """With a code: end with it once the other has written its process id to `path`."""
    if not code:
        path.write_text(str(os.getpid()))
        time.sleep(600)
    while not path.exists() or not path.read_text():
        time.sleep(0.05)
    os._exit(code)


def test_a_process_that_dies_is_named_and_the_others_end(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(RuntimeError, match="7: its process ended with 3"):
        run_beside(end_beside_a_sleeper, {5: (path, 0), 7: (path, 3)})
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_every_figure_is_in_the_page(result: dict[str, Any], tmp_path: Path) -> None:
    page = write_page(result, tmp_path, "the command").read_text()
    assert "the command" in page and "24 of 24 comparisons" in page
    for name in ("methods", "positions", "throughput"):
        image = (tmp_path / f"ablation_{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG") and len(image) > 5000
        assert f"(ablation_{name}.png)" in page
    kept = json.loads((tmp_path / "ablation.json").read_text())
    assert kept["seeds"] == [0, 1] and len(kept["comparisons"]) == 8
    assert set(kept["throughput"]["tokens_per_second"]) == {"autoregressive", "mtp3", "mtp4", "dflash", "dmtp"}
    assert all(speed > 0 for by in kept["throughput"]["tokens_per_second"].values() for speed in by.values())
    for row in method_table(Figures(kept), "scratch")[1:]:
        assert f"| {' | '.join(row)} |" in page


def test_the_page_names_the_command_that_made_it(result: dict[str, Any]) -> None:
    small = _command(result, Path("a b"), Path("out"))
    assert small == (
        "dmtp train --all --out 'a b' --budget smoke && "
        "dmtp compare --all --runs 'a b' --out out --prompts 2 --max-new-tokens 4"
    )
    full = json.loads((Path(__file__).parents[2] / "profiling" / "ablation" / "ablation.json").read_text())
    assert _command(full, Path("r"), Path("o")) == "dmtp train --all --out r && dmtp compare --all --runs r --out o"


def planted(result: dict[str, Any], lengths: dict[tuple[str, int, float], float]) -> Figures:
    """The figures with other lengths, by method, seed and temperature, from both starts."""
    changed = copy.deepcopy(result)
    for comparison in changed["comparisons"]:
        for name, row in comparison["methods"].items():
            key = name, comparison["seed"], comparison["temperature"]
            row["per_verify_length"] = lengths.get(key, row.get("per_verify_length"))
    return Figures(changed)


def test_verdicts_need_every_seed_and_temperature(result: dict[str, Any]) -> None:
    claim = Claim("", "dmtp", "dflash", None)
    cells = [(seed, t) for seed in (0, 1) for t in (0.6, 1.0)]
    base = {("dflash", *cell): 2.0 for cell in cells}
    for lengths, verdict, alike in (
        ([2.1] * 4, "yes", "no"),
        ([1.9] * 4, "no", "no"),
        ([2.1, 2.1, 2.1, 1.99], "mixed", "no"),
        ([2.01, 1.99, 2.0, 2.01], "mixed", "yes"),
    ):
        figures = planted(result, base | {("dmtp", *cell): v for cell, v in zip(cells, lengths, strict=True)})
        assert figures.verdict(claim, "scratch") == verdict
        assert figures.verdict(Claim("", "dmtp", "dflash", None, equal=True), "scratch") == alike
    figures = planted(result, base | {("dmtp", *cell): v for cell, v in zip(cells, [2.2, 2.0, 2.4, 2.0], strict=True)})
    row = next(row for row in claim_table(figures) if row[0] == CLAIMS[0].text)
    assert row[1] == "`dmtp` over `dflash`"
    assert row[3] == "+15.0 ± 5.0" and row[4] == "+0.0 ± 0.0" and row[-1] == "mixed"


def test_spread_is_mean_and_half_the_range() -> None:
    assert spread([1.0, 2.0]) == "1.50 ± 0.50" and spread([1.5]) == "1.50" and spread([]) == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--all", "--seed", "3"], "seed: means nothing with --all"),
        (["compare", "--all", "--methods", "dmtp"], "methods: means nothing with --all"),
        (["compare", "--runs", "somewhere"], "runs: is for --all"),
        (["compare", "--all", "--runs", "nowhere"], "dmtp train --all` writes it"),
        (["train", "--all", "--budget", "huge"], "must be one of full, smoke"),
        (["compare", "--all", "--out", "/dev/null/page"], "out: is /dev/null/page"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 2 and message in ran.output
    assert "Traceback" not in ran.output
