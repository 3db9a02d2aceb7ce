"""sample_rows: greedy ties, faulty rows, filters, the law of the draws, independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops.sample import (
    BAD_PARAMETER,
    NAN_IGNORED,
    NOTHING_TO_CHOOSE,
    Sampled,
    check_temperature,
    philox,
    sample_rows,
)
from tests.ops.conftest import INTERPRETED
from tests.ops.philox_keys import LARGEST, SMALLEST, TINY, word

KERNEL_OPS = ("sample_rows",)
EVERY_CAPABILITY = True

NAN, INF = float("nan"), float("inf")
LAW = pytest.mark.skipif(
    INTERPRETED, reason="a law needs many rows: interpreted tokens are compared with the reference's"
)


def _sample(logits: Any, temperature: Any = 1.0, **kwargs: Any) -> Sampled:
    x = torch.as_tensor(logits)
    n = len(x)
    t = torch.as_tensor(temperature, dtype=torch.float32).expand(n).contiguous()
    kwargs = {"seed": torch.arange(n), "position": torch.zeros(n, dtype=torch.int64)} | kwargs
    return sample_rows(x, temperature=t, **kwargs)


def _counts(logits: Any, trials: int, **kwargs: Any) -> np.ndarray:
    row = torch.as_tensor(logits, dtype=torch.float32)
    token, status = _sample(row.expand(trials, -1), **kwargs)
    assert not status.any()
    return np.bincount(token.numpy(), minlength=len(row))


def _assert_law(counts: np.ndarray, p: np.ndarray) -> None:
    """Every id within four standard deviations, and none where p is 0."""
    trials = counts.sum()
    assert not counts[p == 0].any()
    spread = np.sqrt(trials * p * (1 - p))
    np.testing.assert_array_less(np.abs(counts - trials * p), 4 * spread + 1e-9)


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    logits = [[1.0, 3.0, 3.0, 2.0], [-INF, -INF, -2.0, -2.0], [0.0, -0.0, -1.0, -1.0]]
    assert _sample(logits, 0.0).token.tolist() == [1, 2, 0]
    assert _sample(logits, -0.0).token.tolist() == [1, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_row_119_nan_and_inf_at_any_place(temperature: float) -> None:
    spread = torch.linspace(-40, -20, 12).expand(3, -1).clone()
    spread[:, 9] = 30.0
    spread[0, 0], spread[1, 4], spread[2, 11] = NAN, INF, NAN
    token, status = _sample(spread, temperature)
    assert token.tolist() == [9, 4, 9] and status.tolist() == [NAN_IGNORED, 0, NAN_IGNORED]
    several = torch.tensor([[0.0, INF, 1.0, INF]])
    assert {int(_sample(several, temperature, seed=torch.tensor([s])).token) for s in range(20)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_117_rows_that_decide_nothing(temperature: float) -> None:
    rows = [[-INF, -INF, -INF], [-INF, 5.0, -INF], [NAN, NAN, NAN], [NAN, -INF, NAN]]
    token, status = _sample(rows, temperature)
    assert token.tolist() == [-1, 1, -1, -1]
    both = NAN_IGNORED + NOTHING_TO_CHOOSE
    assert status.tolist() == [NOTHING_TO_CHOOSE, 0, both, both]


@LAW
def test_row_118_an_all_nan_row_never_becomes_a_random_token() -> None:
    token, status = _sample(torch.full((1000, 7), NAN))
    assert (token == -1).all() and (status == NAN_IGNORED + NOTHING_TO_CHOOSE).all()


def test_row_121_greedy_rows_in_a_mixed_batch() -> None:
    masked = torch.full((3, 50), -INF)
    masked[:, [7, 30, 31]] = torch.tensor([1.0, 2.0, 1.5])
    token, status = _sample(masked, [0.0, 0.7, 1.0])
    assert token[0] == 30 and not status.any() and set(token.tolist()) <= {7, 30, 31}
    for row in (1, 2):
        alone = _sample(masked[row : row + 1], [0.0, 0.7, 1.0][row], seed=torch.tensor([row]))
        assert alone.token.item() == token[row]
    # a tiny temperature is greedy when nothing ties
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_sample(logits, 1e-6).token, logits.argmax(dim=1))


def test_row_123_and_139_bad_temperatures() -> None:
    logits = [[0.0, 100.0, 99.0]] * 6
    token, status = _sample(logits, [0.0, NAN, INF, 1e-30, 1.0, -1.0])
    assert token[[0, 3]].tolist() == [1, 1] and token[[1, 2, 5]].tolist() == [-1, -1, -1] and token[4] in (1, 2)
    assert status.tolist() == [0, BAD_PARAMETER, BAD_PARAMETER, 0, 0, BAD_PARAMETER]
    for value in (NAN, INF, -INF, -1.0):
        with pytest.raises(ValueError, match=rf"temperature\[1\]: is {value}"):
            check_temperature([0.0, value])
    check_temperature([0.0, 1e-30, 2.0])


def test_extreme_logits_do_not_overflow() -> None:
    big = torch.finfo(torch.float32).max
    token, status = _sample([[-big, big, big / 2], [big, -big, 0.0]], 1e-30)
    assert token.tolist() == [1, 0] and not status.any()
    # dividing before the maximum is taken off would make both infinite
    assert _sample(torch.tensor([[0.9e300, 1e300]], dtype=torch.float64), 1e-30).token.tolist() == [1]


@LAW
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = np.array([2.0, 0.0, -1.0, 1.0, -INF, 2.0, -4.0])
    p = np.exp(logits / temperature)
    _assert_law(_counts(logits, 60_000, temperature=temperature), p / p.sum())


@LAW
def test_draws_at_consecutive_positions_are_independent() -> None:
    n = 60_000
    seed, position = torch.full((n,), 12345), torch.arange(n)
    token = _sample(torch.zeros(1, 4).expand(n, 4), seed=seed, position=position).token.numpy()
    pairs = np.bincount(4 * token[:-1] + token[1:], minlength=16)
    _assert_law(pairs, np.full(16, 1 / 16))


@LAW
def test_top_k_and_top_p_keep_the_pinned_sets() -> None:
    p = np.array([0.4, 0.1, 0.3, 0.1, 0.1])
    logits = np.log(p)

    def kept(**kwargs: Any) -> list[int]:
        n = 4000
        full = {k: torch.as_tensor(v).expand(n).contiguous() for k, v in kwargs.items()}
        return np.flatnonzero(_counts(logits, n, **full)).tolist()

    assert kept(top_k=3) == [0, 1, 2]  # 1, 3 and 4 tie: the lowest id stays
    assert kept(top_k=1) == [0] and kept(top_k=0) == kept(top_k=-1) == kept(top_k=9) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.39) == [0] and kept(top_p=0.41) == [0, 2] and kept(top_p=0.69) == [0, 2]
    assert kept(top_p=0.71) == [0, 1, 2] and kept(top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.0) == kept(top_p=-1.0) == [0]
    wide = _sample(torch.zeros(2000, 777), top_k=torch.full((2000,), 3)).token
    assert wide.unique().tolist() == [0, 1, 2]  # a sort that is stable only for few entries would show here
    # the share is of what top-k left: 0.4 of 0.7 is 0.57
    assert kept(top_k=2, top_p=0.5) == [0] and kept(top_k=2, top_p=0.6) == [0, 2]


def test_equal_entries_are_cut_by_id() -> None:
    logits = torch.zeros(12, 9)
    for kept in (
        {"top_k": torch.full((12,), 2)},
        {"top_p": torch.full((12,), 0.2)},
        {"top_k": torch.full((12,), 4), "top_p": torch.full((12,), 0.3)},
    ):
        assert _sample(logits, **kept).token.unique().tolist() == [0, 1]


@LAW
def test_filtered_draws_follow_the_renormalised_law() -> None:
    p = np.array([0.4, 0.1, 0.3, 0.05, 0.15])
    n = 30_000
    counts = _counts(np.log(p), n, top_p=torch.full((n,), 0.8))
    kept = np.where([True, False, True, False, True], p, 0)
    _assert_law(counts, kept / kept.sum())


def test_nan_top_p_is_an_error_only_where_it_is_used() -> None:
    token, status = _sample([[0.0, 1.0]] * 2, [0.0, 1.0], top_p=torch.tensor([NAN, NAN]))
    assert token.tolist() == [1, -1] and status.tolist() == [0, BAD_PARAMETER]


def test_padding_is_never_read() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    temperature = [0.0, 1.0, 0.7, 0.0, 1.0, 2.0]
    want = _sample(logits[:, :13].contiguous(), temperature)
    for poison in (NAN, INF, 1e30):
        logits[:, 13:] = poison
        got = _sample(logits, temperature, num_valid=13)
        assert torch.equal(got.token, want.token) and not got.status.any()


@pytest.mark.parametrize("vocab", [1, 3, 260, 1021])
def test_a_rows_draw_does_not_depend_on_the_batch(vocab: int) -> None:
    n = 33
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab))
    keys: dict[str, torch.Tensor] = {
        "seed": torch.arange(n) * 7919 - 5,
        "position": torch.arange(n) + 2**33,
        "top_k": torch.arange(n) % 40,
        "top_p": 1.1 - torch.arange(n) / 60,
    }
    temperature = torch.arange(n) % 4 * 0.5
    together = _sample(logits, temperature, **keys).token
    for order in (torch.arange(n).flip(0), torch.arange(n)[3:5]):
        part = _sample(logits[order], temperature[order], **{k: v[order] for k, v in keys.items()})
        assert torch.equal(part.token, together[order])
    for row in (0, 17, 32):
        one = slice(row, row + 1)
        assert torch.equal(
            _sample(logits[one], temperature[one], **{k: v[one] for k, v in keys.items()}).token, together[one]
        )


def test_row_135_same_input_same_token() -> None:
    logits = torch.randn(9, 77)
    first = _sample(logits, 0.8).token
    assert all(torch.equal(_sample(logits, 0.8).token, first) for _ in range(5))


def test_streams_positions_and_seeds_change_the_draw() -> None:
    logits = torch.zeros(40, 400)
    base = _sample(logits).token
    moved = [
        _sample(logits, stream=philox.DRAFT).token,
        _sample(logits, position=torch.ones(40, dtype=torch.int64)).token,
        _sample(logits, position=torch.full((40,), 2**32)).token,
        _sample(logits, seed=torch.arange(40) + 2**32).token,
    ]
    for other in moved:
        assert (other == base).sum() < 4


def test_row_129_addresses_need_64_bits() -> None:
    # row stride 2^28: row 8 starts at 2^31. NumPy's empty commits no memory
    memory = torch.from_numpy(np.empty(8 * 2**28 + 64, dtype=np.float16))
    logits = memory.as_strided((9, 64), (2**28, 1))
    logits.zero_()
    logits[torch.arange(9), torch.arange(9) * 5] = 9.0
    assert _sample(logits, 0.0).token.tolist() == [5 * i for i in range(9)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_empty_batches(dtype: torch.dtype) -> None:
    exact = torch.tensor([[0.5, 2.0, -1.0, 1.5]] * 50)  # the same number in every dtype
    want = _sample(exact).token
    keys = {"seed": torch.arange(50, dtype=torch.int32), "position": torch.zeros(50, dtype=torch.int32)}
    assert torch.equal(_sample(exact.to(dtype), **keys).token, want)
    assert _sample(exact[:0].to(dtype)).token.shape == (0,)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, TypeError, "logits: dtype"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits: has no columns"),
        ({"logits": torch.zeros(4, 2).t()}, ValueError, "logits: last dimension has stride 2"),
        ({"temperature": torch.zeros(3)}, ValueError, r"temperature: dimension 0 \(n\) is 3, must be 2"),
        ({"temperature": torch.zeros(2, dtype=torch.int32)}, TypeError, "temperature: dtype"),
        ({"seed": torch.zeros(2)}, TypeError, "seed: dtype"),
        ({"position": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, "position: has 2 dimensions"),
        ({"top_k": torch.zeros(2)}, TypeError, "top_k: dtype"),
        ({"top_p": torch.zeros(1)}, ValueError, "top_p: dimension 0"),
        ({"num_valid": 5}, ValueError, "num_valid: is 5, must be between 1 and 4"),
        ({"num_valid": 0}, ValueError, "num_valid: is 0"),
        ({"stream": -1}, ValueError, "stream: is -1"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 4),
        "temperature": torch.ones(2),
        "seed": zeros,
        "position": zeros,
    }
    with pytest.raises(kind, match=message):
        sample_rows(**(arguments | change))


def test_row_123_the_ends_of_the_range_stay_inside_the_support() -> None:
    # draws that are word 0 and word 2^32 - 1, where fp32 uniforms are 0 and 1
    for stream, extremes in ((s, e) for e in (SMALLEST, LARGEST) for s in (philox.SAMPLE, philox.RESIDUAL)):
        position, index = extremes[stream]
        assert word(stream, position, index) == (0 if extremes is SMALLEST else 2**32 - 1)
        key: dict[str, Any] = {"seed": torch.zeros(1).long(), "position": torch.tensor([position]), "stream": stream}
        others = torch.tensor([[-INF, 1.0, -INF, 0.0, -INF]])
        assert _sample(others, **key).token.item() in (1, 3)
        alone = torch.full((1, 5), -INF)
        alone[0, index] = -1e30
        assert _sample(alone, **key).token.item() == index
        # at gaps either side of what the draws decide the winner changes; log1p keeps what 1 - 2^-33 loses in fp32
        noise = -philox.exponential(key["seed"], key["position"], stream, 2).log()[0].double()
        gap = float(noise[index] - noise[1 - index])
        for offset in (-1e-7, 1e-7):
            logits = torch.zeros(1, 2, dtype=torch.float64)
            logits[0, 1 - index] = gap + offset
            assert _sample(logits, **key).token.item() == (index if offset < 0 else 1 - index)


@pytest.mark.parametrize("dropped_bits", [0, 8])
def test_row_126_tail_entries_win_where_their_draws_say(dropped_bits: int) -> None:
    """Draws below 2^8 decide rows whose other entry leads by 15 to 22 nats. As 24-bit uniforms they are all one step:
    the gaps they would decide are other gaps."""
    position = torch.tensor(list(TINY))
    drawn = torch.tensor(list(TINY.values())) >> dropped_bits << dropped_bits
    if not dropped_bits:
        assert [word(philox.SAMPLE, p, 0) for p in TINY] == drawn.tolist()
    key: dict[str, Any] = {"seed": torch.zeros_like(position), "position": position}
    rest = philox.exponential(key["seed"], position, philox.SAMPLE, 2)[:, 1]
    gap = rest.log() - (-torch.log1p(-philox.to_uniform(drawn))).log()
    as_decided = []
    for offset in (-1e-6, 1e-6):
        logits = torch.stack((torch.zeros_like(gap), gap + offset), dim=1)
        as_decided.append(_sample(logits, **key).token == (0 if offset < 0 else 1))
    assert torch.stack(as_decided).all().item() == (dropped_bits == 0)
