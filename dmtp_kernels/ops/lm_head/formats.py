"""Screen formats: how the cheap copy of a head is stored, read back, and how far it may be from the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CHUNK_ELEMENTS = 1 << 22
_UNIT = 2.0**-24


@dataclass(frozen=True)
class Format:
    """What a screen stores: `bound` when certified, `codes` and `scale` when `bits`, `down` and `up` when `factors`."""

    certified: bool
    bits: int = 0
    group: int = 0  # columns per scale, 0: one scale per row
    factors: bool = False


FORMATS = {
    "dense": Format(certified=True),
    "int8": Format(certified=True, bits=8),
    "int8_g64": Format(certified=True, bits=8, group=64),
    "int6_g64": Format(certified=True, bits=6, group=64),
    "int4_g32": Format(certified=False, bits=4, group=32),
    "low_rank": Format(certified=False, factors=True),
}


def codes_shape(name: str, rows: int, hidden: int) -> tuple[int, int]:
    """Shape of `codes`: int8 `[V, H]`, or bytes of packed codes with H padded to whole groups."""
    fmt = FORMATS[name]
    padded = -(-hidden // fmt.group) * fmt.group if fmt.group else hidden
    return (rows, hidden if fmt.bits == 8 else padded * fmt.bits // 8)


def scale_shape(name: str, rows: int, hidden: int) -> tuple[int, ...]:
    """Shape of `scale`: `[V]`, or `[V, groups]`."""
    group = FORMATS[name].group
    return (rows, -(-hidden // group)) if group else (rows,)


def quantize(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes and fp32 scales of `weight [V, H]`. A zero or non-finite row or group has scale 0, codes 0."""
    fmt = FORMATS[name]
    rows, hidden = weight.shape
    dtype = torch.int8 if fmt.bits == 8 else torch.uint8
    codes = torch.empty(codes_shape(name, rows, hidden), dtype=dtype, device=weight.device)
    scale = torch.empty(scale_shape(name, rows, hidden), dtype=torch.float32, device=weight.device)
    top = 2 ** (fmt.bits - 1) - 1
    for start, stop in row_chunks(rows, hidden):
        part = weight[start:stop].to(torch.float32)
        group = fmt.group or max(hidden, 1)
        part = torch.nn.functional.pad(part, (0, -hidden % group)).unflatten(1, (-1, group))  # [rows, groups, group]
        amax = part.abs().amax(dim=2)
        step = torch.where(amax.isfinite(), amax / top, 0.0)
        quotient = part / step[:, :, None]
        whole = torch.where(step[:, :, None] > 0, quotient, 0.0).round().clamp(-top, top).to(torch.int8).flatten(1)
        codes[start:stop] = whole[:, :hidden] if fmt.bits == 8 else _pack(whole, fmt.bits)
        scale[start:stop] = step if fmt.group else step[:, 0]
    return codes, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, name: str, hidden: int) -> torch.Tensor:
    """The screen rows `[rows, H]` fp32 that `codes` and `scale` stand for."""
    fmt = FORMATS[name]
    whole = codes if fmt.bits == 8 else _unpack(codes, fmt.bits)
    if not fmt.group:
        return whole.to(torch.float32) * scale[:, None]
    steps = scale.repeat_interleave(fmt.group, dim=1)[:, :hidden]
    return whole[:, :hidden].to(torch.float32) * steps


def row_bounds(weight: torch.Tensor, screen: tuple[torch.Tensor, torch.Tensor] | None, name: str) -> torch.Tensor:
    """`bound[V]` fp32 with `|canonical_dot(h, w_v) - screen score of v| <= bound[v] * ||h||`, rounded up.

    `||w_v - s_v||` bounds the exact difference (Cauchy-Schwarz); the rest covers the roundings of both dots for any
    summation order in fp32, of applying the scale, and of forming the interval. A row with a non-finite weight gets
    inf. `screen` is `(codes, scale)`, or None when the rows are their own screen.
    """
    rows, hidden = weight.shape
    terms = (2 * hidden + 64) * _UNIT
    gamma = terms / (1 - terms)
    bound = torch.empty(rows, dtype=torch.float32, device=weight.device)
    for start, stop in row_chunks(rows, hidden):
        exact = weight[start:stop].to(torch.float64)
        if screen is None:
            total = gamma * exact.norm(dim=1)
        else:
            copy = dequantize(screen[0][start:stop], screen[1][start:stop], name, hidden).to(torch.float64)
            away = (exact - copy).norm(dim=1)
            total = away + gamma * (copy.norm(dim=1) + away)
        total = torch.where(exact.isfinite().all(dim=1), total * (1 + 2.0**-18), torch.inf)
        up = total.to(torch.float32)
        bound[start:stop] = torch.nextafter(up, torch.full_like(up, torch.inf))
    return bound


def row_chunks(rows: int, hidden: int) -> list[tuple[int, int]]:
    """Row ranges of a head that keep scratch memory bounded."""
    step = max(1, _CHUNK_ELEMENTS // max(1, hidden))
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def _pack(whole: torch.Tensor, bits: int) -> torch.Tensor:
    # offset-binary codes, first code in the low bits: 4 bits -> 2 per byte, 6 bits -> 4 per 3 bytes
    unsigned = (whole.to(torch.int32) + (1 << (bits - 1))).unflatten(1, (-1, 2 if bits == 4 else 4))
    word = sum(unsigned[..., i] << (bits * i) for i in range(unsigned.shape[-1]))
    assert isinstance(word, torch.Tensor)
    per_word = bits * unsigned.shape[-1] // 8
    return torch.stack([(word >> (8 * i)) & 0xFF for i in range(per_word)], dim=-1).flatten(1).to(torch.uint8)


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    per_word, per_bytes = (1, 2) if bits == 4 else (3, 4)
    octets = codes.to(torch.int32).unflatten(1, (-1, per_word))
    word = sum(octets[..., i] << (8 * i) for i in range(per_word))
    assert isinstance(word, torch.Tensor)
    mask = (1 << bits) - 1
    unsigned = torch.stack([(word >> (bits * i)) & mask for i in range(per_bytes)], dim=-1)
    return (unsigned - (1 << (bits - 1))).flatten(1)
