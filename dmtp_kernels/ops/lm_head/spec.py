"""Inputs and traffic of the head's ops."""

from __future__ import annotations

from typing import Any

import torch

from dmtp_kernels.ops._spec import Case, Spec, Traffic, nbytes
from dmtp_kernels.ops.lm_head.formats import FORMATS
from dmtp_kernels.ops.lm_head.head import HeadArgs, LMHead
from dmtp_kernels.ops.lm_head.pack import pack_lm_head

_HEAD = len(HeadArgs._fields)


def _head(
    generator: torch.Generator, rows: int, hidden: int, dtype: torch.dtype, format: str, **options: Any
) -> LMHead:
    weight = torch.randn(rows, hidden, generator=generator).to(dtype)
    if options.pop("mapped", False):
        options |= {"id_map": torch.randint(-1, 3, (rows,), generator=generator).cumsum(0), "id_map_mode": "absolute"}
    if FORMATS[format].factors:
        options["calibration"] = torch.randn(64, hidden, generator=generator)
    return pack_lm_head(weight, format=format, **options)


def _states(generator: torch.Generator, n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, hidden + 3, generator=generator).to(dtype)[:, :hidden]


def _select_case(
    n: int,
    rows: int,
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    format: str = "int8",
    k: int = 1,
    logit_dtype: str = "float32",
    **options: Any,
) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        head = _head(generator, rows, hidden, dtype, format, **options)
        return _states(generator, n, hidden, dtype), *head.args(), k, logit_dtype

    return make


def _screen_case(n: int, rows: int, hidden: int, format: str, **options: Any) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        head = _head(generator, rows, hidden, torch.bfloat16, format, **options)
        return _states(generator, n, hidden, torch.bfloat16), *head.args(), 1

    return make


def _rescore_case(n: int, rows: int, hidden: int, width: int, k: int, index: torch.dtype) -> Any:
    def make(generator: torch.Generator) -> tuple[Any, ...]:
        weight = torch.randn(rows, hidden, generator=generator).to(torch.bfloat16)
        ids = torch.stack([torch.randperm(rows + 8, generator=generator)[:width] for _ in range(n)]) if n else None
        ids = torch.zeros(0, width, dtype=index) if ids is None else (ids + 96).to(index)
        count = torch.randint(-1, width + 2, (n,), generator=generator).to(index)
        return _states(generator, n, hidden, torch.bfloat16), weight, ids, count, k, 100, rows - 3, "float32"

    return make


def _screen_bytes(head: HeadArgs) -> int:
    share = head.num_valid / max(1, head.weight.shape[0])
    copy = nbytes(head.codes, head.scale, head.up) or nbytes(head.weight)
    return int(share * (copy + nbytes(head.bound, head.id_map))) + nbytes(head.down)


def _select_floor(hidden: torch.Tensor, *rest: Any) -> int:
    head, k = HeadArgs(*rest[:_HEAD]), rest[_HEAD]
    return nbytes(hidden) + _screen_bytes(head) + hidden.shape[0] * (8 * k + 4)


def _screen_floor(hidden: torch.Tensor, *rest: Any) -> int:
    head = HeadArgs(*rest[:_HEAD])
    return nbytes(hidden) + _screen_bytes(head) + hidden.shape[0] * (8 * head.capacity + 8)


def _screen_flops(hidden: torch.Tensor, *rest: Any) -> int:
    head = HeadArgs(*rest[:_HEAD])
    n, width = hidden.shape
    if head.down is not None:
        return 2 * n * head.down.shape[0] * (width + head.num_valid)
    return 2 * n * width * head.num_valid


SELECT = Spec(
    op="lm_head_select",
    cases=(
        Case("toy_fp32", "the decode loop's own head in fp32", _select_case(8, 260, 192, torch.float32)),
        Case("odd", "H over one lane block, V a multiple of nothing", _select_case(3, 517, 267, num_valid=513)),
        Case("dense_fp64", "the rows are their own screen", _select_case(2, 300, 33, torch.float64, "dense")),
        Case(
            "int4",
            "uncertified, answers from the shortlist",
            _select_case(2, 700, 96, format="int4_g32", fallback="none"),
        ),
        Case("low_rank", "uncertified, decided by the scan", _select_case(2, 300, 64, format="low_rank", rank=9)),
        Case(
            "low_rank_int8",
            "answers from the shortlist of int8 factors",
            _select_case(2, 700, 64, format="low_rank", rank=9, up_format="int8", fallback="none"),
        ),
        Case("deflated", "strong directions apart from the rest", _select_case(3, 300, 64, format="deflated", rank=9)),
        Case(
            "top16",
            "candidates of a path selector, padded groups, mapped ids, logits compared in bf16",
            _select_case(4, 700, 100, format="int6_g64", k=16, logit_dtype="bfloat16", mapped=True),
        ),
        Case("shard", "last shard, fewer real rows than k", _select_case(2, 64, 48, k=4, num_valid=3, id_offset=936)),
        Case("empty", "no live request", _select_case(0, 64, 48)),
    ),
    floor_bytes=_select_floor,
    flops=_screen_flops,
    exact=True,
)

SCREEN = Spec(
    op="lm_head_screen",
    cases=(
        Case("int8", "the default format", _screen_case(5, 517, 267, "int8", num_valid=513, id_offset=64)),
        Case("low_rank", "shortlist of a low-rank head", _screen_case(2, 300, 64, "low_rank", rank=9, capacity=24)),
        Case("narrow", "more survivors than the list holds", _screen_case(2, 300, 64, "int8", capacity=1, mapped=True)),
        Case("empty", "no live request", _screen_case(0, 64, 48, "int8")),
    ),
    floor_bytes=_screen_floor,
    flops=_screen_flops,
    exact=False,
)

RESCORE = Spec(
    op="lm_head_rescore",
    cases=(
        Case(
            "list",
            "ids of other ranks, padding rows and counts out of range among them",
            _rescore_case(5, 96, 300, 24, 1, torch.int64),
        ),
        Case("top4_int32", "int32 ids, k above some counts", _rescore_case(3, 96, 64, 8, 4, torch.int32)),
        Case("empty", "no live request", _rescore_case(0, 16, 64, 8, 1, torch.int64)),
    ),
    floor_bytes=lambda hidden, weight, ids, count, k, *_: (
        nbytes(hidden, ids, count) + ids.numel() * hidden.shape[1] * weight.element_size() + hidden.shape[0] * 8 * k
    ),
    flops=lambda hidden, weight, ids, *_: 2 * ids.numel() * hidden.shape[1],
    exact=True,
)

SPECS = (SELECT, SCREEN, RESCORE)

_VOCABULARY, _ROWS = 248_320, 512
# one per state, or not the head's: these do not grow with the vocabulary
_PER_STATE = ("hidden", "digits", "states", "sums", "step", "length", "best", "key", "status", "down", "state", "lists")


def _columns(head: HeadArgs, hidden: torch.Tensor) -> tuple[int, int]:
    """Columns that codes are multiplied with, padded, and the int32 correction sums of each state."""
    columns = hidden.shape[1] if head.up is None else head.up.shape[1]
    padded = -(-columns // 128) * 128
    return padded, 3 * padded // {"int6_g64": 64, "int4_g32": 32}.get(head.format, 3 * padded + 1)


def _prepared(head: HeadArgs, hidden: torch.Tensor) -> int:
    """Digits, sums, step and length, which one kernel writes and the next reads."""
    padded, sums = _columns(head, hidden)
    each = 4 * head.certified if head.format == "dense" else 3 * padded + 4 * sums + 4 + 4 * head.certified
    return int(hidden.shape[0] * each)


def _prepare_floor(hidden: torch.Tensor, *rest: Any) -> int:
    head, k = HeadArgs(*rest[:_HEAD]), rest[_HEAD]
    source = nbytes(hidden) if head.up is None else 4 * hidden.shape[0] * head.up.shape[1]
    return source + _prepared(head, hidden) + hidden.shape[0] * (12 + 4 * head.certified) * (k == 1)


def _project_floor(hidden: torch.Tensor, *rest: Any) -> int:
    head = HeadArgs(*rest[:_HEAD])
    assert head.down is not None
    return nbytes(hidden, head.down) + 4 * hidden.shape[0] * head.down.shape[0]


def _stream_floor(hidden: torch.Tensor, *rest: Any) -> int:
    head, k = HeadArgs(*rest[:_HEAD]), rest[_HEAD]
    rows = head.weight if head.format == "dense" else head.codes if head.up is None else head.up
    states = nbytes(hidden) if head.format == "dense" else 0
    values = 4 * (head.num_valid // (16 if head.certified else 4)) * (1 if not head.certified or k == 1 else 2)
    best = 8 if head.certified and k == 1 else 0  # an atomic reads and writes
    read = nbytes(rows, head.scale, head.bound) + states + _prepared(head, hidden)
    return read + hidden.shape[0] * (values + best)


def _stream(name: str, format: str, hidden: int, n: int = 8, k: int = 1, **options: Any) -> Traffic:
    """One route of `lm_head_select` over a 248,320-row head, scaled down to 512 rows."""
    uncertified: dict[str, Any] = {} if FORMATS[format].certified else {"fallback": "none", "capacity": 64}
    strided = _select_case(n, _ROWS, hidden, format=format, k=k, **uncertified, **options)

    def make(generator: torch.Generator) -> tuple[Any, ...]:
        states, *rest = strided(generator)
        return states.clone(memory_format=torch.contiguous_format), *rest

    kernels: dict[str, Any] = {
        "lm_head_prepare_kernel": _prepare_floor,
        "lm_head_screen_kernel": _stream_floor,
        "lm_head_finish_kernel": None,
    }
    kernels |= {"lm_head_project_kernel": _project_floor} if format == "low_rank" else {}
    kernels |= {"lm_head_merge_kernel": None} if k > 1 else {}
    case = Case(name, "the vocabulary of the 35B and 27B models, scaled down to 512 rows", make)
    return Traffic("lm_head_select", case, kernels, scale=_VOCABULARY / _ROWS, unscaled=_PER_STATE)


TRAFFIC = (
    *(_stream(f"{format}_2048_b8", format, 2048) for format in FORMATS if not FORMATS[format].factors),
    *(_stream(f"{format}_5120_b8", format, 5120) for format in ("dense", "int8", "int4_g32")),
    _stream("int8_2048_b1", "int8", 2048, n=1),
    _stream("int8_2048_k16", "int8", 2048, k=16),
    _stream("low_rank_256_b8", "low_rank", 2048, rank=256, up_format="int8"),
)
