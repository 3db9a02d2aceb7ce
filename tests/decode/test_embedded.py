"""The shipped checkpoint: small enough, lossless with every method, and better drafted by DMTP than by DFlash alone."""

from __future__ import annotations

import functools

import pytest

from dmtp_kernels.decode.evaluate import compare
from dmtp_kernels.decode.method import SHIPPED
from dmtp_kernels.models.checkpoint import EMBEDDED, Checkpoint, load_checkpoint
from dmtp_kernels.training.data import held_out_prompts

MEGABYTE = 1_000_000


@functools.cache
def checkpoint() -> Checkpoint:
    return load_checkpoint()


def prompts(count: int) -> list[bytes]:
    """Every fifth held-out prompt: mixed lengths from the whole list."""
    texts = [p["text"].encode() for p in held_out_prompts()]
    return texts[:: len(texts) // count][:count]


def test_size_and_record() -> None:
    assert EMBEDDED.stat().st_size <= 12 * MEGABYTE
    record = checkpoint().record
    assert record is not None
    assert {"seed", "compare"} <= set(record)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_every_method_is_lossless(temperature: float, batch: int) -> None:
    count, tokens = (2, 24) if batch == 1 else (8, 32)
    names = list(SHIPPED)
    result = compare(
        checkpoint(),
        prompts(count),
        names,
        max_new_tokens=tokens,
        temperature=temperature,
        batch=batch,
        check=True,
        agreement=False,
    )
    assert {name: row["mismatches"] for name, row in result["methods"].items()} == {name: [] for name in names}
    assert all(row["prompts"] == count for row in result["methods"].values())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_recorded_comparison_favours_dmtp(temperature: float) -> None:
    """The full comparison lives in the training record: at least 5 points of T1 acceptance and 5 % of length."""
    record = checkpoint().record
    assert record is not None
    found = next(r for r in record["compare"] if r["temperature"] == temperature)
    ours, plain = found["methods"]["dmtp"], found["methods"]["dflash"]
    assert found["prompts"] >= 32
    assert ours["t1_acceptance"] >= plain["t1_acceptance"] + 0.05
    assert ours["per_verify_length"] >= 1.05 * plain["per_verify_length"]
    for row in (ours, plain):
        for key in ("t1_acceptance", "per_verify_length"):
            low, high = row[f"{key}_interval"]
            assert low < row[key] < high


def test_the_record_is_what_the_file_does() -> None:
    """Decoding a few prompts again gives acceptance inside a generous range around the recorded figures."""
    record = checkpoint().record
    assert record is not None
    found = next(r for r in record["compare"] if r["temperature"] == 1.0)
    result = compare(
        checkpoint(),
        prompts(16),
        ["dflash", "dmtp"],
        max_new_tokens=48,
        temperature=1.0,
        batch=16,
        agreement=False,
    )
    for name, row in result["methods"].items():
        assert row["t1_acceptance"] == pytest.approx(found["methods"][name]["t1_acceptance"], abs=0.12)
    assert result["methods"]["dmtp"]["t1_acceptance"] > result["methods"]["dflash"]["t1_acceptance"]
