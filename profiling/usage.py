"""What one compiled kernel uses, and what of it is a fault."""

from __future__ import annotations

from dataclasses import dataclass

from profiling import machine_code

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one program can have."""
MIN_LOAD_BITS = 128


@dataclass(frozen=True)
class Usage:
    """One kernel on one architecture.

    `load_bits` is the narrowest width among the loads of the variant's streams that carries an eighth of their bytes,
    None where the variant names no stream; `loads` has the share of every width per stream.
    """

    kernel: str
    backend: str
    arch: int
    registers: int
    spills: int
    shared: int
    load_bits: int | None
    loads: dict[str, dict[int, float]]

    def faults(self) -> list[str]:
        """What a kernel of this library may not have."""
        found = []
        if self.spills:
            found.append(f"{self.spills} bytes spilled")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"more than {SHARED_LIMIT[self.arch]:,} bytes of shared memory")
        for name, shares in self.loads.items():
            bits = machine_code.narrowest(shares)
            if bits < MIN_LOAD_BITS:
                found.append(f"{name} is loaded {bits} bits at a time" if bits else f"no load of {name} found")
        return found
