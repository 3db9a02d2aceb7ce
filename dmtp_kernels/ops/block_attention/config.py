"""Launch knobs of the block attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmtp_kernels.ops._variant import Variant

LOG2E = 1.4426950408889634
MAX_DIM = 256
MAX_ROWS = 1 << 30
"""Rows of a page table from which 32-bit positions would not do."""


@dataclass(frozen=True)
class AttentionConfig:
    """Knobs of one launch. Only `split` may depend on the batch or the table's width: all others decide bits."""

    rows: int
    """Query rows (slot, head of the group) of one program."""
    keys: int
    """Context rows of one tile."""
    block_keys: int
    """Block rows of one tile."""
    fine: int
    """Context rows summed from nothing before they are merged."""
    coarse: int
    """Context rows merged in order, in one program or by the combine kernel, before these sums are."""
    warps: int
    stages: int
    combine_rows: int = 4
    """Query rows of one program of the combine kernel."""

    def split(self, batch: int, kv_heads: int, query_rows: int, span: int, processors: int, per_row: int) -> int:
        """Context rows of one program, `fine` or `coarse`: both give the same bits.

        Args:
            span: context rows that a request can see.
            processors: multiprocessors, 0 when interpreted.
            per_row: bytes of one partial sum of one query row.
        """
        programs = batch * kv_heads * -(-query_rows // self.rows)
        coarse = -(-span // self.coarse)
        # not measured: coarse partials are 3 % of the keys and values, so they are preferred where they fill the
        # device; a wide table may hold short histories, so no more than two chunks a request are counted on
        fills = programs * min(coarse, 2) >= processors * 3 // 4
        scratch = batch * kv_heads * query_rows * per_row * -(-span // self.fine)
        return self.coarse if fills or scratch > _MAX_SCRATCH else self.fine


_MAX_SCRATCH = 256 << 20
# not measured: 512 rows of K and V are 512 KiB at D = 256 bf16, some 15 us of one processor's share of 4.3 TB/s
_FINE = 512
_COARSE = 4096


def attention_config(
    query_rows: int, block_rows: int, dim: int, q_bytes: int, row_bytes: int, interpreted: bool
) -> AttentionConfig:
    """The knobs for S * group query rows, and K and V rows of `row_bytes` together."""
    if interpreted:
        return AttentionConfig(_power(query_rows), 512, _power(block_rows), 4096, 8192, 4, 1)
    wide = _power(dim)
    rows = min(_power(query_rows), 64 if wide > 128 or q_bytes > 2 else 128)
    keys, stages = (64, 2) if wide > 128 else (64, 3)
    if q_bytes > 2:
        keys, rows = 32, min(rows, 32)
    warps = 8 if rows * wide > 64 * 128 else 4
    # partials are written and read in fp32: about 3 % of the keys and values
    coarse = _power(-(-8 * query_rows * dim * 30 // row_bytes))
    return AttentionConfig(rows, keys, min(_power(block_rows), 64), _FINE, max(coarse, _COARSE), warps, stages)


def _power(size: int) -> int:
    """The next power of two that a matrix instruction takes."""
    return max(16, 1 << (size - 1).bit_length())


_POINTERS = {
    "q_ptr": "", "k_ptr": "", "v_ptr": "", "table_ptr": "*i32", "ctx_ptr": "*i32", "valid_ptr": "*i32",
    "length_ptr": "*i32", "block_k_ptr": "", "block_v_ptr": "", "k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32",
    "sink_ptr": "*fp32", "out_ptr": "", "lse_ptr": "*fp32", "acc_ptr": "*fp32", "total_ptr": "*fp32", "top_ptr": "*fp32",
}  # fmt: skip
_ATTEND = (
    "q_ptr q_b q_s q_h k_ptr k_page k_row k_h v_ptr v_page v_row v_h table_ptr table_b pages capacity ctx_ptr valid_ptr "
    "length_ptr block_k_ptr block_k_b block_k_row block_k_h block_v_ptr block_v_b block_v_row block_v_h k_scale_ptr "
    "k_scale_b k_scale_h v_scale_ptr v_scale_b v_scale_h sink_ptr out_ptr out_b out_s out_h out_d lse_ptr lse_b lse_s "
    "lse_h acc_ptr total_ptr top_ptr heads rows slots window splits chunk"
)
_COMBINE = (
    "acc_ptr total_ptr top_ptr capacity ctx_ptr valid_ptr length_ptr sink_ptr out_ptr out_b out_s out_h out_d lse_ptr "
    "lse_b lse_s lse_h heads rows slots window splits chunk"
)
_UNALIGNED = frozenset("pages capacity heads rows slots window splits chunk table_b".split())
_SCALES = "k_scale_ptr v_scale_ptr"
_PARTS = "acc_ptr total_ptr top_ptr"
_BLOCK = "block_k_ptr block_v_ptr"


def _variants(
    name: str,
    slots: int,
    group: int,
    dim: int,
    absent: str,
    *,
    dtype: str = "bf16",
    cache: str = "bf16",
    block_rows: int | None = None,
    page: int = 64,
    causal: bool = False,
    by_query: bool = False,
) -> tuple[Variant, ...]:
    """The launches of one shape; `absent` names the arguments that are None."""
    rows = slots if block_rows is None else block_rows
    sizes = {"bf16": 2, "fp16": 2, "fp32": 4}
    row_bytes = 2 * dim * sizes.get(cache, 1)
    config = attention_config(slots * group, rows, dim, sizes[dtype], row_bytes, False)
    missing = dict.fromkeys(absent.split())
    windowed = "window" not in missing
    types = _POINTERS | {"k_ptr": f"*{cache}", "v_ptr": f"*{cache}"}
    wide = 1 << (dim - 1).bit_length()
    common = {"GROUP": group, "D": dim, "DP": max(16, wide), "BY_QUERY": by_query, "WIDE": False}

    def variant(kernel: str, names: str, constants: dict[str, Any], warps: int, stages: int) -> Variant:
        fixed = {"out_d": 1, "lse_h": 1} | missing | constants | common
        if "k_scale_ptr" not in missing:
            fixed |= {}
        zero = [p.removesuffix("_ptr") for p in missing if p in (_BLOCK + " " + _SCALES).split()]
        signature = {n: types.get(n, "i32") or f"*{dtype}" for n in names.split() if n not in fixed}
        return Variant(
            name=f"{kernel}/{name}",
            kernel=f"dmtp_kernels.ops.block_attention.kernels:{kernel}",
            signature=signature,
            constants={n: v for n, v in fixed.items() if n in names.split() or n.isupper()},
            aligned=tuple(n for n in signature if n not in _UNALIGNED),
            num_warps=warps,
            num_stages=stages,
            options={"enable_fp_fusion": False},
            streams=tuple(n for n in ("k_ptr", "v_ptr") if n in signature),
        )

    attend = {
        "P": page, "M": config.rows, "N": config.keys, "NB": config.block_keys, "FINE": config.fine,
        "STAGES": config.stages, "ONE_PAGE": not windowed and page % config.keys == 0, "CAUSAL": causal,
        "SCALE": dim**-0.5 * LOG2E, "CAP": None,
    }  # fmt: skip
    return (variant("block_attention_kernel", _ATTEND, attend, config.warps, config.stages),)


def variants() -> tuple[Variant, ...]:
    """The shapes of the source's models (MTP: 16 query and 2 kv heads of 256; drafter: 32 and 4 or 8 of 128)."""
    plain = "valid_ptr length_ptr sink_ptr"
    return (
        *_variants("mtp", 8, 8, 256, f"{plain} {_SCALES} {_BLOCK} window", causal=True),
        *_variants("mtp_fp8", 8, 8, 256, f"{plain} {_BLOCK} window", causal=True, cache="fp8e4nv"),
        *_variants("drafter4", 8, 8, 128, f"{plain} {_SCALES} {_PARTS}", block_rows=8),
        *_variants("drafter8", 8, 4, 128, f"{plain} {_SCALES} {_PARTS}", block_rows=8, page=16),
        *_variants("drafter4_fp8", 8, 8, 128, f"{plain} {_PARTS}", block_rows=8, cache="fp8e4nv"),
        *_variants("drafter4_query", 8, 8, 128, f"{plain} {_SCALES} {_PARTS}", block_rows=8, by_query=True),
    )
