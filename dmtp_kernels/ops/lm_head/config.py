"""How the head's Triton kernels are launched. Nothing here was measured on a GPU: the reasons are bytes in flight.

An H200 moves about 4.3 TB/s through 132 multiprocessors, 33 bytes per ns each; at a loaded latency near 1 us that takes
some 32 KB in flight per multiprocessor, twice that to be safe. Copies go to shared memory asynchronously, STAGES - 1
tiles ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmtp_kernels.ops._variant import Variant

MAX_STATES, MAX_LISTED_STATES = 1024, 64
"""States of one launch: their values, one per group or one per row, are the bulk of the scratch memory."""
CERTIFIED_GROUP, SHORTLIST_GROUP = 16, 4
PADDING = 128
"""Digits are padded with zeros to a multiple of this many columns: every screen loop ends on it."""

POOL_VALUES = 4096
"""Values of which one program finds the n-th greatest in registers."""
MAX_POOL = 2 * POOL_VALUES
_LARGEST_SHARE = 1 << 13

OFFSETS = {"int6_g64": (64, -32), "int4_g32": (32, -8)}
"""Columns per correction sum, and its factor: packed codes are offset binary."""


@dataclass(frozen=True)
class ScreenConfig:
    """One program scores `block_v` rows for `block_n` states, `block_k` columns at a time."""

    block_v: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    registers: int | None = None
    """Most registers of a thread; left to itself the assembler keeps to fewer and spills some bytes."""


@dataclass(frozen=True)
class FinishConfig:
    """`splits` programs per state look at `block` groups at a time and score `rows` rows at a time."""

    rows: int
    block: int
    splits: int
    stages: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class PoolConfig:
    """`splits` programs per state reduce `share` values each to their greatest ones; 0: the values are the pool.

    `pool` is what is left, rounded up to a power of two; 1 would mean that the threshold itself is given.
    """

    splits: int
    share: int
    block: int
    pool: int
    warps: int


def screen_config(name: str, n: int, rows: int, size: int, element: int, processors: int) -> ScreenConfig:
    """Tiles of the screen of format `name` for n states and `rows` rows of `size` columns.

    `element` is the bytes of a dense row's element.

    `processors` is 0 where kernels are interpreted: a program costs the same whatever its tile.
    """
    states = next(s for s in (8, 16, 32, 64) if n <= s or s == 64)
    if processors == 0:
        return ScreenConfig(max(16, min(8192, _power(rows))), states, max(32, min(PADDING, _power(size))), 1, 4)
    if name in ("int8_g64", "int6_g64", "int4_g32"):
        # not measured. Two warps, so that a 32-column plane of the digits is at least 4 bytes a thread and is copied
        # asynchronously too, and so that sums of groups come from mma, not wgmma, whose results need a wait each:
        # 6 programs x 3 stages x 4 KB (int4) in flight. More states in tiles of 16, that share the rows through the L2
        # cache: the accumulators of 32 spill under triton 3.6
        return ScreenConfig(64, 8, 128, 4, 2) if states == 8 else ScreenConfig(128, 16, 128, 4, 4)
    if name == "dense":
        # not measured: 2 programs x 4 stages x 16 KB; fp32 products take no tensor cores, so smaller steps
        return ScreenConfig(
            64, states, 128 if element == 2 else 32, 5 if states < 64 else 4, 4, 168 if states < 64 else None
        )
    # not measured: 2 programs x 4 stages x 16 KB of codes. More states need taller tiles, or the digits, read once a
    # tile, would be the larger stream; above 32 two tiles of states share the rows through the L2 cache
    rows, block_k, stages, warps = {8: (128, 128, 5, 4), 16: (128, 128, 4, 4)}.get(states, (256, 64, 5, 8))
    # few steps (low rank): no buffers that stay empty
    stages = max(2, min(stages, -(-size // block_k) + 1))
    return ScreenConfig(rows, min(states, 32), block_k, stages, warps)


def factor_config(processors: int) -> ScreenConfig:
    """Tiles of the canonical screen of float factors: a row is one or two steps, so rows are what is in flight."""
    # not measured: 5 programs x 16 rows x 512 bytes, through the first-level cache, where the next state finds them
    return ScreenConfig(16 if processors else 512, 1, 256, 1, 4)


def finish_config(n: int, groups: int, group: int, processors: int, scan: bool = False) -> FinishConfig:
    """How survivors are shared out: enough programs to read all rows at full speed, should they all survive."""
    rows = 16
    if processors == 0:
        return FinishConfig(256, 4096, 1, 1, 4)
    # not measured: three programs a multiprocessor, 16 rows x 512 bytes x 3 stages in flight each. A block of 256
    # groups, as many as there are lanes, costs twice the registers, and so do large blocks of a scan
    splits = max(1, min(-(-3 * processors // max(n, 1)), -(-groups * group // (4 * rows))))
    return FinishConfig(rows, 128 if scan else 512, splits, 4, 4, 168)


def pool_config(groups: int, rank: int) -> PoolConfig:
    """How the rank-th greatest of `groups` values is found."""
    if groups <= POOL_VALUES:
        return PoolConfig(0, 0, 0, max(2, _power(groups)), 1)
    # not measured: about 8 values a thread, so that 32 counting steps are short; what is left fits in registers too
    splits = max(-(-groups // _LARGEST_SHARE), min(16, POOL_VALUES // rank))
    share = -(-groups // splits)
    block = _power(share)
    return PoolConfig(splits, share, block, max(2, _power(splits * rank)), max(1, min(16, block // 256)))


def list_block(rows: int, processors: int) -> tuple[int, int]:
    """`(rows a step, warps)` of the list: steps follow one another, so they are large."""
    if processors == 0:
        return min(1 << 16, _power(rows)), 4
    # not measured
    block = max(256, min(1 << 13, _power(rows)))
    return block, max(1, min(16, block // 512))


def prepare_block(columns: int) -> tuple[int, int]:
    """`(columns, warps)` of one state."""
    block = _power(columns)
    # not measured: one pass over the state, 8 to 32 elements a thread
    return block, max(1, min(16, block // 256))


def compiler_options(registers: int | None = None) -> dict[str, Any]:
    """Products and sums of the contract round separately."""
    return {"enable_fp_fusion": False} | ({} if registers is None else {"maxnreg": registers})


def merge_warps(block: int) -> int:
    """Warps of the last step of k > 1."""
    return max(1, min(8, block // 256))


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def variants() -> tuple[Variant, ...]:
    """Every kernel at the configurations of a 248,320-row head, whole or over four ranks, bf16 rows."""
    from dmtp_kernels.ops.lm_head.variants import listed

    return listed()
