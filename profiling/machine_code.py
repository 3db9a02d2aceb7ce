"""What compiled GPU code says about itself: registers and spills from ptxas, widths of global loads from PTX."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MINOR = 1 / 8
"""A width that carries a smaller part of a stream's bytes is not what the stream is read by."""

_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_PARAMETER = re.compile(r"_param_(\d+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"(\$?[\w$]+):")
_INSTRUCTION = re.compile(r"(?:@!?%?\w+\s+)?([a-z][\w.:]*)\s*(.*)")
_BRANCH = re.compile(r"(?:@!?%?\w+\s+)?bra(?:\.uni)?\s+(\$?[\w$]+)$")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_TYPE = re.compile(r"\.(?:v(\d))?\.?[busf](\d+)$")


@dataclass(frozen=True)
class Load:
    """One instruction that reads global memory: what parameters its address comes from, and bits per thread."""

    parameters: frozenset[int]
    bits: int
    looped: bool


def ptxas_usage(log: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of spill stores and loads, from what `ptxas -v` printed about one kernel."""
    registers, spills = _USED.search(log), _SPILLS.search(log)
    if registers is None or spills is None:
        raise ValueError(f"ptxas printed no resource usage:\n{log}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def global_loads(ptx: str) -> list[Load]:
    """Every global load of a kernel: `ld.global`, `cp.async` and bulk copies (which count as 128 bits)."""
    body = re.sub(r"//.*", "", ptx.partition("{")[2])
    # braces in front of a statement belong to a block of inline assembly
    lines = [statement.strip("{} \t") for line in body.splitlines() for statement in line.split(";")]
    looped = _in_loops(lines)
    code = [(m[1], m[2], looped[i]) for i, line in enumerate(lines) if (m := _INSTRUCTION.match(line))]
    tags: dict[str, frozenset[int]] = defaultdict(frozenset)
    # what passes through shared memory, and what tensor descriptors were made of, cannot be told apart
    shared: frozenset[int] = frozenset()
    changed = True
    while changed:
        before = (sum(map(len, tags.values())), len(shared))
        for opcode, operands, _ in code:
            if opcode.startswith(("st.shared", "stmatrix", "tensormap.replace")):
                shared |= _tags_of(operands, tags)
                continue
            if opcode.startswith(("ld.global", "st.", "cp.async", "red.", "bar", "bra", "mbarrier", "setp", "atom")):
                continue
            target, _, sources = operands.partition("}" if operands.startswith("{") else ",")
            found = shared if opcode.startswith("ld.shared") else _tags_of(sources, tags)
            for register in _REGISTER.findall(target):
                tags[register] |= found
        changed = before != (sum(map(len, tags.values())), len(shared))
    loads = []
    for opcode, operands, inside in code:
        addresses = _BRACKETS.findall(operands)
        if re.match(r"ld(\.[\w:]+)*\.global", opcode):
            width = _TYPE.search(opcode)
            if width is None:
                raise ValueError(f"no width in {opcode}")
            loads.append(Load(_tags_of(addresses[0], tags), int(width[1] or 1) * int(width[2]), inside))
        elif opcode.startswith("cp.async.bulk") and ".global" in opcode.partition("shared")[2]:
            loads.append(Load(_tags_of(addresses[1], tags) | (shared if ".tensor" in opcode else set()), 128, inside))
        elif opcode.startswith(("cp.async.cg.shared", "cp.async.ca.shared")):
            size = operands.rpartition("]")[2].split(",")[1]
            loads.append(Load(_tags_of(addresses[1], tags), 8 * int(size, 0), inside))
    return loads


def widths(loads: Iterable[Load], parameter: int) -> dict[int, float]:
    """Bits of a load -> its share of what a thread reads from one pointer parameter, in loops if it is read there."""
    own = [load for load in loads if parameter in load.parameters]
    own = [load for load in own if load.looped] or own
    total = sum(load.bits for load in own)
    count = Counter({bits: 0 for bits in sorted({load.bits for load in own})})
    for load in own:
        count[load.bits] += load.bits
    return {bits: n / total for bits, n in count.items()}


def narrowest(shares: Mapping[int, float]) -> int:
    """The narrowest width that carries at least an eighth of the bytes; 0 where nothing is read."""
    return min((bits for bits, share in shares.items() if share >= MINOR), default=0)


def _tags_of(text: str, tags: Mapping[str, frozenset[int]]) -> frozenset[int]:
    found = frozenset(int(n) for n in _PARAMETER.findall(text))
    return found.union(*(tags[r] for r in _REGISTER.findall(text)))


def _in_loops(lines: list[str]) -> list[bool]:
    labels = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    inside = [False] * len(lines)
    for i, line in enumerate(lines):
        branch = _BRANCH.match(line)
        if branch and (start := labels.get(branch[1], i)) < i:
            inside[start:i] = [True] * (i - start)
    return inside
