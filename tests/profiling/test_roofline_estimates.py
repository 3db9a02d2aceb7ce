"""The estimates: monotone, labelled, complete, and right by hand where a hand can follow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from profiling.roofline import __main__ as command
from profiling.roofline import estimate, models, work
from profiling.roofline.estimate import against_source, predict, rounds
from profiling.roofline.hardware import GPUS, H200, REACH, Gpu
from profiling.roofline.models import QWEN_27B, QWEN_35B, Model
from profiling.roofline.work import Part, Setting, distinct_experts, stages

MODELS = pytest.mark.parametrize("model", [QWEN_35B, QWEN_27B], ids=lambda m: m.name)
METHODS = ("dflash", "single_anchor", "dmtp")


def settings(model: Model, **options: int | bool) -> list[Setting]:
    return [
        Setting(model, 8, method=method, route=route, **{"tp": 4, **options})  # type: ignore[arg-type]
        for method in METHODS
        for route in ("engine", "ops")
    ]


@MODELS
@pytest.mark.parametrize("tp", [1, 4])
def test_no_stage_gets_faster_with_more_requests(model: Model, tp: int) -> None:
    for setting in settings(model, tp=tp):
        found = [predict(dataclasses.replace(setting, batch=b), H200) for b in (1, 2, 3, 8, 16, 32)]
        for less, more in pairwise(found):
            assert all(less[stage] <= more[stage] for stage in less)
            assert less["round"] < more["round"]


def _wider(gpu: Gpu) -> Gpu:
    return dataclasses.replace(gpu, bandwidth=2 * gpu.bandwidth)


def _faster(gpu: Gpu) -> Gpu:
    return dataclasses.replace(gpu, bf16=2 * gpu.bf16, fp8=2 * gpu.fp8)


@MODELS
@pytest.mark.parametrize("better", [_wider, _faster])
def test_no_stage_gets_slower_on_a_better_gpu(model: Model, better: Callable[[Gpu], Gpu]) -> None:
    for setting in settings(model):
        large = dataclasses.replace(setting, batch=256)
        for s in (setting, large):
            before, after = predict(s, H200), predict(s, better(H200))
            assert all(after[stage] <= before[stage] for stage in before)
        assert predict(large, better(H200))["round"] < predict(large, H200)["round"]


@MODELS
def test_four_ranks_beat_one_where_nothing_is_exchanged(model: Model) -> None:
    for setting in settings(model, exchange=False):
        one, four = predict(dataclasses.replace(setting, tp=1), H200), predict(setting, H200)
        assert all(four[stage] <= one[stage] for stage in one) and four["round"] < one["round"]
        # four ranks move at least a quarter each
        assert all(four[stage] >= one[stage] / 4 for stage in one)
        exchanged = predict(dataclasses.replace(setting, exchange=True), H200)
        assert exchanged["round"] > four["round"]


@MODELS
def test_longer_contexts_and_wider_weights_cost_more(model: Model) -> None:
    for setting in settings(model):
        base = predict(setting, H200)["round"]
        assert predict(dataclasses.replace(setting, context=65_536), H200)["round"] > base
        assert predict(dataclasses.replace(setting, weight_bytes=1), H200)["round"] < base


def test_a_part_by_hand() -> None:
    gpu = Gpu(
        "g", bandwidth=1e12 / REACH.bandwidth, bf16=1e14 / REACH.flops, fp8=2e14 / REACH.flops, link=1e11 / REACH.link
    )
    assert Part(nbytes=1e9).seconds(gpu) == pytest.approx(1e-3)
    assert Part(nbytes=1e9, flops=4e11).seconds(gpu) == pytest.approx(4e-3)
    assert Part(flops=4e11, eight_bit=True).seconds(gpu) == pytest.approx(2e-3)
    assert Part(launches=10).seconds(gpu) == pytest.approx(13e-6)
    assert Part(reduces=(120e3, 240e3)).seconds(gpu) == pytest.approx(6e-6 + 1e-6 + 6e-6 + 2e-6)
    assert Part(gathers=(1e6,)).seconds(gpu) == pytest.approx(21e-6 + 10e-6)
    assert Part(1e6, 1, 1, (1e6,), (1e6,)).times(3).seconds(gpu) == pytest.approx(
        3 * Part(1e6, 1, 1, (1e6,), (1e6,)).seconds(gpu)
    )


def test_t1_of_the_35b_model_by_hand() -> None:
    head, fusion = stages(Setting(QWEN_35B, 8, 4))["t1"]
    assert head.nbytes == 248_320 * 2048 * 2 / 4 and fusion.nbytes == 2048 * 4096 * 2
    assert head.gathers == (8 * 248_320 * 2 * 3 / 4,) and fusion.reduces == (8 * 8 * 2048 * 2,)
    assert head.launches + fusion.launches == 14
    ops, _ = stages(Setting(QWEN_35B, 8, 4, route="ops"))["t1"]
    assert ops.nbytes == 248_320 * (2048 + 8) / 4 and ops.gathers == (8 * 16 * 3,)


def test_weights_read_are_those_of_the_models() -> None:
    # one token of one request reads every dense weight once
    dense = sum(p.nbytes for p in work.verify(Setting(QWEN_27B, 1, context=0))) / 2
    assert 26e9 < dense < 28e9
    routed = QWEN_35B.feed_forward
    total = dense_of(QWEN_35B) + 40 * 256 * 3 * 2048 * routed.width
    assert 33e9 < total < 36e9
    active = dense_of(QWEN_35B) + 40 * 8 * 3 * 2048 * routed.width
    assert 2.5e9 < active < 3.5e9


def dense_of(model: Model) -> float:
    bare = dataclasses.replace(model, feed_forward=dataclasses.replace(model.feed_forward, experts=0, width=0))
    shared = (model.delta_layers + model.attention_layers) * 3 * model.hidden * model.feed_forward.shared
    return sum(p.nbytes for p in work.verify(Setting(bare, 1, context=0))) / 2 + shared


def test_experts_that_tokens_read() -> None:
    shape = QWEN_35B.feed_forward
    assert distinct_experts(shape, 0) == 0
    assert distinct_experts(shape, 1) == pytest.approx(8)
    # two tokens: eight, and those of eight more that are not among the first
    assert distinct_experts(shape, 2) == pytest.approx(8 + 8 * (1 - 8 / 256))
    assert 255 < distinct_experts(shape, 256) < 256


def test_the_rounds_cover_what_was_asked() -> None:
    found = rounds()
    assert len(found) == 2 * 2 * 3 * 6
    assert {(e["model"], e["tp"], e["gpu"], e["batch"]) for e in found} == {
        (m, tp, g.name, b) for m in ("35B", "27B") for tp in (1, 4) for g in GPUS for b in (1, 2, 4, 8, 16, 32)
    }
    assert all(e["label"] == "estimate" for e in found)
    for entry in found:
        for key in ("ms", "ops_ms"):
            *parts, whole = entry[key].values()
            assert set(entry[key]) == {*estimate.STAGES, "round"} and sum(parts) == pytest.approx(whole)
        # both have the same target; the ops take nothing off it
        assert entry["ms"]["verify"] == entry["ops_ms"]["verify"] and entry["dflash_round_ms"] < entry["ms"]["round"]
        assert entry["ops_ms"]["t1"] < entry["ms"]["t1"] and entry["ops_ms"]["commit"] < entry["ms"]["commit"]
        assert entry["ops_ms"]["mtp"] == entry["ms"]["mtp"]


def test_the_source_is_quoted_as_it_is_printed() -> None:
    found = {(e["workload"], e["method"], e["stage"]): e for e in against_source()}
    assert (
        found["Code", "dflash", "draft"]["source_ms"] == 0.386 and found["SWE", "dflash", "draft"]["source_ms"] == 0.442
    )
    assert found["Code", "single_anchor", "mtp"]["source_ms"] == 0.214
    assert found["Code", "single_anchor", "t1"]["source_ms"] == 0.290
    assert found["Code", "dflash", "round"]["source_ms"] == 8.915
    assert found["SWE", "single_anchor", "round"]["source_ms"] == 10.195
    assert found["Code", "single_anchor", "added"]["source_ms"] == pytest.approx(0.403)
    assert found["SWE", "single_anchor", "added"]["source_ms"] == pytest.approx(0.550)
    assert all(e["label"] == "estimate" and e["ratio"] == e["estimate_ms"] / e["source_ms"] for e in found.values())
    # the model leaves host work and imbalance out: a prediction above the measurement would be a mistake in it
    assert all(0.2 < e["ratio"] < 1 for e in found.values())


def test_worse_assumptions_cost_more_and_better_ones_less() -> None:
    assumed, fp8, *worse, all_at_once = (entry["ms"]["round"] for entry in estimate.moved())
    found = {(e["workload"], e["method"], e["stage"]): e["estimate_ms"] for e in against_source()}
    assert assumed == found["Code", "single_anchor", "round"]
    assert fp8 < assumed and all(assumed < one < all_at_once for one in worse)
    # each acts on its own term, except where bytes and flops trade places as the larger
    assert all_at_once - assumed == pytest.approx(sum(one - assumed for one in worse), rel=1e-3)


def test_twice_the_vocabulary_changes_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rounds([H200], ["35B"], batches=(8,))
    larger = dataclasses.replace(QWEN_35B, vocab=2 * QWEN_35B.vocab)
    monkeypatch.setitem(models.MODELS, "35B", larger)
    after = rounds([H200], ["35B"], batches=(8,))
    for old, new in zip(before, after, strict=True):
        assert new["ms"]["t1"] > old["ms"]["t1"] and new["ops_ms"]["t1"] > old["ops_ms"]["t1"]
        assert new["ms"]["mtp"] == old["ms"]["mtp"]
    assert estimate.rounds_table(before) != estimate.rounds_table(after)


def test_json_says_that_these_are_estimates_and_what_they_assume(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--estimates", "--gpu", "H200,B200", "--model", "35B", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"estimates"}
    estimates = found["estimates"]
    assert set(estimates) == {"label", "assumptions", "source", "moved", "rounds"} and estimates["label"] == "estimate"
    assert all(e["label"] == "estimate" for e in [*estimates["source"], *estimates["moved"], *estimates["rounds"]])
    text = " ".join(estimates["assumptions"])
    for said in (
        "routing uniform",
        "1.3 us",
        "21 us",
        "120 GB/s",
        "90 %",
        "not stated there",
        "Host work",
        "datasheets",
    ):
        assert said in text
    assert len(estimates["rounds"]) == 2 * 2 * 6
    assert set(estimates["rounds"][0]) == {
        *("label", "model", "tp", "gpu", "batch", "context", "weights", "ms", "ops_ms", "dflash_round_ms"),
    }


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(estimate.__file__).parents[1] / "roofline.md").read_text()
    assert estimate.source_table(against_source()) in page and estimate.moved_table(estimate.moved()) in page
    title, headers, line, *lines = estimate.rounds_table(rounds([H200])).splitlines()
    shown = [row for row in lines if row.split()[1] == "4"]
    assert len(shown) == 12 and "\n".join((title, headers, line, *shown)) in page


def test_every_table_of_estimates_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--estimates", "--gpu", "H200", "--weights", "fp8", "--context", "4096"]) == 0
    source, moved, table, assumptions = capsys.readouterr().out.strip().split("\n\n")
    assert "ESTIMATE" in source.splitlines()[0] and "ESTIMATE" in moved.splitlines()[0]
    assert table.startswith("ESTIMATES, not measurements") and "fp8" in table and "4,096" in table
    assert assumptions.startswith("Assumptions of the estimates")
    assert len(assumptions.splitlines()) == 1 + len(estimate.ASSUMPTIONS)
