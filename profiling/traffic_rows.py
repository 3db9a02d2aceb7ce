"""What `profiling.traffic` says of a kernel, and its model of DRAM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from profiling.table import table

SECTOR = 32
PROCESSORS = 132
"""Multiprocessors of an H100 or H200, which launches are planned for."""
CACHED = 16 << 20
"""Bytes up to which a tensor counts as held by the L2 cache."""
RULE = """\
floor: what must move, each byte once. moved: every access. bytes: the 32-byte sectors of a tensor of at most 16 MiB at
full size count once a launch (they stay in the L2 cache); of a larger one every access, and each sector at least once
a program."""


@dataclass(frozen=True)
class Row:
    """One kernel of one case. `floor` and `ratio` are None where the floor depends on data.

    `variant` names what `profiling.resources` compiled for launches of Triton; None and `differs` say that it did not.
    """

    op: str
    backend: str
    kernel: str
    case: str
    bytes: int
    floor: int | None
    ratio: float | None
    moved: int
    launches: int
    limit: float
    tensors: dict[str, int]
    variant: str | None
    differs: list[str]

    @property
    def within(self) -> bool:
        return self.ratio is None or self.ratio <= self.limit


def report(rows: Sequence[Row], as_json: bool) -> int:
    """Print the rows; 1 when one exceeds its limit."""
    if as_json:
        print(json.dumps([vars(row) for row in rows], indent=1))
    else:
        headers = ("op", "case", "kernel", "launches", "moved", "bytes", "floor", "ratio", "limit", "")
        print(
            table(
                headers,
                [
                    (
                        r.op,
                        r.case,
                        r.kernel,
                        r.launches,
                        r.moved,
                        r.bytes,
                        r.floor,
                        r.ratio,
                        r.limit,
                        "" if r.within else "EXCEEDED",
                    )
                    for r in rows
                ],
            )
        )
        print(RULE)
        for r in rows:
            if r.backend == "triton" and r.variant is None:
                remark = "; ".join(r.differs) or "no variant of this kernel"
                print(f"{r.case}, {r.kernel}: not as profiling.resources compiles it: {remark}")
    return 0 if all(row.within for row in rows) else 1
