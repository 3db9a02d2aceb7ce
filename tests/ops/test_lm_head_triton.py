"""The head's Triton kernels as a GPU would launch them: tiles, launches, order of programs, edges, scratch memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import use_backend
from dmtp_kernels.ops._device import planned_for
from dmtp_kernels.ops.lm_head import (
    LM_HEAD_SELECT,
    NO_KEY,
    NO_TOKEN,
    LMHead,
    lm_head_rescore,
    lm_head_screen,
    lm_head_select,
    pack_lm_head,
    reference,
)
from dmtp_kernels.ops.lm_head.config import FinishConfig, PoolConfig, ScreenConfig
from dmtp_kernels.ops.lm_head.formats import FORMATS
from dmtp_kernels.testing import watch
from dmtp_kernels.testing.capture import capture_safe
from tests.ops.conftest import INTERPRETED
from tests.ops.lm_head_cases import always_screen, random  # noqa: F401

config = pytest.importorskip("dmtp_kernels.ops.lm_head.config")
launch_screen = pytest.importorskip("dmtp_kernels.ops.lm_head.launch_screen", reason="triton is not installed")
if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")
ROUTES: dict[str, dict[str, Any]] = {name: {} for name in FORMATS if not FORMATS[name].factors} | {
    "low_rank": {"rank": 37},
    "low_rank_int8": {"rank": 37, "up_format": "int8"},
}
EXACT = ("int8", "int4_g32", "low_rank", "low_rank_int8")  # scores with the same bits everywhere


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    with use_backend("triton", *OPS):
        yield


def pack(weight: torch.Tensor, route: str, **options: Any) -> LMHead:
    name = route.removesuffix("_int8") if route.startswith("low_rank") else route
    factors: dict[str, Any] = {"calibration": random(64, weight.shape[1], seed=5)} if FORMATS[name].factors else {}
    fallback = "full" if FORMATS[name].certified else "none"
    return pack_lm_head(weight, format=name, fallback=fallback, **ROUTES[route], **factors, **options)


def truth(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with use_backend("reference", *OPS):
        return run(*args, **options)


def assert_same(hidden: torch.Tensor, head: LMHead, k: int = 1, logit_dtype: str = "float32") -> None:
    got = lm_head_select(hidden, head, k, logit_dtype)
    want = truth(lm_head_select, hidden, head, k, logit_dtype)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def launched(run: Callable[[], object]) -> list[str]:
    """Kernels in the order of their launches, without the common prefix and suffix."""
    seen: dict[int, watch.Launch] = {}

    def note(access: watch.Access) -> None:
        seen.setdefault(id(access.launch), access.launch)

    with watch.watch(note):
        run()
    return [entry.kernel.removeprefix("lm_head_").removesuffix("_kernel") for entry in seen.values()]


@pytest.mark.parametrize("route", ROUTES)
def test_as_planned_for_a_gpu(route: str) -> None:
    # the tiles that a GPU gets, cut by V and H; each class of n
    w, h = random(331, 267), random(33, 267, seed=1)
    head = pack(w, route, num_valid=321, id_offset=7, capacity=40)
    with planned_for(132):
        for n in (1, 9, 33):
            assert_same(h[:n], head)
        assert_same(h[:3], head, 5, "bfloat16")


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 127, 128, 129, 256])  # around a group and a tile
@pytest.mark.parametrize("route", ["int8", "int4_g32"])
def test_sizes_around_tiles(rows: int, route: str) -> None:
    # one row has one group and more programs than groups
    w, h = random(rows + 3, 64), random(2, 64, seed=1)
    w[rows:] = float("nan")
    with planned_for(132):
        head = pack(w, route, num_valid=rows, capacity=max(1, rows // 2))
        assert_same(h, head)
        assert torch.equal(lm_head_screen(h, head)[0], truth(lm_head_screen, h, head)[0])


def random_knobs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Any powers of two, any number of splits: answers may not depend on how kernels are launched."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    def pool_config(groups: int, rank: int) -> PoolConfig:
        splits = draw(0, 1, 3, 7)
        share = -(-groups // max(1, splits))
        held = groups if splits == 0 else splits * rank
        return PoolConfig(
            splits, share, 1 << max(0, share - 1).bit_length(), max(2, 1 << max(0, held - 1).bit_length()), 1
        )

    monkeypatch.setattr(config, "CERTIFIED_GROUP", draw(1, 4, 16))
    monkeypatch.setattr(config, "MAX_STATES", draw(2, 64))
    monkeypatch.setattr(config, "MAX_LISTED_STATES", draw(3, 64))
    monkeypatch.setattr(config, "pool_config", pool_config)
    monkeypatch.setattr(config, "list_block", lambda *_: (draw(16, 64, 1024), 1))
    monkeypatch.setattr(config, "factor_config", lambda *_: ScreenConfig(draw(16, 32), 1, 256, 1, 1))
    monkeypatch.setattr(
        config, "screen_config", lambda *_: ScreenConfig(draw(16, 32, 128), draw(1, 4, 16), draw(32, 64, 128), 1, 1)
    )
    monkeypatch.setattr(
        config, "finish_config", lambda *_: FinishConfig(draw(16, 64), draw(16, 32, 256), draw(1, 2, 5, 97), 1, 1)
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("route", ROUTES)
def test_any_tiles_give_one_answer(route: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, h = random(213, 136), random(5, 136, seed=1)
    w[100:120] = w[:20]  # ties across tiles
    token = torch.randint(-1, 900, (213,), generator=torch.Generator().manual_seed(seed))
    modes: list[dict[str, Any]] = [{}, {"id_map": token, "id_map_mode": "absolute"}, {"id_offset": 9}]
    head = pack(w, route, num_valid=209, capacity=20, **modes[seed])
    random_knobs(monkeypatch, seed)
    for k in (1, 6):
        assert_same(h, head, k)
    ids, count, lower = lm_head_screen(h, head)
    want = truth(lm_head_screen, h, head)
    torch.testing.assert_close(lower, want[2], rtol=1e-4, atol=1e-4)
    if route in EXACT:
        assert torch.equal(ids, want[0]) and torch.equal(count, want[1])
    key = lm_head_rescore(h, w, ids.clamp(min=-1), count, 3, head.id_offset, num_valid=200)
    assert torch.equal(key, truth(lm_head_rescore, h, w, ids, count, 3, head.id_offset, num_valid=200))


@pytest.mark.parametrize("route", EXACT)
def test_scores_bit_by_bit(route: str) -> None:
    w, h = random(130, 200), random(4, 200, seed=1, dtype=torch.float32)
    h[1] *= 1e-20
    h[2, 0], h[3] = 1e6, 0.0
    args = pack(w, route, capacity=20).args()
    scores = reference._scores(h, args)
    if args.certified:
        reach = reference._radius(h, args)
        lower, upper = scores - reach, scores + reach
        assert torch.equal(values_of(launch_screen.screen(h, args, 2, 1, None, None).pool, 130), lower)
    else:
        upper = torch.nn.functional.pad(scores, (0, 2), value=-torch.inf).unflatten(1, (-1, 4)).amax(2)
    groups = launch_screen.screen(h, args, 1, 1, None, None)
    assert torch.equal(values_of(groups.upper, groups.total), upper)


def values_of(ordered: torch.Tensor, total: int) -> torch.Tensor:
    """Floats `[4, total]` of ordered integers."""
    bits = ordered.view(4, -1)[:, :total]
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


@pytest.mark.parametrize(
    ("hidden", "weight"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize("route", ["dense", "int8", "low_rank"])
def test_dtypes_of_states_and_rows_may_differ(route: str, hidden: torch.dtype, weight: torch.dtype) -> None:
    w, h = random(140, 300, dtype=weight), random(3, 300, seed=1, dtype=hidden)
    assert_same(h, pack(w, route, capacity=20))


LAUNCHES: dict[str, tuple[str, int, list[str]]] = {
    "certified": ("int8", 1, ["prepare", "screen", "finish"]),
    "certified, k": ("int8", 4, ["prepare", "screen", "finish", "merge"]),
    "dense": ("dense", 1, ["prepare", "screen", "finish"]),
    "shortlist": ("int4_g32", 1, ["prepare", "screen", "finish"]),
    "shortlist, k": ("int4_g32", 4, ["prepare", "screen", "finish", "merge"]),
    "int8 factors": ("low_rank_int8", 1, ["project", "prepare", "screen", "finish"]),
    "float factors": ("low_rank", 1, ["project", "prepare", "factor", "finish"]),
    "float factors, k": ("low_rank", 4, ["project", "factor", "finish", "merge"]),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_of_each_route(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    route, k, want = LAUNCHES[case]
    w, h = random(200, 64), random(3, 64, seed=1)
    head = pack(w, route, capacity=8)
    assert launched(lambda: lm_head_select(h, head, k)) == want
    # more groups than one program holds
    monkeypatch.setattr(config, "POOL_VALUES", 8)
    many = (
        want
        if case in ("certified", "dense")
        else [*want[: want.index("finish")], "pool", *want[want.index("finish") :]]
    )
    assert launched(lambda: lm_head_select(h, head, k)) == many
    assert_same(h, head, k)


def test_launches_of_scans_lists_and_empty_inputs() -> None:
    w, h = random(200, 64), random(3, 64, seed=1)
    scan = pack_lm_head(w, format="int4_g32")
    assert launched(lambda: lm_head_select(h, scan)) == ["prepare", "finish"]
    assert launched(lambda: lm_head_select(h, scan, 4)) == ["finish", "merge"]
    assert launched(lambda: lm_head_screen(h, pack(w, "int8"))) == ["prepare", "screen", "list"]
    count = torch.tensor([2, 0, 2])
    assert launched(lambda: lm_head_rescore(h, w, torch.tensor([[3, 4]] * 3), count)) == ["rescore", "merge"]
    for empty in (h[:0], h):
        head = pack(w, "int8", num_valid=0)
        assert launched(lambda: lm_head_select(empty, head, 2)) == []  # noqa: B023
        assert launched(lambda: lm_head_screen(empty, head)) == []  # noqa: B023
    key, status = lm_head_select(h, head, 2)
    assert (key == NO_KEY).all() and (status == NO_TOKEN).all()
    assert launched(lambda: lm_head_select(h[:0], pack(w, "int8"))) == []
    assert lm_head_rescore(h, w, torch.zeros(3, 0, dtype=torch.int64), count).tolist() == [[NO_KEY]] * 3


def test_what_goes_to_the_reference() -> None:
    w, h = random(200, 64), random(3, 64, seed=1)
    deflated = pack_lm_head(w, format="deflated", calibration=random(64, 64, seed=2), rank=4)
    assert launched(lambda: lm_head_select(h, deflated)) == []
    assert launched(lambda: lm_head_select(h.double(), pack(w, "int8"))) == []
    assert launched(lambda: lm_head_select(h, pack_lm_head(w.double()))) == []
    wide = random(20, 16386)
    assert launched(lambda: lm_head_select(wide[:1], pack(wide, "int8"))) == []
    assert_same(wide[:1], pack(wide, "int8"))
    assert launched(lambda: lm_head_select(h, dataclasses.replace(pack(w, "int8"), capacity=300), 260)) == []


@pytest.mark.parametrize("route", ["int8", "int4_g32"])
def test_a_second_call_allocates_nothing(route: str) -> None:
    w, h = random(200, 64), random(3, 64, seed=1)
    head = pack(w, route, capacity=16)
    for k in (1, 4):
        key, status = torch.empty(3, k, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        options = {**head.scalars(), "k": k, "logit_dtype": "float32", "key": key, "status": status}
        LM_HEAD_SELECT.out(h, *head.tensors(), **options)
        want = key.clone()
        key.fill_(5)
        with capture_safe(allocations=False):
            LM_HEAD_SELECT.out(h, *head.tensors(), **options)
        assert torch.equal(key, want)


def test_stale_scratch_changes_nothing() -> None:
    # a call with other sizes leaves its values behind
    small, large = random(90, 64), random(700, 128, seed=2)
    h = random(6, 128, seed=1)
    heads = [pack(small, "int4_g32", capacity=8), pack(large, "int8"), pack(large, "int4_g32", capacity=40)]
    for head in (*heads, *reversed(heads)):
        for k in (1, 3):
            assert_same(h[:, : head.hidden_size], head, k)


@pytest.mark.parametrize("seed", [1, 2])
def test_order_of_programs_changes_nothing(seed: int) -> None:
    w, h = random(300, 72), random(4, 72, seed=1)
    w[150:] = w[:150]
    with planned_for(132):
        for route in ("int8", "int4_g32"):
            head = pack(w, route, capacity=24)
            with watch.shuffled_programs(seed):
                got = [lm_head_select(h, head, k)[0] for k in (1, 5)] + [lm_head_screen(h, head)[0]]
            want = [truth(lm_head_select, h, head, k)[0] for k in (1, 5)] + [truth(lm_head_screen, h, head)[0]]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
