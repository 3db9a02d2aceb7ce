"""Building an `LMHead` from the weights of a checkpoint."""

from __future__ import annotations

import torch

from dmtp_kernels.ops._checks import FLOAT_DTYPES, check_choice, check_instance, check_range, check_whole
from dmtp_kernels.ops.lm_head.bounds import row_bounds
from dmtp_kernels.ops.lm_head.factors import choose_factors, deflate
from dmtp_kernels.ops.lm_head.formats import FORMATS, quantize
from dmtp_kernels.ops.lm_head.head import ID_MAP_MODES, LMHead, check_weight

_SCALED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_FALLBACKS = ("full", "none")
_UP_FORMATS = ("same", "int8")


def pack_lm_head(
    weight: torch.Tensor,
    *,
    format: str = "int8",
    num_valid: int | None = None,
    id_offset: int = 0,
    id_map: torch.Tensor | None = None,
    id_map_mode: str = "none",
    vocab_size: int | None = None,
    calibration: torch.Tensor | None = None,
    factors: tuple[torch.Tensor, torch.Tensor] | None = None,
    rank: int | None = None,
    up_format: str = "same",
    capacity: int | None = None,
    fallback: str = "full",
    weight_scale: torch.Tensor | None = None,
) -> LMHead:
    """Build the screen of a head once, at load time.

    Args:
        weight: `[V, H]` rows of this rank, fp32/bf16/fp16/fp64, last dimension contiguous; borrowed. With
            `weight_scale` also float8 or int8 rows, which are dequantised to fp32 (a copy).
        format: `dense`, `int8` (one scale per row), `int8_g64`, `int6_g64`, `deflated`: certified, the answer is proved
            exact. `int4_g32`, `low_rank`: uncertified, see `fallback` and `lm_head_report`.
        num_valid: real rows; the rest is padding (default: all rows).
        id_offset: head id of row 0, the shard's first row.
        id_map: `[V]` int32/int64, one entry per row of `weight`; see `LMHead` for the two modes.
        id_map_mode: `none`, `offset` (token = head id + map) or `absolute` (token = map; negative: none).
        vocab_size: when given, every real row's token id must be below it.
        calibration: `[m, H]` hidden states that the head consumes, for `low_rank` and `deflated`: their r principal
            directions (not centred) become `down`, and `up = weight @ down.T`.
        factors: `(down [r, H], up [V, r])` of a trained low-rank head, instead of `calibration`
            (`models.factors` reads them from a file).
        rank: r for `calibration` (default H // 4, deflated H // 8).
        up_format: `same`, or `int8` to keep `up` of a low-rank head as int8 rows with one scale each.
        capacity: columns of a screen's list, and the length of an uncertified format's shortlist in rows (default 64
            for certified formats, 512 for the others, less on small heads).
        fallback: `full`: where nothing is proved, the dots of all rows decide (uncertified formats then always scan,
            and are exact). `none`: an uncertified format answers from its shortlist alone and says so in the status.
        weight_scale: `[V]` or `[V, 1]` scales of a float8 or int8 `weight`.

    Returns:
        `LMHead`. Packing the rows of a shard equals the same rows of packing all (for the same `calibration`).

    Raises:
        ValueError, TypeError: an argument is wrong or missing; `low_rank` from the weight alone is refused.
    """
    check_choice("format", format, tuple(FORMATS))
    check_choice("id_map_mode", id_map_mode, ID_MAP_MODES)
    check_choice("fallback", fallback, _FALLBACKS)
    fmt = FORMATS[format]
    if fmt.certified and fallback == "none":
        raise ValueError(f"fallback: is 'none', must be 'full' for the certified format {format!r}")
    check_choice("up_format", up_format, _UP_FORMATS)
    if not fmt.factors and not (calibration is None and rank is None):
        raise ValueError(f"calibration, rank: belong to formats 'low_rank' and 'deflated', format is {format!r}")
    if format != "low_rank" and not (factors is None and up_format == "same"):
        raise ValueError(f"factors, up_format: belong to format 'low_rank', format is {format!r}")
    for name, tensor in (("weight", weight), ("weight_scale", weight_scale), ("id_map", id_map)):
        if tensor is not None:
            check_instance(name, tensor, torch.Tensor)
    for name, number in (("num_valid", num_valid), ("id_offset", id_offset), ("capacity", capacity), ("rank", rank)):
        if number is not None:
            check_whole(name, number)
    if factors is not None and len(factors) != 2:
        raise ValueError(f"factors: has {len(factors)} entries, must be (down, up)")
    if weight_scale is None:
        check_weight(weight)
    if weight.dim() != 2:
        raise ValueError(f"weight: has {weight.dim()} dimensions {tuple(weight.shape)}, must be [V, H]")
    if weight_scale is not None:
        weight = _scaled_rows(weight, weight_scale)
    if weight.shape[1] == 0:
        raise ValueError(f"weight: is {tuple(weight.shape)}, must have at least one column")
    rows = weight.shape[0]
    num_valid = rows if num_valid is None else num_valid
    check_range("num_valid", num_valid, 0, rows)
    if id_map is not None:
        _check_map(id_map, id_map_mode, rows, num_valid, id_offset, vocab_size)
    elif vocab_size is not None and id_offset + num_valid > vocab_size:
        raise ValueError(
            f"num_valid: rows reach token id {id_offset + num_valid - 1}, must stay below vocab_size {vocab_size}"
        )

    weight = weight.detach()
    codes: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    bound: torch.Tensor | None = None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    if format == "deflated":
        codes, scale, bound, down, up = deflate(weight, calibration, rank)
    elif format == "low_rank":
        down, up = choose_factors(weight, calibration, factors, rank)
        if up_format == "int8":
            up, scale = quantize(up, "int8")
    else:
        screen = quantize(weight, format) if fmt.bits else None
        codes, scale = screen or (None, None)
        bound = row_bounds(weight, screen, format) if fmt.certified else None
    if capacity is None:
        capacity = min(64, max(16, rows // 32)) if fmt.certified else min(512, max(16, rows))
    return LMHead(
        weight=weight,
        format=format,
        num_valid=num_valid,
        capacity=capacity,
        codes=codes,
        scale=scale,
        bound=bound,
        down=down,
        up=up,
        id_map=id_map,
        id_offset=id_offset,
        id_map_mode=id_map_mode,
        full_scan=fallback == "full",
    )


def _scaled_rows(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if weight.dtype not in _SCALED_DTYPES:
        names = ", ".join(str(d) for d in _SCALED_DTYPES)
        raise TypeError(f"weight_scale: is given for weight dtype {weight.dtype}, must be one of {names}")
    if scale.dtype not in FLOAT_DTYPES:
        raise TypeError(f"weight_scale: dtype is {scale.dtype}, must be floating point")
    rows = weight.shape[0]
    if tuple(scale.shape) not in ((rows,), (rows, 1)):
        raise ValueError(
            f"weight_scale: shape is {tuple(scale.shape)}, must be [{rows}] or [{rows}, 1], one scale per row"
        )
    return weight.to(torch.float32) * scale.to(torch.float32).reshape(rows, 1)


def _check_map(
    id_map: torch.Tensor, mode: str, rows: int, num_valid: int, id_offset: int, vocab_size: int | None
) -> None:
    if mode == "none":
        raise ValueError("id_map: is given with id_map_mode 'none', must be 'offset' or 'absolute'")
    if tuple(id_map.shape) != (rows,):
        raise ValueError(f"id_map: shape is {tuple(id_map.shape)}, must be [{rows}], one entry per row")
    tokens = id_map[:num_valid].to(torch.int64)
    if mode == "offset":
        tokens = tokens + torch.arange(id_offset, id_offset + num_valid, device=id_map.device)
        if num_valid and int(tokens.min()) < 0:
            raise ValueError(f"id_map: an offset gives token id {int(tokens.min())}, must be at least 0")
    limit = 2**31 - 1 if vocab_size is None else vocab_size
    if num_valid and int(tokens.max()) >= limit:
        raise ValueError(f"id_map: in mode {mode!r} gives token id {int(tokens.max())}, must be below {limit}")
