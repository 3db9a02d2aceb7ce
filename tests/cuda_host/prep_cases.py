"""Calls of T1 preparation for the emulated CUDA kernels: small, odd, and each way through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops.lm_head import pack_lm_head
from dmtp_kernels.ops.t1_prep import cuda, fold_fusion
from dmtp_kernels.ops.t1_prep.args import PrepArgs
from dmtp_kernels.ops.t1_prep.fusion import Fusion
from dmtp_kernels.testing.tolerance import assert_within_budget
from tests.cuda_host import host
from tests.cuda_host.cases import CPU, outputs_of, same
from tests.cuda_host.fence import Fence, Fenced

OP = "fused_t1_prep"
TABLE = 60
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def prep_case(
    batch: int,
    width: int,
    hidden: int,
    rows: int = TABLE,
    *,
    dtype: torch.dtype = BF16,
    states: torch.dtype | None = None,
    matrix: torch.dtype | None = None,
    format: str | None = "int8",
    mode: str = "residual",
    alone: bool = False,
    slots: str = "t1",
    fold: torch.dtype | None = None,
    anchors: int = 2,
    mapped: bool = False,
    logits: str = "float32",
    scale: float = 1.0,
    mask: torch.dtype | None = None,
    shard: int = 0,
    draw: int = 0,
) -> tuple[Any, ...]:
    """One call. `rows`: of the head; `dtype`: of table, head and norms, unless `states` and `matrix` have another."""
    generator = torch.Generator().manual_seed(draw)

    def random(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(like)

    table, h = random(TABLE, width), random(batch, hidden, like=states or dtype)
    fusion = Fusion()
    if mode != "none":
        reads = hidden if alone else width + hidden
        norms: dict[str, Any] = {"norm_m": random(hidden) + 1, "norm_e": None if alone else random(width) + 1}
        big = random(5 if mode == "residual_low_rank" else width, reads, like=matrix or dtype) * 0.1
        if mode == "residual_low_rank":
            fusion = Fusion(mode=mode, down=big, up=random(width, 5, like=matrix or dtype), slots=slots, **norms)
        else:
            fusion = Fusion(mode=mode, weight=big, slots=slots, offset_m=1.0, eps_e=1e-3, **norms)
    anchor = torch.randint(-1, TABLE + 1, (batch,), generator=generator)
    head = None
    if format is not None:
        weight = random(rows, hidden)
        weight[rows // 2 :] = weight[: rows - rows // 2].clone()  # ties
        options: dict[str, Any] = {"id_map": torch.arange(rows) % 70 - 3, "id_map_mode": "absolute"} if mapped else {}
        if format == "low_rank":
            options |= {"calibration": torch.randn(32, hidden, generator=generator), "rank": 7}
        head = pack_lm_head(weight, format=format, num_valid=rows - 3, id_offset=0 if mapped else 2, **options)
    source = (
        (*(None,) * 7, "dense", 0, 0, "none", 1, True) if head is None else (*head.tensors(), *head.scalars().values())
    )
    return (
        anchor,
        h,
        table[shard:],
        None,
        torch.randint(-1, TABLE + 2, (batch,), generator=generator, dtype=torch.int32) if head is None else None,
        None if mask is None else random(width, like=mask),
        None if fold is None else fold_fusion(table[shard:], fusion, dtype=fold),
        *source[:7],
        *fusion.tensors(),
        *source[7:],
        *fusion.args()[5:],
        anchors,
        TABLE - 1,
        3,
        scale,
        shard,
        max(TABLE, rows + 2),
        logits,
    )


CASES: dict[str, dict[str, Any]] = {
    "dense_bf16": {"batch": 3, "width": 24, "hidden": 40, "rows": 37, "format": "dense"},
    "dense_fp32_low_rank": {
        **{"batch": 3, "width": 17, "hidden": 33, "dtype": FP32, "format": "dense"},
        **{"mode": "residual_low_rank", "scale": 1.5},
    },
    "dense_fp16": {"batch": 2, "width": 16, "hidden": 24, "rows": 21, "dtype": FP16, "format": "dense"},
    "dense_mixed": {"batch": 2, "width": 8, "hidden": 72, "rows": 20, "states": FP32, "format": "dense"},
    "int8": {"batch": 9, "width": 40, "hidden": 48, "logits": "bfloat16"},
    "int8_many_rows": {"batch": 2, "width": 8, "hidden": 144, "rows": 200, "mode": "none"},
    "int8_odd": {"batch": 2, "width": 9, "hidden": 35, "mode": "replace", "anchors": 1, "mapped": True},
    "scan_folded": {"batch": 2, "width": 16, "hidden": 40, "rows": 36, "format": "low_rank", "fold": FP32},
    "replace_folded": {"batch": 2, "width": 16, "hidden": 24, "format": None, "mode": "replace", "fold": BF16},
    "masks": {
        **{"batch": 2, "width": 24, "hidden": 40, "format": None, "alone": True, "slots": "masks"},
        **{"mask": FP32, "scale": 0.5},
    },
    "deep": {"batch": 2, "width": 40, "hidden": 640, "format": None, "dtype": FP32},
    "deep_parts": {"batch": 2, "width": 40, "hidden": 1800, "format": None, "mode": "residual"},
    "low_rank_parts": {"batch": 2, "width": 24, "hidden": 40, "format": None, "mode": "residual_low_rank"},
    "own_dtypes": {"batch": 2, "width": 12, "hidden": 24, "format": None, "matrix": FP16, "states": FP32, "shard": 20},
    "two_launches": {"batch": 18, "width": 8, "hidden": 16, "rows": 20},
}
LAUNCHES = {"two_launches": 2}


class Scratch:
    """The kernels' own memory: fenced, and full of what the seed says before each run."""

    def __init__(self) -> None:
        self._fences: dict[int, Fence] = {}
        self.fill = 0

    def __call__(self, key: str, device: torch.device, nbytes: int) -> torch.Tensor:
        fence = self._fences.setdefault(nbytes, Fence(nbytes, True))
        fence.inside.view(torch.int32).fill_(self.fill)
        return fence.inside

    def check(self) -> None:
        for fence in self._fences.values():
            fence.check()


class Prepared:
    """One call: the reference's answer, and what `differs` from it under a schedule on the emulated kernels.

    Ids, T1, flags and plain slots are the reference's bits. Fused slots keep the error budget, and are the same bits
    under every schedule and for every grid.
    """

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self._args = PrepArgs(*inputs)
        wanted = [torch.empty_like(out) for out in outputs_of(OP, inputs)]
        with use_backend("reference"):
            backends.implementation(OP, CPU)(*inputs, *wanted)
        self._wanted = wanted
        call = [*inputs, *outputs_of(OP, inputs)]
        self._placed = [Fenced(call, at_end) for at_end in (True, False)]
        self._scratch = Scratch()
        self._first: torch.Tensor | None = None

    def differs(self, seed: int, route: Any = cuda.fused_t1_prep) -> str | None:
        """What is wrong after a run under schedule `seed`, None where nothing is. Guards are checked."""
        placed = self._placed[seed % 2]
        placed.restore()
        self._scratch.fill = (-1, -(1 << 31), 0x7F7F7F7F)[seed % 3]
        host.seed(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "workspace", self._scratch)
            # one that failed may have left the barrier of the grid half passed
            patch.setattr(cuda, "counters", lambda key, device, count: torch.zeros(count, dtype=torch.int32))
            try:
                route(*placed.arguments)
                placed.check()
                self._scratch.check()
            except (AssertionError, RuntimeError) as error:
                return str(error)
        got = placed.arguments[len(PrepArgs._fields) :]
        for name, one, want in zip(("t1", "ids", "certified"), (*got[:2], got[3]), self._exact(), strict=True):
            if not same(one, want):
                return f"{name}: got {one}, must be {want}"
        return self._block(got[2])

    def _exact(self) -> tuple[torch.Tensor, ...]:
        return *self._wanted[:2], self._wanted[3]

    def _block(self, got: torch.Tensor) -> str | None:
        args = self._args
        fused = torch.zeros(got.shape[1], dtype=torch.bool)
        if args.fusion_mode != "none":
            fused[args.anchors :] = args.fusion_slots == "masks"
            fused[args.anchors - 1] = args.fusion_slots == "t1"
        if not same(got[:, ~fused], self._wanted[2][:, ~fused]):
            return "plain slots differ"
        if self._first is None:
            try:
                assert_within_budget(got, self._truth(), self._wanted[2])
            except AssertionError as error:
                return str(error)
            self._first = got.clone()
        return None if same(got, self._first) else "fused slots differ from those of another schedule"

    def _truth(self) -> torch.Tensor:
        wide: list[Any] = [
            v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in self._args
        ]
        args = PrepArgs(*wide)._replace(t1_override=self._wanted[0])
        outs = [torch.empty_like(out) for out in self._wanted]
        outs[2] = outs[2].double()
        with use_backend("reference"):
            backends.implementation(OP, CPU)(*args, *outs)
        return outs[2]


def prepared() -> Iterator[tuple[str, Prepared]]:
    """Every case."""
    for name, options in CASES.items():
        yield name, Prepared(prep_case(**options))
