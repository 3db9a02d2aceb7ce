"""Bytes that CUDA kernels move, counted where they run on fibers: `python -m profiling.traffic --backend cuda`.

tests/cuda_host compiles the very sources for the CPU and records each access to global memory that goes through
`load_global`, `store_global` or a copy to shared memory. Only ops whose kernels have no other are counted: those whose
`spec.py` gives `Traffic.cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dmtp_kernels import _library
from dmtp_kernels.ops import _workspace
from dmtp_kernels.ops._spec import Traffic
from dmtp_kernels.testing.watch import outside
from profiling.traffic_rows import CACHED, PROCESSORS, SECTOR, Row

Accesses = np.ndarray[Any, Any]
"""Rows of `address`, `bytes`, `block`, `launch`, `store`."""


def reached(accesses: Accesses, cached: bool) -> int:
    """Bytes of the DRAM model: of one launch, tensor and direction."""
    if not len(accesses):
        return 0
    block = np.zeros(len(accesses), np.int64) if cached else accesses["block"].astype(np.int64)
    address, size = accesses["address"].astype(np.int64), accesses["bytes"].astype(np.int64)
    first = int(address.min()) // SECTOR
    ends = np.concatenate([address, address + size - 1]) // SECTOR - first
    width = int(ends.max()) + 1
    touched = np.unique(np.tile(block, 2) * width + ends) // width
    sectors = SECTOR * np.bincount(touched, minlength=int(block.max()) + 1)
    asked = np.bincount(block, weights=size).astype(np.int64)
    return int((sectors if cached else np.maximum(sectors, asked)).sum())


def owners(accesses: Accesses, tensors: Mapping[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    """Of each access the number of the first tensor that holds it, -1 where none does."""
    found = np.full(len(accesses), -1)
    for size in np.unique(accesses["bytes"]):
        for number, tensor in enumerate(tensors.values()):
            left = np.flatnonzero((found < 0) & (accesses["bytes"] == size))
            found[left[~outside(accesses["address"][left], int(size), tensor)]] = number
    return found


def rows_of(
    traffic: Traffic, inputs: tuple[Any, ...], tensors: Mapping[str, torch.Tensor], accesses: Accesses
) -> list[Row]:
    """Count recorded accesses to the tensors of one call.

    Raises:
        ValueError: one is to none of them; a kernel recorded none.
    """
    assert traffic.cuda is not None
    owner = owners(accesses, tensors)
    if (owner < 0).any():
        raise ValueError(f"{traffic.op}, {traffic.case.name}: {(owner < 0).sum()} accesses to no tensor of the call")
    rows = []
    for launch, (kernel, floor_bytes) in enumerate(traffic.cuda.kernels.items()):
        own = accesses["launch"] == launch
        if not own.any():
            raise ValueError(f"{traffic.op}, {traffic.case.name}: {kernel} recorded no access")
        counts: dict[str, int] = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            cached = tensor.nbytes * (traffic.scale if name in traffic.cuda.scaled else 1) <= CACHED
            there = accesses[own & (owner == number)]
            if len(there):
                counts[name] = sum(reached(there[there["store"] == store], cached) for store in (0, 1))
        count = sum(counts.values())
        floor = None if floor_bytes is None else floor_bytes(*inputs)
        rows.append(
            Row(
                op=traffic.op,
                backend="cuda",
                kernel=kernel,
                case=traffic.case.name,
                bytes=count,
                floor=floor,
                ratio=None if floor is None else count / floor,
                moved=int(accesses["bytes"][own].sum(dtype=np.int64)),
                launches=1,
                limit=traffic.cuda.limit,
                tensors=counts,
                variant=None,
                differs=[],
            )
        )
    return rows


def measure(traffic: Traffic, run: Callable[..., Any]) -> list[Row]:
    """Count the CUDA kernels that `run(*inputs)` launches, on fibers, on the inputs of `traffic.case`.

    Raises:
        ValueError: the kernels are not those that `traffic.cuda` lists, or access what is no tensor of the call.
    """
    from tests.cuda_host import host

    if traffic.cuda is None:
        raise ValueError(f"{traffic.op}: has no CUDA kernels that record all their accesses")
    inputs = traffic.case.make(torch.Generator().manual_seed(7))
    _workspace._buffers.clear()
    with host.accepted(traffic.op), host.processors(PROCESSORS), host.recorded() as accesses:
        host.seed(0)
        outputs = run(*inputs)
        launches = host.launches()
    listed = list(traffic.cuda.kernels)
    if launches != len(listed):
        raise ValueError(f"{traffic.op}, {traffic.case.name}: {launches} launches, its Traffic lists {listed}")
    op = _library._OPS[traffic.op]
    arguments = op.functional._schema.arguments
    tensors = {a.name: v for a, v in zip(arguments, inputs, strict=True) if isinstance(v, torch.Tensor)}
    names = [a.name for a in op.out._schema.arguments[len(arguments) :]]
    tensors |= dict(zip(names, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    if traffic.cuda.scratch is not None:
        (buffer,) = _workspace._buffers.values()
        sizes = traffic.cuda.scratch(*inputs)
        tensors |= dict(zip(sizes, buffer[: sum(sizes.values())].split(list(sizes.values())), strict=True))
    return rows_of(traffic, inputs, tensors, accesses())
