"""Floors are those of the specs, three of them by hand; the measured table follows the bytes; the command's shape."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from dmtp_kernels.bench.cases import Suite, specs
from dmtp_kernels.ops._spec import Case
from profiling.roofline import __main__ as command
from profiling.roofline import measured
from profiling.roofline.measured import Limits, floor

CPU = torch.device("cpu")
LIMITS = Limits(bandwidth=1e10, bf16=1e12, fp32=1e11)
SMALL = [(spec.op, case) for spec in specs().values() for case in spec.cases]
SERVING = list(Suite(CPU, scale=256).cases())


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("op", "case"), SMALL, ids=[f"{op}-{case.name}" for op, case in SMALL])
def test_a_floor_is_the_bytes_of_the_spec_over_the_bandwidth(op: str, case: Case) -> None:
    inputs = case.make(seed())
    nbytes, flops = specs()[op].floor_bytes(*inputs), specs()[op].flops(*inputs)
    found = floor(specs()[op], inputs, LIMITS)
    assert (found.nbytes, found.flops) == (nbytes, flops)
    assert found.seconds >= nbytes / 1e10
    assert floor(specs()[op], inputs, Limits(1e10, 1e30, 1e30)).seconds == nbytes / 1e10
    assert floor(specs()[op], inputs, Limits(1e30, 1e12, 1e12)).seconds == pytest.approx(
        max(flops / 1e12, nbytes / 1e30)
    )


def test_products_of_sixteen_bit_inputs_run_at_their_own_rate() -> None:
    case = next(c for c in SERVING if c.op == "lm_head_select" and c.name == "dense_b8")
    inputs = case.load().inputs
    slow = Limits(bandwidth=1e30, bf16=1e12, fp32=1e11)
    half, single = (floor(specs()["lm_head_select"], i, slow) for i in (inputs, (inputs[0].float(), *inputs[1:])))
    assert half.bound == single.bound == "compute"
    assert half.seconds == half.flops / 1e12 and single.seconds == single.flops / 1e11


def test_every_op_has_serving_cases() -> None:
    assert {case.op for case in SERVING} == set(specs())


@pytest.mark.parametrize("op", sorted(specs()))
def test_a_row_has_the_bytes_of_the_spec_at_serving_sizes(op: str) -> None:
    case = next(c for c in SERVING if c.op == op)
    problem = case.load()
    assert problem.floor_bytes == specs()[op].floor_bytes(*problem.inputs)
    row = measured._row(problem, {"pass": lambda: None}, 1 << 20, {"bf16": 1e12, "fp32": 1e11}, CPU, 2)
    assert (
        row.bytes == problem.floor_bytes
        and row.ms > 0
        and row.again_ms > 0
        and row.share == pytest.approx(row.floor_ms / row.ms)
    )
    assert row.floor_ms >= 1e3 * row.bytes / (row.bandwidth_gb_s * 1e9) * (1 - 1e-9)


def test_dense_head_by_hand() -> None:
    case = next(c for c in SERVING if c.op == "lm_head_select" and c.name == "dense_b8")
    rows, width, batch = 248_320 // 256, 2048, 8
    weights = 2 * rows * width  # bf16
    bounds = 4 * rows  # one fp32 a row
    states = 2 * batch * width
    answers = batch * (8 + 4)  # a key and a status word
    found = floor(specs()["lm_head_select"], case.load().inputs, LIMITS)
    assert found.nbytes == weights + bounds + states + answers
    assert found.flops == 2 * batch * rows * width
    assert found.bound == "memory"
    assert found.seconds == found.nbytes / 1e10


def test_block_attention_by_hand() -> None:
    case = next(c for c in SERVING if c.op == "block_attention" and c.name == "mtp_b8")
    inputs = case.load().inputs
    batch, slots, q_heads, dim = inputs[0].shape
    kv_heads, page = inputs[1].shape[2], inputs[1].shape[1]
    context = int(inputs[4].sum())  # no window: every context row is read
    assert (batch, slots, q_heads, kv_heads, dim) == (8, 8, 16, 2, 256) and inputs[8] is None and context > 0
    cached = context * kv_heads * dim * 2 * 2  # K and V in bf16
    pages = -(-context // page) * 4  # int32
    queries = batch * slots * q_heads * dim * 2
    normalisers = batch * slots * q_heads * 4
    block = sum(2 * t.numel() for t in inputs[5:7] if t is not None)
    if inputs[5] is None:
        cached += batch * slots * kv_heads * dim * 2 * 2
        pages = -(-(context + batch * slots) // page) * 4
    found = floor(specs()["block_attention"], inputs, LIMITS)
    assert found.nbytes == cached + pages + 2 * queries + normalisers + block + inputs[4].nbytes
    seen = context + batch * (slots if inputs[5] is None else inputs[5].shape[1])
    assert found.flops == 2 * 2 * slots * q_heads * dim * seen


def test_commit_by_hand() -> None:
    (keys,), (values,), *_ = inputs = dict(specs()["commit_kv"].cases[0].__dict__)["make"](seed())
    count, live = inputs[4].clamp(0, 8), inputs[12]
    active = int(((count > 0) & live).sum())
    assert keys.shape == values.shape == (4, 8, 2, 16) and active not in (0, 4)
    row = 2 * 16 * 4  # heads, width, fp32
    placed = active * 8 * 2 * (row + row)  # all eight rows of K and V are read and written: valid, pending or scratch
    promoted = active * 2 * (row + row)
    slots = active * 8 * 8 + 4 * (8 + 8 + 8)  # int64: a slot a row, and count, pending and promoted slot a request
    flags = 4 * (1 + 4)  # live, and the error word
    hidden = active * 24 * 4 * 2
    lengths = active * 8 * 2
    found = floor(specs()["commit_kv"], inputs, LIMITS)
    assert found.nbytes == placed + promoted + slots + flags + hidden + lengths
    assert (found.flops, found.bound) == (0, "memory")


def test_twice_the_bytes_are_twice_the_floor_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def row() -> dict[str, Any]:
        case = next(c for c in Suite(CPU, scale=256).cases(["lm_head_rescore"]))
        # a clock that does not run: the pass and the op take the same time always
        monkeypatch.setattr(measured, "medians", lambda entries, *_: dict.fromkeys(entries, 2.0))
        rates = {"bf16": 1e30, "fp32": 1e30}
        return dataclasses.asdict(measured._row(case.load(), {"pass": lambda: None}, 1 << 20, rates, CPU, 1))

    before = row()
    spec = specs()["lm_head_rescore"]
    doubled = dataclasses.replace(spec, floor_bytes=lambda *inputs: 2 * spec.floor_bytes(*inputs))
    monkeypatch.setitem(specs(), "lm_head_rescore", doubled)
    after = row()
    assert after["bytes"] == 2 * before["bytes"]
    assert after["floor_ms"] == pytest.approx(2 * before["floor_ms"])
    assert after["share"] == pytest.approx(2 * before["share"])
    found = {"device": "cpu", "threads": 1, "bf16_tflop_s": 1.0, "fp32_tflop_s": 1.0, "rounds": 1}
    tables = [measured.machine_table({**found, "ops": [r]}) for r in (before, after)]
    assert tables[0] != tables[1] and f"{after['bytes']:,}" in tables[1]
    above = measured.machine_table({**found, "ops": [before | {"share": 1.04}]})
    assert measured.ABOVE in above and " 104.000*" in above
    assert measured.ABOVE not in measured.machine_table({**found, "ops": [before | {"share": 1.0}]})


def test_the_fastest_size_is_the_matrix_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 0.5])
    monkeypatch.setattr(measured, "best_seconds", lambda run, *_: next(times))
    assert measured.matrix_rate(torch.float32, CPU, sizes=(10, 20)) == 2 * 20**3 / 0.5


def test_a_matrix_rate_of_this_world() -> None:
    assert 1e7 < measured.matrix_rate(torch.float32, CPU, sizes=(64,), rounds=2) < 1e14


def test_json_of_one_op(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measured.SIZES, "cpu", (64,))
    words = torch.zeros(1 << 16)
    monkeypatch.setattr(measured, "readers", lambda device: ({"sum": words.sum}, words.nbytes))
    arguments = ["--op", "accept_prefix", "--scale", "256", "--rounds", "2", "--device", "cpu"]
    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine"}
    assert set(found["machine"]) == {
        *("device", "threads", "bf16_tflop_s", "fp32_tflop_s", "rounds", "scale", "ops"),
    }
    assert [row["case"] for row in found["machine"]["ops"]] == ["b1", "b8"]
    for row in found["machine"]["ops"]:
        assert set(row) == {f.name for f in dataclasses.fields(measured.Row)}
        assert row["op"] == "accept_prefix" and row["ms"] > 0 and row["bound"] == "memory"
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("MEASURED on cpu") and "ESTIMATE" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--op", "nothing"],
        ["--op", "accept_prefix", "--estimates"],
        ["--op", "accept_prefix", "--rounds", "0"],
        ["--op", "accept_prefix", "--scale", "0"],
        ["--threads", "0"],
        ["--gpu", "H20"],
        ["--model", "7B"],
        ["--estimates", "--context", "-1"],
    ],
)
def test_what_means_nothing_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code: object
    try:
        code = command.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and capsys.readouterr().err.count("\n") == 1
