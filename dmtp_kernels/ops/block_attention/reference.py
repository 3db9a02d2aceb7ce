"""Block attention in eager PyTorch: the definition every kernel must match.

The context is read in tiles of CONTEXT_TILE rows, so memory does not grow with the history and a request's bits do not
depend on the table's width. Matrix products run one request at a time: their
shapes, hence the order of their sums, do not depend on the batch.
"""

from __future__ import annotations

import torch

CONTEXT_TILE = 256
BLOCK_TILE = 64
_NEG_INF = float("-inf")


@torch.no_grad()
def block_attention(
    q: torch.Tensor,  # [B, S, Hq, D]
    k_cache: torch.Tensor,  # [pages, P, Hkv, D]
    v_cache: torch.Tensor,  # [pages, P, Hkv, D]
    page_table: torch.Tensor,  # [B, MP]
    ctx_len: torch.Tensor,  # [B]
    block_k: torch.Tensor | None,  # [B, Sb, Hkv, D]
    block_v: torch.Tensor | None,  # [B, Sb, Hkv, D]
    block_len: torch.Tensor | None,  # [B]
    window: int | None,
    window_ref: str,
    block_causal: bool,
    valid_from: torch.Tensor | None,  # [B]
    scale: float | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sink: torch.Tensor | None,  # [Hq]
    out: torch.Tensor,  # [B, S, Hq, D] out
    lse: torch.Tensor,  # [B, S, Hq] out
) -> None:
    if q.numel() == 0:
        return
    batch, slots, _, dim = q.shape
    rows = slots if block_k is None else block_k.shape[1]
    cache = _PagedCache(k_cache, v_cache, page_table, k_scale, v_scale, lse.dtype)
    capacity = page_table.shape[1] * k_cache.shape[1] if k_cache.shape[0] > 0 else 0

    ctx = ctx_len.long()
    length = torch.full_like(ctx, rows) if block_len is None else block_len.long().clamp(0, rows)
    live = (ctx >= 0) & (ctx <= capacity - (length if block_k is None else 0))
    ctx, length = torch.where(live, ctx, 0), torch.where(live, length, 0)
    begin = torch.zeros_like(ctx) if valid_from is None else valid_from.long().clamp(min=0)

    # context rows every query sees, in [low, ctx)
    low, count = begin, capacity
    by_query = window is not None and window_ref == "query"
    if window is not None:
        # under the query rule the last query, at row `rows - 1`, sees the least context
        low = torch.maximum(begin, ctx - window + (rows if by_query else 0))
        count = min(capacity, window)
    attention = _Online(q, k_cache.shape[2], dim**-0.5 if scale is None else scale, soft_cap, lse.dtype)
    # with a window the tiles start at its first row, else at row 0: never at one that other requests decide
    base = torch.zeros_like(low) if window is None else low
    tile = CONTEXT_TILE if window is None else min(CONTEXT_TILE, -(-window // BLOCK_TILE) * BLOCK_TILE)
    for start in range(0, count, max(tile, 1)):
        position = base[:, None] + torch.arange(start, start + tile, device=q.device)  # [B, T]
        keys, values, mapped = cache.read(position, (position >= low[:, None]) & (position < ctx[:, None]))
        attention.add(keys, values, mapped[:, None, :])

    slot = torch.arange(slots, device=q.device) + (rows - slots)  # [S] block row of each query
    if by_query and window is not None and window > 0:
        # context rows that only the earlier queries still see
        for start in range(0, slots - 1, BLOCK_TILE):
            offset = torch.arange(start, min(start + BLOCK_TILE, slots - 1), device=q.device) + (rows - slots)
            position = ctx[:, None] + offset - (window - 1)  # [B, n]
            seen = (position >= begin[:, None]) & (position < ctx[:, None])
            keys, values, mapped = cache.read(position, seen)
            attention.add(keys, values, mapped[:, None, :] & (offset >= slot[:, None]), ragged=True)

    for start in range(0, rows, BLOCK_TILE):
        row = torch.arange(start, min(start + BLOCK_TILE, rows), device=q.device)
        seen = row < length[:, None]  # [B, n]
        if block_k is None or block_v is None:
            keys, values, seen = cache.read(ctx[:, None] + row, seen)
        else:
            keys, values = (_fresh(b[:, start : start + BLOCK_TILE], lse.dtype) for b in (block_k, block_v))
        mask = seen[:, None, :].expand(batch, slots, -1)
        if block_causal:
            mask = mask & (row <= slot[:, None])
        if by_query and window is not None:
            mask = mask & ((row - slot[:, None]).abs() < window)
        attention.add(keys, values, mask, ragged=block_causal or by_query)
    attention.finish(sink, out, lse)


class _PagedCache:
    """Reads table rows of both caches."""

    def __init__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.caches = ((k_cache, k_scale), (v_cache, v_scale))
        self.page_table = page_table
        self.dtype = dtype

    def read(
        self, position: torch.Tensor, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [B, n] x2 -> [B, n, Hkv, D] x2, [B, n]
        """Keys and values at `position`, and which of them are `seen` on a page that exists."""
        pages, page_size, heads, dim = self.caches[0][0].shape
        if pages == 0 or self.page_table.shape[1] == 0:
            nothing = torch.zeros((*position.shape, heads, dim), dtype=self.dtype, device=position.device)
            return nothing, nothing, torch.zeros_like(seen)
        position = position.clamp(0, self.page_table.shape[1] * page_size - 1)
        column = position // page_size
        page = self.page_table.gather(1, column).long()
        inside = page.clamp(0, pages - 1)
        offset = position - column * page_size
        keys, values = (self._dequantise(cache, inside, offset, factor) for cache, factor in self.caches)
        return keys, values, seen & (page == inside)

    def _dequantise(
        self, cache: torch.Tensor, page: torch.Tensor, offset: torch.Tensor, factor: torch.Tensor | None
    ) -> torch.Tensor:  # [B, n, Hkv, D]
        # gathers are not defined for fp8
        raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        page_size = raw.shape[1]
        if raw.stride(0) == page_size * raw.stride(1):
            # one flat row index is four times faster than two
            picked = raw.flatten(0, 1).index_select(0, (page * page_size + offset).flatten()).unflatten(0, page.shape)
        else:
            picked = raw[page, offset]
        rows = picked.view(cache.dtype).to(self.dtype).contiguous()
        if factor is None:
            return rows
        return rows * (factor if factor.dim() < 2 else factor[:, None])[..., None].to(self.dtype)


class _Online:
    """Softmax over key tiles with a running maximum that may stay -inf."""

    def __init__(
        self, q: torch.Tensor, kv_heads: int, scale: float, soft_cap: float | None, dtype: torch.dtype
    ) -> None:
        batch, slots, heads, dim = q.shape
        self.group, self.slots, self.soft_cap = heads // kv_heads, slots, soft_cap
        grouped = q.to(dtype).view(batch, slots, kv_heads, self.group, dim).permute(0, 2, 3, 1, 4)
        self.q = (grouped * scale).reshape(batch, kv_heads, self.group * slots, dim)
        self.top = self.q.new_full((batch, kv_heads, self.group, slots), _NEG_INF)
        self.seen = torch.zeros((batch, 1, 1, slots), dtype=torch.bool, device=q.device)
        self.denominator = torch.zeros_like(self.top)
        self.numerator = self.q.new_zeros((*self.top.shape, dim))

    def add(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, ragged: bool = False) -> None:
        """One tile: keys, values `[B, n, Hkv, D]`, mask `[B, S or 1, n]`; `ragged` when the queries' masks differ."""
        read = _bit_mask(mask.any(dim=1)[:, :, None, None], values.dtype)  # [B, n, 1, 1]
        keys, values = _keep(keys, read), _keep(values, read)
        taint = None
        if ragged:
            # 0 * NaN must not reach the queries that do not see the row
            bad = ~values.isfinite()
            taint = torch.bmm(mask.to(values.dtype), bad.to(values.dtype).flatten(2)) > 0  # [B, S, Hkv*D]
            values = values.masked_fill(bad, 0)
        scores = _bmm_by_request(self.q, keys.permute(0, 2, 3, 1))  # [B, Hkv, G*S, n]
        if self.soft_cap is not None:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        scores = scores.unflatten(2, (self.group, self.slots))
        seen = mask[:, None, None]  # [B, 1, 1, S or 1, n]
        self.seen |= mask.any(dim=2)[:, None, None]

        # never a sum with -inf: an infinite q times an unread row's zeros is NaN
        masked = scores.masked_fill(~seen, _NEG_INF)
        top = torch.maximum(self.top, masked.amax(dim=-1))  # [B, Hkv, G, S]
        shift = top.masked_fill(top == _NEG_INF, 0)
        # masked scores are finite here and cut after exp, whose CPU form is 30 times slower on -inf
        weights = _keep(scores.sub_(shift[..., None]).exp_(), _bit_mask(seen, scores.dtype))
        decay = torch.exp(self.top - shift)
        self.top = top
        self.denominator = self.denominator * decay + weights.sum(dim=-1)
        product = _bmm_by_request(weights.flatten(2, 3), values.transpose(1, 2)).view_as(self.numerator)
        self.numerator = self.numerator * decay[..., None] + product
        if taint is not None:
            spread = taint.unflatten(2, (values.shape[2], -1)).transpose(1, 2)[:, :, None]  # [B, Hkv, 1, S, D]
            self.numerator.masked_fill_(spread, float("nan"))

    def finish(self, sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write the outputs; a query that saw nothing gets 0 and -inf."""
        top, denominator, numerator = self.top, self.denominator, self.numerator
        if sink is not None:
            extra = sink.to(top.dtype).view(-1, self.group, 1)  # [Hkv, G, 1]
            top = torch.maximum(self.top, extra)
            shift = top.masked_fill(top == _NEG_INF, 0)
            decay = torch.exp(self.top - shift)
            denominator = denominator * decay + torch.exp(extra - shift)
            numerator = numerator * decay[..., None]
        empty = ~self.seen
        result = (numerator / denominator[..., None]).masked_fill(empty[..., None], 0)
        log = (top + denominator.log()).masked_fill(empty, _NEG_INF)
        out.copy_(result.permute(0, 3, 1, 2, 4).reshape(out.shape))
        lse.copy_(log.permute(0, 3, 1, 2).reshape(lse.shape))


def _bit_mask(keep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All ones where `keep`, else zero, in the integer as wide as `dtype`."""
    return -keep.to(torch.int64 if dtype == torch.float64 else torch.int32)


def _keep(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """`torch.where(keep, values, 0)` in place: the bit mask broadcasts 7 times faster, and NaN is cut all the same."""
    values.view(bits.dtype).bitwise_and_(bits)
    return values


def _fresh(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)


def _bmm_by_request(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[B, Hkv, M, K] @ [B, Hkv, K, N]`, one product call per request."""
    result = left.new_empty((*left.shape[:3], right.shape[3]))
    for a, b, c in zip(left.unbind(), right.unbind(), result.unbind(), strict=True):
        torch.bmm(a, b, out=c)
    return result
