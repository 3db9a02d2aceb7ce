"""Screen formats: how the cheap copy of a head is stored and read back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dmtp_kernels.ops._pages import zeros

_CHUNK_ELEMENTS = 1 << 22
_TOP_MULTIPLIER = 127
_ROW_BYTES = 16


@dataclass(frozen=True)
class Format:
    """What a screen stores: `bound` when certified, `codes` and `scale` when `bits`, `down` and `up` when `factors`."""

    certified: bool
    bits: int = 0
    group: int = 0  # columns per scale, 0: one scale per row
    factors: bool = False
    pad: int = 1  # columns are padded with zero codes to a multiple of this
    multipliers: bool = False  # the groups' scales are whole multiples of the row's, kept behind the codes


FORMATS = {
    "dense": Format(certified=True),
    "int8": Format(certified=True, bits=8),
    "int8_g64": Format(certified=True, bits=8, group=64),
    "int6_g64": Format(certified=True, bits=6, group=64, pad=128),
    "deflated": Format(certified=True, bits=6, group=64, pad=128, factors=True),
    "int4_g32": Format(certified=False, bits=4, group=32, pad=64, multipliers=True),
    "low_rank": Format(certified=False, factors=True),
}


def codes_shape(name: str, rows: int, hidden: int) -> tuple[int, int]:
    """Shape of `codes`: int8 `[V, H]`, or uint8 rows of packed codes (and group multipliers)."""
    fmt = FORMATS[name]
    if fmt.bits == 8:
        return rows, hidden
    columns = _padded(hidden, fmt.pad)
    row = columns * fmt.bits // 8 + (columns // fmt.group if fmt.multipliers else 0)
    return rows, _padded(row, _ROW_BYTES)


def scale_shape(name: str, rows: int, hidden: int) -> tuple[int, ...]:
    """Shape of `scale`: `[V]`, or `[V, groups]`."""
    fmt = FORMATS[name]
    return (rows, -(-hidden // fmt.group)) if fmt.group and not fmt.multipliers else (rows,)


def quantize(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes and fp32 scales of `weight [V, H]`. A zero or non-finite row or group has scale 0, codes 0."""
    fmt = FORMATS[name]
    rows, hidden = weight.shape
    dtype = torch.int8 if fmt.bits == 8 else torch.uint8
    codes = zeros(codes_shape(name, rows, hidden), dtype, weight.device)
    scale = torch.empty(scale_shape(name, rows, hidden), dtype=torch.float32, device=weight.device)
    top = 2 ** (fmt.bits - 1) - 1
    for start, stop in row_chunks(rows, hidden):
        part = weight[start:stop].to(torch.float32)
        group = fmt.group or max(hidden, 1)
        part = torch.nn.functional.pad(part, (0, -hidden % max(group, fmt.pad))).unflatten(1, (-1, group))
        amax = part.abs().amax(dim=2)  # [rows, groups]
        step = torch.where(amax.isfinite(), amax / top, 0.0)
        if fmt.multipliers:
            unit = step.amax(dim=1, keepdim=True) / _TOP_MULTIPLIER
            whole = torch.where(unit > 0, step / unit, 0.0)
            multiplier = whole.ceil().clamp(max=_TOP_MULTIPLIER)
            scale[start:stop] = unit[:, 0]
            step = unit * multiplier
        elif fmt.group:
            scale[start:stop] = step[:, : scale.shape[1]]
        else:
            scale[start:stop] = step[:, 0]
        quotient = torch.where(step[:, :, None] > 0, part / step[:, :, None], 0.0)
        flat = quotient.round().clamp(-top, top).to(torch.int8).flatten(1)
        if fmt.bits == 8:
            codes[start:stop] = flat[:, :hidden]
            continue
        packed = _pack(flat, fmt.bits)
        codes[start:stop, : packed.shape[1]] = packed
        if fmt.multipliers:
            codes[start:stop, packed.shape[1] : packed.shape[1] + multiplier.shape[1]] = multiplier.to(torch.uint8)
    return codes, scale


def whole_rows(codes: torch.Tensor, name: str, hidden: int) -> torch.Tensor:
    """The whole numbers `[rows, H]` int32 that a row scale multiplies (`int8`, `int4_g32`)."""
    fmt = FORMATS[name]
    if fmt.bits == 8:
        return codes.to(torch.int32)
    columns = _padded(hidden, fmt.pad)
    whole = _unpack(codes[:, : columns * fmt.bits // 8], fmt.bits)
    if fmt.multipliers:
        first = columns * fmt.bits // 8
        multiplier = codes[:, first : first + columns // fmt.group].to(torch.int32)
        whole = whole * multiplier.repeat_interleave(fmt.group, dim=1)
    return whole[:, :hidden]


def dequantize(codes: torch.Tensor, scale: torch.Tensor, name: str, hidden: int) -> torch.Tensor:
    """The screen rows `[rows, H]` fp32 that `codes` and `scale` stand for."""
    fmt = FORMATS[name]
    whole = whole_rows(codes, name, hidden).to(torch.float32)
    if scale.dim() == 1:
        return whole * scale[:, None]
    return whole * scale.repeat_interleave(fmt.group, dim=1)[:, :hidden]


def row_chunks(rows: int, hidden: int) -> list[tuple[int, int]]:
    """Row ranges of a head that keep scratch memory bounded."""
    step = max(1, _CHUNK_ELEMENTS // max(1, hidden))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pack(whole: torch.Tensor, bits: int) -> torch.Tensor:
    # offset binary; per 64 columns 32 bytes: column j in the low nibble of byte j, column 32 + j in the high one
    unsigned = whole.to(torch.int32) + (1 << (bits - 1))
    low, high = (unsigned & 15).unflatten(1, (-1, 2, 32)).unbind(2)
    nibbles = (low | (high << 4)).flatten(1)
    if bits == 4:
        return nibbles.to(torch.uint8)
    # the two high bits, per 128 columns 32 bytes: columns j, 32 + j, 64 + j, 96 + j in bit pairs 0..3 of byte j
    quarters = (unsigned >> 4).unflatten(1, (-1, 4, 32))
    planes = sum(quarters[:, :, t] << (2 * t) for t in range(4))
    assert isinstance(planes, torch.Tensor)
    return torch.cat((nibbles, planes.flatten(1)), dim=1).to(torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    octets = packed.to(torch.int32)
    columns = octets.shape[1] * 8 // bits
    nibbles = octets[:, : columns // 2].unflatten(1, (-1, 1, 32))
    unsigned = torch.cat((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    if bits == 6:
        planes = octets[:, columns // 2 :].unflatten(1, (-1, 1, 32))
        high = torch.cat([(planes >> (2 * t)) & 3 for t in range(4)], dim=2).flatten(1)
        unsigned = unsigned | (high << 4)
    return unsigned - (1 << (bits - 1))
