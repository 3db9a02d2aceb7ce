"""Launch knobs of the block attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    combine_rows: int = 2
    """Query rows of one program of the combine kernel."""

    def split(
        self, batch: int, kv_heads: int, query_rows: int, ragged: int, span: int, processors: int, per_row: int
    ) -> int:
        """Context rows of one program, `fine` or `coarse`: both give the same bits.

        Args:
            ragged: context rows that only some queries see.
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
        # ragged rows are summed with the first `fine` rows, however many they are
        never = ragged > self.fine - self.keys
        return self.coarse if never or fills or scratch > _MAX_SCRATCH else self.fine


_MAX_SCRATCH = 256 << 20
# not measured: 512 rows of K and V are 512 KiB at D = 256 bf16, some 15 us of one processor's share of 4.3 TB/s
_FINE = 512
_COARSE = 4096


def attention_config(
    query_rows: int, block_rows: int, dim: int, q_bytes: int, row_bytes: int, by_query: bool, interpreted: bool
) -> AttentionConfig:
    """The knobs for S * group query rows, and K and V rows of `row_bytes` together."""
    if interpreted:
        return AttentionConfig(_power(query_rows), 512, _power(block_rows), 4096, 8192, 4, 1)
    wide = _power(dim)
    narrow = q_bytes > 2
    # two accumulators of a program must fit the registers
    rows = min(_power(query_rows), 32 if narrow else 64 if wide > 128 else 128)
    # wider tiles spilled: 24 to 92 bytes of fp32 or fp8 ones at D > 128, 260 of 128 query rows on sm_80, 248 where
    # masks differ by query on sm_100
    if narrow or wide > 128:
        converted = narrow or row_bytes < 2 * dim * q_bytes
        keys, stages = (16 if converted and wide > 128 else 32), 3
    else:
        keys, stages = (32, 4) if by_query or rows > 64 else (64, 3)
    warps = 8 if rows * wide >= 32 * 256 else 4
    # partials are written and read in fp32: about 3 % of the keys and values
    coarse = _power(-(-8 * query_rows * dim * 30 // row_bytes))
    return AttentionConfig(rows, keys, min(_power(block_rows), 64), _FINE, max(coarse, _COARSE), warps, stages)


def _power(size: int) -> int:
    """The next power of two that a matrix instruction takes."""
    return max(16, 1 << (size - 1).bit_length())


_TYPES = dict.fromkeys(("table_ptr", "ctx_ptr", "valid_ptr", "length_ptr"), "*i32")
_TYPES |= dict.fromkeys(
    ("k_scale_ptr", "v_scale_ptr", "sink_ptr", "lse_ptr", "acc_ptr", "total_ptr", "top_ptr"), "*fp32"
)
_OUTPUTS = "sink_ptr out_ptr out_b out_s out_h out_d lse_ptr lse_b lse_s lse_h"
_SIZES = "heads rows slots window splits chunk"
_ATTEND = (
    "q_ptr q_b q_s q_h k_ptr k_page k_row k_h v_ptr v_page v_row v_h table_ptr table_b pages capacity ctx_ptr "
    "valid_ptr length_ptr block_k_ptr block_k_b block_k_row block_k_h block_v_ptr block_v_b block_v_row block_v_h "
    f"k_scale_ptr k_scale_b k_scale_h v_scale_ptr v_scale_b v_scale_h {_OUTPUTS} acc_ptr total_ptr top_ptr {_SIZES}"
)
_COMBINE = f"acc_ptr total_ptr top_ptr capacity ctx_ptr valid_ptr length_ptr {_OUTPUTS} {_SIZES}"
_UNALIGNED = (
    f"{_SIZES} ctx_ptr valid_ptr length_ptr table_ptr table_b pages capacity total_ptr top_ptr lse_ptr lse_b lse_s "
    "k_scale_ptr k_scale_b k_scale_h v_scale_ptr v_scale_b v_scale_h sink_ptr"
).split()
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
    fp8: str | None = None,
    block_rows: int | None = None,
    page: int = 64,
    causal: bool = False,
    by_query: bool = False,
    cap: float | None = None,
) -> tuple[Variant, ...]:
    """The launches of one shape; `absent` names the arguments that are None."""
    rows = slots if block_rows is None else block_rows
    size = 4 if dtype == "fp32" else 2
    config = attention_config(slots * group, rows, dim, size, 2 * dim * (1 if fp8 else size), by_query, False)
    missing: dict[str, Any] = dict.fromkeys(absent.split())
    types = _TYPES | dict.fromkeys(("k_ptr", "v_ptr"), "*u8" if fp8 else f"*{dtype}")
    common = {
        "GROUP": group, "D": dim, "DP": max(16, 1 << (dim - 1).bit_length()), "BY_QUERY": by_query, "WIDE": False,
        "out_d": 1, "lse_h": 1,
    }  # fmt: skip

    def variant(step: str, names: str, missing: dict[str, Any], warps: int, stages: int, **constants: Any) -> Variant:
        fixed = {n: v for n, v in missing.items() if n in names.split()} | constants | common
        present = [n for n in names.split() if n not in fixed]
        return Variant(
            name=f"block_attention_{step}kernel/{name}",
            kernel=f"dmtp_kernels.ops.block_attention.kernels:block_attention_{step}kernel",
            signature={n: types.get(n, f"*{dtype}" if n.endswith("_ptr") else "i32") for n in present},
            constants=fixed,
            aligned=tuple(n for n in present if n not in _UNALIGNED),
            num_warps=warps,
            num_stages=stages,
            options={"enable_fp_fusion": False},
            # fp8 rows come 8 bytes at a time before sm_90
            streams=() if fp8 else tuple(n for n in (("acc_ptr",) if step else ("k_ptr", "v_ptr")) if n in present),
        )

    attend = variant(
        "", _ATTEND, missing, config.warps, config.stages, P=page, M=config.rows, N=config.keys, NB=config.block_keys,
        FINE=config.fine, STAGES=config.stages, ONE_PAGE="window" in missing and page % config.keys == 0,
        CAUSAL=causal, SCALE=dim**-0.5 * LOG2E if cap is None else dim**-0.5 / cap,
        CAP=None if cap is None else cap * LOG2E, FP8_K=fp8, FP8_V=fp8,
    )  # fmt: skip
    if _PARTS in absent:
        return (attend,)
    combine = [
        variant("combine_", _COMBINE, missing, 4, 3, R=config.combine_rows, PER=per, IN_CACHE="block_k_ptr" in missing)
        for per in (1, config.coarse // config.fine)
    ]
    combine[1] = replace(combine[1], name=f"{combine[1].name}_fine")
    return (attend, *combine)


def variants() -> tuple[Variant, ...]:
    """The shapes of the source's models (MTP: 16 query and 2 kv heads of 256; drafter: 32 and 4 or 8 of 128), then
    others' options, types, groups and head sizes."""
    plain = f"valid_ptr length_ptr sink_ptr {_SCALES}"
    scaled = "valid_ptr length_ptr sink_ptr"
    return (
        *_variants("mtp", 8, 8, 256, f"{plain} {_BLOCK} window", causal=True),
        *_variants("mtp_pending", 8, 8, 256, f"{plain} {_PARTS} window", causal=True, block_rows=9, page=16),
        *_variants("mtp_fp8", 8, 8, 256, f"{scaled} {_BLOCK} window", causal=True, fp8="e4m3"),
        *_variants("target", 8, 8, 256, f"{plain} window", causal=True, block_rows=8),
        *_variants("drafter4", 8, 8, 128, f"{plain} {_PARTS}", block_rows=8),
        *_variants("drafter8", 8, 4, 128, f"{plain} {_PARTS}", block_rows=8, page=16),
        *_variants("drafter4_fp8", 8, 8, 128, f"{scaled} {_PARTS}", block_rows=8, fp8="e4m3"),
        *_variants("drafter4_query", 8, 8, 128, f"{plain} {_PARTS}", block_rows=8, by_query=True),
        *_variants("drafter4_pages", 8, 8, 128, f"length_ptr sink_ptr {_SCALES} {_PARTS} window", block_rows=8),
        *_variants("options", 8, 8, 64, f"{_SCALES} {_PARTS}", block_rows=8, causal=True, page=16, cap=30.0),
        *_variants("e5m2", 8, 5, 192, f"{scaled} {_BLOCK} {_PARTS} window", causal=True, fp8="e5m2"),
        *_variants("group12", 8, 12, 128, f"{plain} {_BLOCK} {_PARTS} window", causal=True, dtype="fp16"),
        *_variants("group24", 8, 24, 96, f"{plain} {_BLOCK} {_PARTS} window", causal=True),
        *_variants("group3", 8, 3, 80, f"{plain} {_BLOCK} {_PARTS} window", causal=True, page=16),
        *_variants("fp32", 8, 6, 48, f"{plain} {_BLOCK} {_PARTS} window", causal=True, dtype="fp32"),
        *_variants("fp32_256", 8, 8, 256, f"{plain} {_BLOCK} {_PARTS} window", causal=True, dtype="fp32"),
    )
