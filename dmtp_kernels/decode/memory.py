"""Whether an engine's caches fit into the memory that is free, before they are made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.stack import MAX_ROWS
from dmtp_kernels.models.checkpoint import Checkpoint

KEPT_FREE = 0.1
"""Share of the free memory that caches may not take: a round's own tensors need some."""
_MEMORY, _GROUPS, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cache_bytes(checkpoint: Checkpoint, method: Method, rows: int, max_tokens: int, page_size: int = 16) -> int:
    """Bytes of the caches of `Engine(checkpoint, method, max_batch=rows, max_tokens=max_tokens)`."""
    pages = 1 + rows * pages_for(max_tokens + MAX_ROWS, page_size)
    tails = rows * pages_for(1 + MAX_ROWS, page_size)
    target, drafter = checkpoint.target, checkpoint.drafters.get(method.drafter or "")
    parts = [(target.config.layer, target.config.num_layers * pages)]
    if drafter is not None:
        parts.append((drafter.config.layer, drafter.config.num_layers * pages))
    if method.uses_mtp and checkpoint.mtp is not None:
        parts.append((checkpoint.mtp.config.layer, checkpoint.mtp.config.num_layers * (pages + tails)))
    row = 2 * page_size * target.embed_tokens.weight.element_size()
    return sum(count * row * layer.num_kv_heads * layer.head_dim for layer, count in parts)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, by the memory controller's limit too; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [size for size in (_available(), *_left_in_groups()) if size is not None]
    return min(found, default=None)


def check_fits(
    option: str, rows: int, checkpoint: Checkpoint, methods: Iterable[Method], max_tokens: int, page_size: int = 16
) -> None:
    """See that engines of these methods, `rows` rows each, fit together.

    Raises:
        ValueError: their caches take more than is free less `KEPT_FREE`; names the option and what would fit.
    """
    chosen, device = list(methods), checkpoint.target.embed_tokens.weight.device
    free = free_bytes(device)
    wanted = sum(cache_bytes(checkpoint, method, rows, max_tokens, page_size) for method in chosen)
    if free is None or wanted <= (1 - KEPT_FREE) * free:
        return
    fit = int(rows * (1 - KEPT_FREE) * free / wanted)
    raise ValueError(
        f"{option}: is {rows}, whose caches of {max_tokens} tokens take {wanted / 1e9:.1f} GB; "
        f"{free / 1e9:.1f} GB are free, enough for {fit}"
    )


def _available() -> int | None:
    try:
        lines = _MEMORY.read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    except OSError:
        return None


def _left_in_groups() -> list[int]:
    """Limit less use of this process's control group and of those above it, by either version of the interface."""
    found: list[int] = []
    try:
        entries = [line.split(":", 2)[1:] for line in _GROUP.read_text().splitlines()]
    except OSError:
        return found
    for controllers, name in entries:
        if controllers == "":
            root, files = _GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / name.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(root):
                break
            try:
                most, used = (int((group / file).read_text()) for file in files)
            except (OSError, ValueError):
                continue  # the root has no such files; "max" is no limit
            found.append(most - used + _reclaimable(group))
    return found


def _reclaimable(group: Path) -> int:
    """Bytes of files in memory, which give way."""
    try:
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
