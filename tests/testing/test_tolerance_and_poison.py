"""The error budget and the guards catch the faults they are for."""

from __future__ import annotations

import pytest
import torch

from dmtp_kernels.testing.poison import guarded, poison, poison_rows
from dmtp_kernels.testing.tolerance import assert_within_budget, ulp

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1.0, 1.5, -3.0, 0.0, 1e-3, 1000.0])
def test_ulp_is_the_gap_to_the_next_number(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor(abs(value)).to(dtype)
    if value:
        up = torch.nextafter(x, torch.tensor(torch.inf, dtype=dtype))
        assert ulp(float(x), dtype) == float(up.double() - x.double())
    else:
        assert 0 < ulp(0.0, dtype) < 1e-7  # no number of normal size


def _softmax(dtype: torch.dtype, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x.double().softmax(1), x.softmax(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_eager_itself_is_within_the_budget(dtype: torch.dtype) -> None:
    truth, eager = _softmax(dtype)
    assert_within_budget(eager, truth, eager)
    assert_within_budget(truth.to(dtype), truth, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_bad_element_does_not_drown(dtype: torch.dtype) -> None:
    truth, eager = _softmax(dtype)
    got = eager.clone()
    got[3, 5] = float(truth[3, 5]) + 6 * ulp(float(truth.max()), dtype)
    with pytest.raises(AssertionError, match=r"attention: errs .* at \(3, 5\)"):
        assert_within_budget(got, truth, eager, name="attention")


def test_a_wrong_formula_fails_where_a_loose_tolerance_passes() -> None:
    # accumulating in bf16 instead of fp32
    x = torch.rand(8, 512, generator=torch.Generator().manual_seed(1)).to(BF16)
    truth, eager = x.double().sum(1), x.float().sum(1).to(BF16)
    got = torch.zeros(8, dtype=BF16)
    for column in x.unbind(1):
        got = got + column
    with pytest.raises(AssertionError):
        assert_within_budget(got, truth, eager)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_nan_or_infinity_of_its_own_is_a_failure_even_where_eager_has_it(bad: float) -> None:
    truth, eager = _softmax(torch.float32)
    got = eager.clone()
    got[2, 7] = bad
    with pytest.raises(AssertionError, match=r"differ in NaN or infinity, the first at \(2, 7\)"):
        assert_within_budget(got, truth, got)


def test_a_nan_of_the_truth_must_not_be_laundered() -> None:
    truth, eager = _softmax(torch.float32)
    truth[0], eager[0] = float("nan"), float("nan")
    assert_within_budget(eager, truth, eager)
    with pytest.raises(AssertionError, match="NaN"):
        assert_within_budget(eager.nan_to_num(), truth, eager)


def test_overflow_of_the_output_dtype_is_the_right_answer() -> None:
    truth = torch.tensor([1e39, -1e39, 1.0], dtype=torch.float64)
    assert_within_budget(truth.float(), truth, truth.float())
    with pytest.raises(AssertionError):
        assert_within_budget(truth.float().clamp(-3e38, 3e38), truth, truth.float())


def test_mismatched_arguments_are_named() -> None:
    truth, eager = _softmax(torch.float32)
    with pytest.raises(ValueError, match="shapes differ"):
        assert_within_budget(eager[:3], truth, eager)
    with pytest.raises(ValueError, match=r"truth torch\.float32"):
        assert_within_budget(eager, eager, eager)
    assert_within_budget(eager[:0], truth[:0], eager[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(4, 6), (5,), (0, 3), (2, 3, 4)])
def test_guards_stay_when_only_the_buffer_is_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    buffer = guarded(shape, dtype, row_gap=3)
    assert buffer.tensor.shape == shape and buffer.tensor.dtype == dtype
    assert all(v != v or v == poison(dtype) for v in buffer.tensor.flatten().tolist())
    buffer.tensor.fill_(1)
    buffer.check()


@pytest.mark.parametrize("at", [-1, 6, 8, 24, 25])
def test_a_write_past_an_end_or_into_a_row_gap_shows(at: int) -> None:
    buffer = guarded((3, 6), torch.int32, row_gap=3)
    buffer.tensor.fill_(1)
    raw = buffer.tensor.as_strided((1,), (1,), buffer.tensor.storage_offset() + at)
    raw.fill_(5)
    with pytest.raises(AssertionError, match=f"1 elements outside the buffer were written, the first at {at}$"):
        buffer.check()


def test_an_unwritten_element_shows() -> None:
    buffer = guarded((3, 4), torch.float16)
    buffer.tensor[:, :3] = 0
    with pytest.raises(AssertionError, match="3 of 12 elements were not written"):
        buffer.check()
    buffer.check(written=False)


def test_poisoned_rows_spoil_what_reads_them() -> None:
    cache = torch.zeros(6, 2, 3)
    assert poison_rows(cache, [0, 4]) is cache
    assert cache[[0, 4]].eq(0).all() and cache[[1, 2, 3, 5]].isnan().all()
    table = torch.zeros(2, 5, dtype=torch.int32)
    poison_rows(table, torch.tensor([1, 2]), dim=1)
    assert table[:, 1:3].eq(0).all() and table[:, [0, 3, 4]].eq(2**31 - 1).all()
