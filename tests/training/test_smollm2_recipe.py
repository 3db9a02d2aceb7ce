"""The recipe for SmolLM2 on a few answers: what its losses compare, same bits after a kill, faults in one line."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.models import smollm2 as package
from dmtp_kernels.models.checkpoint import CheckpointError, load_checkpoint, quantize_rows
from dmtp_kernels.models.smollm2 import PROMPTS, SmolLM2
from dmtp_kernels.training.data import Corpus, standard_library
from dmtp_kernels.training.runner import TrainingError
from dmtp_kernels.training.smollm2 import __main__ as command
from dmtp_kernels.training.smollm2 import losses, recipe
from dmtp_kernels.training.smollm2.data import Batch, Collection, DataError
from dmtp_kernels.training.smollm2.prompts import FIELDS, make_prompts
from dmtp_kernels.training.smollm2.recipe import BUDGETS, train
from tests.smollm2_cases import smollm2

BUDGET = BUDGETS["smoke"]


@cache
def coarse() -> SmolLM2:
    """In bf16, as the recipe runs it."""
    model = smollm2()
    return replace(model, model=copy.deepcopy(model.model).bfloat16())


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "load_smollm2", coarse)


def quiet(_: str) -> None:
    pass


def stop_at(place: str) -> Callable[[str], None]:
    def log(line: str) -> None:
        if line.startswith(place):
            raise KeyboardInterrupt

    return log


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "load_smollm2", coarse)
        yield train(tmp_path_factory.mktemp("whole"), budget=BUDGET, log=quiet)


@pytest.fixture(scope="module")
def data(finished: Path) -> Collection:
    return Collection(sorted(finished.parent.glob("rollouts-*")))


@pytest.fixture
def greedy(data: Collection) -> Batch:
    """The greedy answers: every token is the target's likeliest."""
    batch = data.batch(16, 5)
    rows = torch.tensor([torch.equal(t[a:n], s[a - 1 : n - 1, 0]) for t, s, a, n in _texts(batch)])
    assert rows.any()
    fields = {name: getattr(batch, name)[rows] for name in batch.__dataclass_fields__}
    return Batch(**fields)


def learned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The likeliest tokens `[M, SOFT]` that each loss is asked for."""
    seen: list[torch.Tensor] = []

    def record(target: object, hidden: torch.Tensor, soft_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(soft_ids)
        return torch.zeros(len(hidden))

    monkeypatch.setattr(losses, "soft_loss", record)
    return seen


def _texts(batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    return zip(batch.ids, batch.soft_ids, batch.answer.tolist(), batch.length.tolist(), strict=True)


def test_result_loads_beside_its_target(finished: Path) -> None:
    checkpoint = load_checkpoint(finished, target=smollm2().model)
    assert checkpoint.target is smollm2().model
    assert list(checkpoint.drafters) == ["dflash", "dmtp"] and list(checkpoint.fusions) == ["dmtp"]
    assert finished.stat().st_size < 25_000_000
    record = checkpoint.record
    assert record is not None and set(record["losses"]["methods"]) == {"dflash", "dmtp"}
    with pytest.raises(CheckpointError, match=r"holds drafts alone, their target must be given"):
        load_checkpoint(finished)
    with pytest.raises(CheckpointError, match="for another target"):
        load_checkpoint(finished, target=load_checkpoint(drafters=[]).target)


def test_features_are_divided_in_training_and_by_the_weights_after(finished: Path, data: Collection) -> None:
    state = torch.load(finished.parent / "state.pt", weights_only=True)["weights"]["drafters.dmtp"]
    batch = data.batch(2, 3)
    raw = torch.cat([batch.features.float() * data.scale], dim=-1)[:, 1:20]
    fc = load_checkpoint(finished, target=smollm2().model).drafters["dmtp"].fc
    wanted = batch.features[:, 1:20].float() @ state["fc.weight"].float().T
    assert (fc(raw) - wanted).norm() < 0.01 * wanted.norm()
    assert quantize_rows(fc.weight)[0].shape == fc.weight.shape


def test_killed_run_resumes_to_the_same_bits(finished: Path, tmp_path: Path) -> None:
    for texts in finished.parent.glob("rollouts-*"):
        shutil.copy(texts, tmp_path)
    for place in ("mtp 2/2", "methods 1/2"):
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, budget=BUDGET, log=stop_at(place))
    path = train(tmp_path, budget=BUDGET, log=quiet)
    assert path.read_bytes() == finished.read_bytes()
    resumed, whole = (json.loads(p.with_suffix(".json").read_text()) for p in (path, finished))
    assert resumed["losses"] == whole["losses"]


def test_rollouts_are_a_function_of_the_seed(finished: Path, tmp_path: Path) -> None:
    first = finished.parent / "rollouts-000.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, budget=BUDGET, log=stop_at("rollouts 1/1"))
    again, was = (Collection([p]).files[0] for p in (tmp_path / first.name, first))
    assert all(torch.equal(getattr(again, name), getattr(was, name)) for name in was.__dataclass_fields__)


def test_another_run_s_files_are_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="another seed"):
        train(finished.parent, seed=1, budget=BUDGET, log=quiet)
    with pytest.raises(TrainingError, match="another seed"):
        train(finished.parent, budget=replace(BUDGET, mtp_steps=3), log=quiet)
    for name, kind in (("rollouts-000.safetensors", DataError), ("state.pt", TrainingError)):
        place = tmp_path / name
        shutil.copytree(finished.parent, place)
        whole = (place / name).read_bytes()
        (place / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(kind, match="cannot be read") as caught:
            train(place, budget=BUDGET, log=quiet)
        assert "\n" not in str(caught.value)


def test_a_missing_package_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "load_smollm2", package.load_smollm2)
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)
    app = command.typer.Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert result.exit_code == 2 and "gguf is not installed" in result.output


def test_mtp_learns_the_token_after_the_one_it_reads(greedy: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = learned(monkeypatch)
    mtp = recipe.MTP(recipe.MTPConfig(coarse().model.config.layer)).bfloat16()
    losses.mtp_loss(coarse().model, mtp, greedy, None)  # type: ignore[arg-type]
    rows = losses.answer_rows(greedy)
    assert torch.equal(seen[0][:, 0], greedy.ids.roll(-2, dims=1)[rows])
    assert rows.sum() == (greedy.length - greedy.answer).sum()


@pytest.mark.parametrize("name", ["dflash", "dmtp"])
def test_a_slot_learns_the_token_at_its_place(name: str, greedy: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = learned(monkeypatch)
    target = coarse().model
    drafter = recipe.Drafter(recipe.drafter_config(target.config)).bfloat16()
    anchors = losses.draw_anchors(greedy, 4, torch.Generator().manual_seed(0))
    assert (anchors >= greedy.answer[:, None]).all() and (anchors + 7 < greedy.length[:, None]).all()
    frozen = losses.frozen(target, None, greedy)
    losses.block_loss(METHODS[name], drafter, None, target, greedy, frozen, anchors, None)  # type: ignore[arg-type]
    first = 1 if name == "dflash" else 2
    rows = torch.arange(len(anchors))[:, None, None]
    assert torch.equal(seen[0][:, 0], greedy.ids[rows, anchors[..., None] + torch.arange(first, 8)].flatten())


def test_loss_over_all_tokens_is_the_cross_entropy() -> None:
    target = smollm2().model
    vocabulary = target.config.vocab_size
    hidden = 0.3 * torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    soft_ids, soft_logits = (
        torch.tensor([[5, 9], [40000, 7], [1, 2]]),
        torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]]),
    )
    everything = losses.step_shortlist(torch.arange(vocabulary), soft_ids, vocabulary, 0, torch.Generator())
    got = losses.soft_loss(target, hidden, soft_ids, soft_logits, everything)
    logs = target.logits(hidden).log_softmax(-1).gather(1, soft_ids)
    torch.testing.assert_close(got, -(soft_logits.softmax(-1) * logs).sum(-1), rtol=1e-4, atol=1e-4)
    # with half of the others, chosen at random and weighted, nearly the same
    listed = losses.step_shortlist(torch.arange(100), soft_ids, vocabulary, vocabulary // 2, torch.Generator())
    assert len(listed.ids) < 0.52 * vocabulary
    torch.testing.assert_close(losses.soft_loss(target, hidden, soft_ids, soft_logits, listed), got, rtol=0, atol=0.05)
    # a token that is not listed is left out of the wanted distribution
    alone = losses.step_shortlist(torch.arange(100), soft_ids[:, 1:], vocabulary, 0, torch.Generator())
    wanted = torch.stack([(hidden[1] @ target.lm_head.weight[alone.ids].T)]).logsumexp(-1)
    wanted = wanted - hidden[1] @ target.lm_head.weight[7]
    torch.testing.assert_close(losses.soft_loss(target, hidden, soft_ids, soft_logits, alone)[1:2], wanted)


def test_prompts_leave_the_measured_ones_out() -> None:
    files = standard_library().files
    corpus = Corpus({name: files[name] for name in list(files)[:40]})
    prompts = make_prompts(corpus, 400, 0)
    assert len(set(prompts)) == 400 and not set(prompts) & set(PROMPTS)
    assert prompts[:50] == make_prompts(corpus, 50, 0) != make_prompts(corpus, 50, 1)
    assert not [p for p in prompts for name in (*FIELDS, "problem", "Why") if f"{{{name}}}" in p]
