"""Launch knobs of the round's bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

from dmtp_kernels.ops._variant import Variant


@dataclass(frozen=True)
class AdvanceConfig:
    """Knobs of the one launch."""

    lanes: int
    """The round's rows and the one before them."""
    grants: int
    """Grants of a request; 0: there are none."""
    block: int
    """Slots of the block; 0: there is none."""
    warps: int = 1
    """Not measured: a request has fewer lanes than a warp, and its work is a chain of loads."""


def advance_config(rows: int, grants: int, block_slots: int) -> AdvanceConfig:
    """The knobs for `rows` rows, `grants` grants and `block_slots` slots of a request."""
    return AdvanceConfig(_power(rows + 1), _power(grants), _power(block_slots))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


_NAMES = (
    "length_ptr length_stride anchor_ptr anchor_stride budget_ptr budget_stride finished_ptr finished_stride "
    "commit_ptr commit_stride bonus_ptr bonus_stride ended_ptr ended_stride table0_ptr stride0 width0 table1_ptr "
    "stride1 width1 table2_ptr stride2 width2 grants_ptr grants_stride grant_stride num_grants rows block_slots "
    "mask_id first_page positions_ptr positions_stride positions_step tokens_ptr tokens_stride tokens_step context_ptr "
    "context_stride history_ptr history_stride slots_ptr slots_stride slots_table slots_step previous_ptr "
    "previous_stride previous_step blocks_ptr blocks_stride blocks_step error_ptr error_stride"
)
_STATE = "length anchor budget finished commit bonus ended"


def _variant(
    name: str, *, tables: int, index: str, rows: int = 8, grants: int = 0, block_slots: int = 0, page_size: int = 16
) -> Variant:
    config = advance_config(rows, grants, block_slots)
    # a stride of 1 is compiled in
    ones = [f"{n}_stride" for n in (*_STATE.split(), "context", "history", "error")]
    ones += [f"{n}_step" for n in ("positions", "tokens", "slots", "previous", "blocks")]
    constants: dict[str, object] = dict.fromkeys(ones, 1)
    constants |= {f"table{t}_ptr": None for t in range(tables, 3)}
    constants |= {f"stride{t}": 1 for t in range(tables, 3)}
    if grants == 0:
        constants |= {"grants_ptr": None, "grants_stride": 1, "grant_stride": 1}
    outputs = ("positions", "tokens", "context", "history", "slots", "previous", "blocks")
    kinds = {f"{n}_ptr": "*i64" for n in outputs}
    kinds |= {"grants_ptr": "*i32", "error_ptr": "*i32", "finished_ptr": "*i32", "commit_ptr": "*i32"}
    kinds |= {"ended_ptr": "*i32", "table0_ptr": "*i32", "table1_ptr": "*i32", "table2_ptr": "*i32"}
    return Variant(
        name=f"advance_round_kernel/{name}",
        kernel="dmtp_kernels.ops.advance.kernels:advance_round_kernel",
        signature={
            n: kinds.get(n, f"*{index}" if n.endswith("_ptr") else "i32") for n in _NAMES.split() if n not in constants
        },
        constants=constants
        | {f"PAGE{t}": page_size if t < tables else 1 for t in range(3)}
        | {"TABLES": tables, "GRANTS": config.grants, "LANES": config.lanes, "SLOTS": config.block},
        num_warps=config.warps,
    )


def variants() -> tuple[Variant, ...]:
    """The loop's own launch, an engine's with one table and no grants, and one without any table."""
    return (
        _variant("round_i64", tables=3, index="i64", grants=24),
        _variant("round_block_i64", tables=3, index="i64", grants=6, block_slots=8),
        _variant("one_table_i32", tables=1, index="i32", page_size=64),
        _variant("two_tables_i64", tables=2, index="i64", page_size=48),
        _variant("no_table_i64", tables=0, index="i64"),
        _variant("one_row_i64", tables=1, index="i64", rows=1, page_size=1),
    )
