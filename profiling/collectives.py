"""Collectives of a steady tensor-parallel round besides the models': counted in two processes over gloo.

Each stage runs on both ranks by the route of this library and as an engine writes it, on a small head cut in two; a
dispatch mode counts what reaches `c10d`. The tokens of both routes must agree.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from dmtp_kernels.decode.method import Method
from dmtp_kernels.ops.lm_head import key_token, lm_head_select, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep
from dmtp_kernels.ops.t1_prep.distributed import fused_t1_prep_sharded

WORLD = 2
_ROOT = Path(__file__).parents[1]
_SECONDS = 120
_V, _H, _BATCH, _SLOTS, _DRAFTED, _MASK = 64, 32, 2, 8, 6, 63


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


class _Rank:
    """One rank's half of a head and of a table; the table is also there whole, as `fused_t1_prep_sharded` likes it."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        weight, self.table = normal(_V, _H), normal(_V, _H)
        self.fusion = Fusion.residual(normal(_H, 2 * _H) * 0.1, norm_m=normal(_H), norm_e=normal(_H))
        self.anchors = torch.arange(_BATCH)
        self.hidden = {"t1": normal(_BATCH, _H), "draft_head": normal(_BATCH * _DRAFTED, _H)}
        self.hidden["target"] = normal(_BATCH * _SLOTS, _H)
        self.rows = slice(rank * _V // WORLD, (rank + 1) * _V // WORLD)
        self.weight = weight[self.rows]
        self.head = pack_lm_head(self.weight, id_offset=self.rows.start)

    def gathered(self, stage: str) -> torch.Tensor:
        """Logits of the whole vocabulary `[n, V]`: one all-gather."""
        return torch.cat(_all_gathered(self.hidden[stage] @ self.weight.T), dim=1)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table cut over the ranks: one all-reduce."""
        mine = (ids >= self.rows.start) & (ids < self.rows.stop)
        rows = self.table[ids] * mine[..., None]
        distributed.all_reduce(rows)
        return rows

    def block(self, t1: torch.Tensor) -> torch.Tensor:
        masks = t1.new_full((_BATCH, _SLOTS - 2), _MASK)
        return torch.cat((self.anchors[:, None], t1[:, None], masks), dim=1)


def _all_gathered(local: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(local) for _ in range(WORLD)]
    distributed.all_gather(parts, local)
    return parts


def _fused_t1(rank: _Rank) -> torch.Tensor:
    arguments = (rank.anchors, rank.hidden["t1"], rank.head, rank.table, rank.fusion)
    return fused_t1_prep_sharded(*arguments, mask_id=_MASK, anchors=2, num_masks=_SLOTS - 2)[0]


def _drawn_t1(rank: _Rank) -> torch.Tensor:
    """T1 drawn from logits, which the draw needs whole."""
    token = rank.gathered("t1").argmax(dim=1)
    arguments = (rank.anchors, rank.hidden["t1"], None, rank.table, rank.fusion)
    return fused_t1_prep(*arguments, mask_id=_MASK, anchors=2, num_masks=_SLOTS - 2, t1_override=token)[0]


def _eager_t1(rank: _Rank) -> torch.Tensor:
    token = rank.gathered("t1").argmax(dim=1)
    rank.embedded(rank.block(token))
    return token


def _fused_head(rank: _Rank) -> torch.Tensor:
    key, _ = lm_head_select(rank.hidden["draft_head"], rank.head)
    distributed.all_reduce(key, distributed.ReduceOp.MAX)
    return key_token(key)[:, 0]


def _eager_head(rank: _Rank) -> torch.Tensor:
    """The greatest logit and its id of every rank, each gathered, as SGLang's DFlash sampler does."""
    value, index = (rank.hidden["draft_head"] @ rank.weight.T).max(dim=1)
    values, ids = (torch.stack(_all_gathered(t)) for t in (value, index + rank.rows.start))
    return ids.gather(0, values.argmax(dim=0, keepdim=True))[0]


def _gathered(stage: str) -> Callable[[_Rank], torch.Tensor]:
    return lambda rank: rank.gathered(stage).argmax(dim=1)


Route = Callable[[_Rank], torch.Tensor]
GREEDY: dict[str, tuple[Route, Route]] = {
    "t1": (_fused_t1, _eager_t1),
    "draft_head": (_fused_head, _eager_head),
    "target": (_gathered("target"),) * 2,
}
"""Stage -> (this library's route, an engine's) where the draft is greedy; `target`: the target's tokens or logits."""
DRAWN: dict[str, tuple[Route, Route]] = {
    "t1": (_drawn_t1, _eager_t1),
    "draft_head": (_gathered("draft_head"),) * 2,
    "target": GREEDY["target"],
}
"""The same where candidates are drawn (rejection and block verification)."""


def of_method(method: Method, drawn: bool = False) -> dict[str, Any]:
    """`{"fused": n, "eager": n, "stages": {stage: {"fused": n, "eager": n}}}` of a round of `method`.

    Stages: `t1`, `draft_head` (the head over drafted rows, once a candidate in a chain) and `target` (the target's
    tokens or logits). `drawn`: candidates are drawn from probabilities, not greedy.

    Raises:
        RuntimeError: a process failed, or the ranks or routes disagree about a token or a count.
    """
    has_t1 = method.drafter is not None and method.first == "mtp"
    repeats = {"t1": int(has_t1), "draft_head": method.chain or int(method.drafter is not None), "target": 1}
    once = counted()["drawn" if drawn else "greedy"]
    stages = {
        name: {route: times * calls for route, calls in once[name].items()} for name, times in repeats.items() if times
    }
    return {**{route: sum(s[route] for s in stages.values()) for route in ("fused", "eager")}, "stages": stages}


@cache
def counted() -> dict[str, dict[str, dict[str, int]]]:
    """Calls of every stage by either route, where candidates are `greedy` and where they are `drawn`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "0"}
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "profiling.collectives", folder, str(rank)],
                cwd=_ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(WORLD)
        ]
        try:
            said = [child.communicate(timeout=_SECONDS)[0] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(child.returncode for child in children):
            raise RuntimeError(f"a rank failed: {said}")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return agreed(found)


def agreed(ranks: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, int]]]:
    """Calls alone, from `{kind: {stage: {route: [calls, tokens]}}}` of every rank.

    Raises:
        RuntimeError: ranks or routes disagree.
    """
    for kind, stages in ranks[0].items():
        for stage, routes in stages.items():
            if routes["fused"][1] != routes["eager"][1] or any(r[kind][stage] != routes for r in ranks):
                raise RuntimeError(f"ranks or routes disagree about {kind} {stage}: {[r[kind][stage] for r in ranks]}")
    return {
        kind: {stage: {route: calls for route, (calls, _) in routes.items()} for stage, routes in stages.items()}
        for kind, stages in ranks[0].items()
    }


def _run_rank(folder: Path, rank: int) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )
    this = _Rank(rank)
    found: dict[str, dict[str, dict[str, tuple[int, list[int]]]]] = {}
    for kind, stages in (("greedy", GREEDY), ("drawn", DRAWN)):
        found[kind] = {stage: {} for stage in stages}
        for stage, routes in stages.items():
            for name, route in zip(("fused", "eager"), routes, strict=True):
                with _Counted() as mode:
                    tokens = route(this)
                found[kind][stage][name] = mode.calls, tokens.tolist()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]))
