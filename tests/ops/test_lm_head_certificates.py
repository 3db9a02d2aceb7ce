"""Certificates: never wrong over millions of rows and states, and tests that would notice if one were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from dmtp_kernels.ops.lm_head import LMHead, canonical_dot, lm_head_screen, pack_lm_head, reference
from dmtp_kernels.ops.lm_head.formats import dequantize
from tests.ops.conftest import INTERPRETED
from tests.ops.lm_head_cases import CERTIFIED, random

KERNEL_OPS = ("lm_head_screen",)

ROWS, STATES, WIDTH = (150, 7, 96) if INTERPRETED else (700, 250, 96)
Pair = tuple[torch.Tensor, torch.Tensor]  # weight, hidden


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """Cauchy distributed, cut at 1e6."""
    return (random(*shape, seed=seed, dtype=torch.float32) / random(*shape, seed=seed + 1, dtype=torch.float32)).clamp(
        -1e6, 1e6
    )


def plain(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=torch.float32)


def packed(weight: torch.Tensor, name: str, calibration: torch.Tensor | None = None) -> LMHead:
    if name != "deflated":
        return pack_lm_head(weight, format=name)
    width = weight.shape[1]
    states = plain(32, width, seed=9) if calibration is None else calibration
    return pack_lm_head(weight, format=name, calibration=states, rank=max(1, min(16, width // 16)))


def away(head: LMHead) -> torch.Tensor:
    """`w_v - s_v` of every row, in float64."""
    exact = head.weight.double()
    if head.codes is None or head.scale is None:
        return exact
    copy = dequantize(head.codes, head.scale, head.format, head.hidden_size).double()
    return (
        exact - copy if head.up is None or head.down is None else exact - copy - head.up.double() @ head.down.double()
    )


def heavy_tails(name: str) -> Pair:
    return wild(ROWS, WIDTH), wild(STATES, WIDTH, seed=5)


def outlier_columns(name: str) -> Pair:
    w, h = plain(ROWS, WIDTH), plain(STATES, WIDTH, seed=1)
    w[:, 3] *= 1000
    h[:, 3], h[:, 70] = h[:, 3] / 1000, h[:, 70] * 3000
    return w.bfloat16(), h.bfloat16()


def rows_of_all_lengths(name: str) -> Pair:
    return (plain(ROWS, WIDTH) * torch.logspace(-3, 3, ROWS)[:, None]).half(), plain(STATES, WIDTH, seed=1).half()


def few_directions(name: str) -> Pair:
    states = plain(STATES, 3, seed=1) @ plain(3, WIDTH, seed=2) + 1e-4 * plain(STATES, WIDTH, seed=3)
    return plain(ROWS, WIDTH).bfloat16(), states


def hardly_different(name: str) -> Pair:
    # closer than any format tells apart, down to what fp32 does
    w = plain(1, WIDTH) + torch.logspace(-7, -2, ROWS)[:, None] * plain(ROWS, WIDTH, seed=1)
    return w, plain(STATES, WIDTH, seed=2)


def along_errors(name: str) -> Pair:
    # Cauchy-Schwarz is an equality for the row whose error this is
    w = plain(ROWS, WIDTH)
    h = away(packed(w, name))[:STATES]
    return w, (h * torch.logspace(-5, 5, len(h))[:, None] * (-1.0) ** torch.arange(len(h))[:, None]).float()


def between_steps(name: str) -> Pair:
    # every element but the first falls in the middle between two whole numbers, and rows add these errors up
    h = (2 * torch.randint(0, 100, (STATES, WIDTH), generator=torch.Generator().manual_seed(0)) + 1) * 2.0**-22
    h *= torch.randn(STATES, WIDTH, generator=torch.Generator().manual_seed(1)).sign()
    h[:, 0] = 1.0
    w = h.sign()[torch.arange(ROWS) % STATES] * (1 + 1e-6 * plain(ROWS, WIDTH, seed=2))
    w[:, 0] = 1e-3 * plain(ROWS, 1, seed=3)[:, 0]
    return w, h


CASES: tuple[Callable[[str], Pair], ...] = (
    heavy_tails,
    outlier_columns,
    rows_of_all_lengths,
    few_directions,
    hardly_different,
    along_errors,
    between_steps,
)


def missed(head: LMHead, states: torch.Tensor, k: int = 1) -> int:
    """Pairs in which a row that reaches the proved lower bound is not listed, and states whose bound is none."""
    rows = head.weight.shape[0]
    ids, count, lower = lm_head_screen(states, head, rows, k=k)
    listed = torch.zeros(len(states), rows + 1, dtype=torch.bool).scatter_(1, ids.where(ids >= 0, rows), True)
    assert torch.equal(listed[:, :rows].sum(dim=1).int(), count)
    logits = canonical_dot(states, head.weight)
    reaches = (logits > lower[:, None]) & ~listed[:, :rows]
    return int(reaches.sum()) + int((logits.topk(k, dim=1).values[:, -1] < lower).sum())


def outside(head: LMHead, states: torch.Tensor) -> int:
    """Pairs whose reference score is further from the canonical dot than the radius says (none from 2^100 on)."""
    radius = reference._radius(states, head.args())
    radius = torch.where(radius < 2.0**100, radius, torch.inf)
    error = canonical_dot(states, head.weight).double() - reference._scores(states, head.args()).double()
    return int((error.abs() > radius + 2.0**-126).sum())


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_million_pairs(name: str, backend: str) -> None:
    pairs = 0
    for case in CASES:
        w, h = case(name)
        # all of these states lie along the directions of a deflated head, which then rests on its second bound
        head = packed(w, name, h if case is few_directions else None)
        assert missed(head, h) == 0, case.__name__
        assert missed(head, h[:40], k=16) == 0, case.__name__
        pairs += w.shape[0] * h.shape[0]
        if backend == "reference":
            assert outside(head, h) == 0, case.__name__
    assert pairs >= 1_000_000 or INTERPRETED


@pytest.mark.parametrize("name", CERTIFIED)
@pytest.mark.parametrize("width", [1, 3, 65, 257] if INTERPRETED else [1, 2, 3, 7, 64, 65, 129, 257, 1030, 16384])
def test_every_width(name: str, width: int, backend: str) -> None:
    rows, states = (20, 2) if INTERPRETED or width > 5000 else (150, 40)
    w = plain(1, width) + torch.logspace(-7, 0, rows)[:, None] * plain(rows, width, seed=1)
    for weight, hidden in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2):
        head, h = packed(w.to(weight), name), plain(states, width, seed=2).to(hidden)
        assert missed(head, h) == 0
        assert outside(head, h) == 0


# least fp32 is 1.4e-45 and the greatest 3.4e38: codes, scales, products, radii and lengths at both ends
@pytest.mark.parametrize(
    ("weight", "hidden"),
    [
        (1e-45, 1e28),
        (1e-42, 1e-3),
        (1e-38, 1e-30),
        (1e-30, 1e30),
        (1e-20, 1e-26),
        (1e30, 1e-28),
        (1e36, 1e-26),
        (1e36, 1e-40),
        (1e18, 1e19),
        (1.0, 1e37),
        (1.0, 1e-44),
    ],
)
@pytest.mark.parametrize("name", CERTIFIED)
def test_every_magnitude(name: str, weight: float, hidden: float, backend: str) -> None:
    n = 3 if INTERPRETED else 40
    w, h = plain(120, WIDTH) * weight, plain(n, WIDTH, seed=1) * hidden
    w[60:90] = w[30:60] * (1 + 1e-3 * plain(30, 1, seed=2))
    w[::5] *= 1e-3
    head = packed(w, name)
    assert missed(head, h) == 0
    assert outside(head, h) == 0


@pytest.mark.parametrize("name", ["int8", "int8_g64", "int6_g64"])
def test_sums_overflow_only_where_rows_stay_undecided(name: str, backend: str) -> None:
    # without the step of the state the sum over the winner's first columns is -inf, which no later column takes back
    top = 127 if name.startswith("int8") else 31
    w = torch.full((70, 192), -1.0)
    w[5], w[33, 64:] = 1e-3, 0.95
    w *= 2.0**128 * 1.03 / (64 * 2**21)
    h = torch.full((2, 192), 2.0**-95)
    head = packed(w, name)
    assert head.scale is not None and float(head.scale.max()) * top * 64 * 2**21 > torch.finfo(torch.float32).max
    assert missed(head, h) == 0
    ids, count, _ = lm_head_screen(h, head, 70)
    assert (count <= 16).all() and all(33 in row for row in ids.tolist())


def test_the_rest_of_a_tiny_state_is_not_lost(backend: str) -> None:
    # what the directions leave of the least state of all is shorter than the least fp32 number
    w, h = plain(300, 64) * 2.0**118, torch.zeros(1, 64)
    h[0, 0] = 2.0**-149
    direction = torch.zeros(8, 64)
    direction[:, 0], direction[:, 1] = 0.9, 0.19**0.5
    head = pack_lm_head(w, format="deflated", calibration=direction, rank=1)
    assert missed(head, h) == 0 and outside(head, h) == 0


@pytest.mark.parametrize("name", CERTIFIED)
def test_float64_beyond_fp32(name: str, backend: str) -> None:
    # states that are zero or infinite in fp32, rows that are
    w = plain(90, 70).double().abs() * torch.logspace(-60, 60, 90, dtype=torch.float64)[:, None]
    h = (
        plain(6, 70, seed=1).double()
        * 10.0 ** torch.tensor([[-60.0], [-47.0], [-40.0], [0.0], [40.0], [60.0]]).double()
    )
    h = -h.abs()
    head = packed(w, name)
    assert missed(head, h) == 0 and outside(head, h) == 0


def one_by_one(products: torch.Tensor) -> torch.Tensor:
    """fp32 sum in ascending order, rounded to nearest."""
    total = torch.zeros(products.shape[:-1])
    for product in products.float().unbind(-1):
        total = total + product
    return total


def tensor_core(products: torch.Tensor) -> torch.Tensor:
    """fp32 sum as sm_80 forms it: eight exact products and the sum so far, aligned to the greatest exponent with one
    extra bit, cut off, added, cut off again (arXiv:2512.07004)."""
    total = torch.zeros(products.shape[:-1], dtype=torch.float64)
    for part in products.unflatten(-1, (-1, 8)).unbind(-2):
        terms = torch.cat((total[..., None], part), dim=-1)
        unit = torch.ldexp(torch.ones_like(total), terms.abs().amax(dim=-1).frexp().exponent - 25)
        total = ((terms / unit[..., None]).trunc() * unit[..., None]).sum(dim=-1)
        unit = torch.ldexp(torch.ones_like(total), total.frexp().exponent - 24)
        total = (total / unit).trunc() * unit
    return total.float()


@pytest.mark.parametrize(("add", "least"), [(one_by_one, 0.4), (tensor_core, 0.4)])
def test_the_worst_order_of_a_sum_is_covered(
    add: Callable[[torch.Tensor], torch.Tensor], least: float, backend: str
) -> None:
    # after a first product of one, every other is lost, or counts twice, and the radius is needed for almost half
    width = 4096
    w, h = torch.full((1, width), 2.0**-12), torch.full((1, width), 2.0**-12)
    h[:, 1:] *= 1 + 2.0**-6 if add is one_by_one else 1 - 2.0**-6
    w[0, 0] = h[0, 0] = 1.0
    head, state = packed(w.bfloat16(), "dense"), h.bfloat16()
    radius = reference._radius(state, head.args())
    error = (add(w.double() * h.double()) - canonical_dot(state, head.weight)[0]).abs() / radius
    assert least < error < 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        w, h = (torch.randn(20, width, generator=generator).bfloat16() for _ in range(2))
        radius = reference._radius(h, packed(w, "dense").args()).diagonal()
        exact = torch.stack([canonical_dot(h[i : i + 1], w[i : i + 1])[0, 0] for i in range(20)])
        assert ((add(w.double() * h.double()) - exact).abs() < radius).all()


SELECTORS, BODY = 16, 64


def crafted(name: str) -> tuple[LMHead, torch.Tensor]:
    """A head and states for which a certificate is nearly an equality: state v is along the error of row v, whose rival
    (row V/2 + v) is stored exactly and has a slightly lower logit. Selector columns keep the other rows out."""
    w = torch.zeros(2 * SELECTORS, BODY + SELECTORS)
    w[:SELECTORS, :BODY] = plain(SELECTORS, BODY)
    w[:SELECTORS, BODY:].fill_diagonal_(100.0)
    calibration = torch.nn.functional.pad(plain(64, BODY, seed=9), (0, SELECTORS))
    error = away(packed(w, name, calibration))[:SELECTORS]
    length = error.norm(dim=1)
    states = torch.cat((error[:, :BODY], 0.08 * torch.diag(length)), dim=1).float()
    logit = (w[:SELECTORS].double() * states.double()).sum(dim=1)
    w[SELECTORS:, BODY:] = torch.diag((logit - 0.05 * length**2) / (0.08 * length)).float()
    return packed(w, name, calibration), states


@pytest.mark.parametrize("name", [n for n in CERTIFIED if n != "dense"])
def test_a_bound_too_small_is_caught(name: str, backend: str) -> None:
    head, states = crafted(name)
    assert head.bound is not None
    assert missed(head, states) == 0
    for factor in (0.7, 0.5):
        loose = dataclasses.replace(head, bound=head.bound * factor)
        # each row is lost to its rival
        assert missed(loose, states) == SELECTORS


def test_a_dense_head_without_its_bound_is_caught(backend: str) -> None:
    if backend != "reference":
        pytest.skip("a kernel may sum in the canonical order, which needs no bound")
    w, h = hardly_different("dense")
    head = packed(w, "dense")
    assert head.bound is not None
    assert missed(head, h) == 0
    assert missed(dataclasses.replace(head, bound=head.bound * 0), h) > 0
