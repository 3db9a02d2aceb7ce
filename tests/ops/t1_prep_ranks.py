"""Cases of T1 preparation over several ranks, and the process that runs them as one rank."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops import _workspace
from dmtp_kernels.ops.lm_head import LMHead, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion
from dmtp_kernels.ops.t1_prep.distributed import fused_t1_prep_sharded

V, E, H, B = 1000, 24, 40, 5
Outputs = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of the whole model; `shard(rank, world)` gives the head, and keyword arguments, of one rank."""

    anchor: torch.Tensor
    hidden: torch.Tensor
    head: LMHead
    table: torch.Tensor
    fusion: Fusion
    shard: Callable[[int, int], tuple[LMHead, dict[str, Any]]]
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"mask_id": 7})


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _fusion(dtype: torch.dtype) -> Fusion:
    return Fusion.residual(
        random(E, E + H, seed=2, dtype=dtype) * 0.1, norm_m=random(H, seed=3).to(dtype), norm_e=random(E, seed=4)
    )


def _cut(weight: torch.Tensor, rank: int, world: int, **options: Any) -> LMHead:
    """Rows `rank * size ..` of the head; padding rows and whole shards of padding come out of `num_valid`."""
    size = -(-weight.shape[0] // world)
    valid = options.pop("num_valid", weight.shape[0])
    part = weight[rank * size : (rank + 1) * size]
    return pack_lm_head(
        part, id_offset=rank * size, num_valid=max(0, min(part.shape[0], valid - rank * size)), **options
    )


def _rows(weight: torch.Tensor, hidden: torch.Tensor, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    return Case(
        torch.arange(hidden.shape[0]),
        hidden,
        pack_lm_head(weight, **options),
        random(V, E, seed=1, dtype=dtype),
        _fusion(dtype),
        lambda rank, world: (_cut(weight, rank, world, **options), {}),
    )


def _logits(*rows: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `[V, H]` and hidden `[n, H]` whose logits are the given ones, 0 elsewhere."""
    weight = torch.zeros(V, H)
    for i, row in enumerate(rows):
        for v, logit in row.items():
            weight[v, i] = logit
    return weight, torch.eye(H)[: len(rows)]


def cases() -> dict[str, Case]:
    """What may go wrong between ranks."""
    found: dict[str, Case] = {}
    for name, dtype in (("random", torch.float32), ("random bf16", torch.bfloat16)):
        found[name] = _rows(random(V, H, seed=5, dtype=dtype), random(B, H, seed=6, dtype=dtype), dtype)
    found["int4"] = _rows(random(V, H, seed=5), random(B, H, seed=6), format="int4_g32")
    ties = random(V, H, seed=5).round()
    found["ties"] = _rows(ties, random(B, H, seed=6).round())
    weight, hidden = _logits({511: 5.0, 512: 5.0}, {499: 2.0, 500: 2.0}, {249: -0.0, 250: 0.0}, {999: 1.0}, {0: 1.0})
    found["equal maxima on both sides of a cut"] = _rows(weight, hidden)
    # as a frequency-ranked draft vocabulary: token ids that are not rows
    weight = random(V, H, seed=8)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(9))
    mapped = dataclasses.replace(_rows(weight, random(B, H, seed=6)), head=_mapped(weight, order, 0, 1))
    found["mapped"] = dataclasses.replace(mapped, shard=lambda rank, world: (_mapped(weight, order, rank, world), {}))
    poisoned = random(V, H, seed=5)
    poisoned[: V // 2] = float("nan")
    poisoned[V // 2 + 3, 5] = float("nan")
    found["a rank of NaN rows"] = _rows(poisoned, random(B, H, seed=6))
    states = random(B, H, seed=6)
    states[1] = float("nan")
    states[3] = 0.0
    found["NaN and zero states"] = _rows(random(V, H, seed=5), states)
    negative = -random(V, H, seed=5).abs()
    found["shards of padding"] = _rows(negative, random(B, H, seed=6).abs(), num_valid=200)
    inert = _rows(random(V, H, seed=5), random(B, H, seed=6))
    found["inert rows"] = dataclasses.replace(inert, anchor=torch.tensor([3, -1, V, 0, -7]))
    found["no request"] = _rows(random(V, H, seed=5), random(0, H))
    found["large ids"] = _large_ids()
    found["an unproved rank"] = _unproved()
    found["table cut"] = _table_cut(False)
    found["table cut, reduced"] = _table_cut(True)
    found["states differ"] = _states_differ()
    return found


def _mapped(weight: torch.Tensor, order: torch.Tensor, rank: int, world: int) -> LMHead:
    size = V // world
    part = slice(rank * size, (rank + 1) * size)
    return pack_lm_head(weight[part], id_map=order[part], id_map_mode="absolute")


def _large_ids() -> Case:
    total, rows = 248_320, 64
    weight = -random(rows, H, seed=5).abs()
    weight[-1] *= -1
    hidden = random(B, H, seed=6).abs()
    hidden[1] *= -1

    def shard(rank: int, world: int) -> tuple[LMHead, dict[str, Any]]:
        size = rows // world
        return pack_lm_head(weight[rank * size : (rank + 1) * size], id_offset=total - rows + rank * size), {}

    head = pack_lm_head(weight, id_offset=total - rows)
    table = random(total, 4, seed=1)
    fusion = Fusion.residual(random(4, H, seed=2), norm_m=random(H, seed=3))
    return Case(torch.arange(B), hidden, head, table, fusion, shard, {"mask_id": total - 1})


def _unproved() -> Case:
    weight, hidden = random(V, H, seed=5), random(B, H, seed=6)

    def shard(rank: int, world: int) -> tuple[LMHead, dict[str, Any]]:
        if rank:
            return _cut(weight, rank, world), {}
        return _cut(weight, rank, world, format="int4_g32", fallback="none"), {}

    return dataclasses.replace(_rows(weight, hidden), shard=shard)


def _table_cut(reduce: bool) -> Case:
    weight, hidden = random(V, H, seed=5), random(B, H, seed=6)
    whole = _rows(weight, hidden)
    table = random(V, E, seed=1)
    table[:, 3] = -0.0
    table[V // 2] = float("nan")  # the row that ranks read which do not own T1
    table[(hidden @ weight.T)[2].argmax(), 0] = float("nan")  # the owner alone sees this
    fusion = dataclasses.replace(whole.fusion, weight=torch.zeros(E, E + H))

    def shard(rank: int, world: int) -> tuple[LMHead, dict[str, Any]]:
        size = V // world
        part = table[rank * size : (rank + 1) * size]
        options = {"embedding": part, "embedding_start": rank * size, "num_embeddings": V, "reduce_blocks": reduce}
        return _cut(weight, rank, world), options

    return dataclasses.replace(whole, table=table, fusion=fusion, shard=shard)


def _states_differ() -> Case:
    """Every rank has the whole head, and a state whose last bit is its own: alone they would take other tokens."""
    weight, hidden = _logits({3: 1.0, 4: 1.0})
    weight[4, 1] = 1.0

    def shard(rank: int, world: int) -> tuple[LMHead, dict[str, Any]]:
        own = hidden.clone()
        own[0, 1] = 2.0**-23 if rank == world - 1 else -(2.0**-23)
        return pack_lm_head(weight), {"h_mtp": own, "fusion_hidden": hidden}

    return dataclasses.replace(_rows(weight, hidden), shard=shard)


def forced(backend: str) -> Any:
    """The backend for T1 preparation and, where it has one, for the head."""
    cpu = torch.device("cpu")
    ops = [op for op in ("fused_t1_prep", "lm_head_select") if backends.unavailable(op, backend, cpu) is None]
    return use_backend(backend, *ops)


def call(case: Case, head: LMHead, **options: Any) -> Outputs:
    inputs = {"h_mtp": case.hidden, "embedding": case.table} | case.options | options
    return fused_t1_prep_sharded(case.anchor, inputs.pop("h_mtp"), head, inputs.pop("embedding"), case.fusion, **inputs)


def _spoil_scratch() -> None:
    """What an earlier call left in the words that travel, other bytes on every rank."""
    for owner, buffer in _workspace._buffers.items():
        if owner[0] == "t1_prep_words":
            buffer.random_()


def run_rank(rank: int, folder: str, names: list[str]) -> None:
    """All four ranks together, and each half of them, on every backend."""
    halves = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    groups = [(4, rank, distributed.group.WORLD), (2, rank % 2, halves[rank // 2])]
    results: dict[tuple[str, int, str], tuple[Outputs, int]] = {}
    for backend in names:
        with ExitStack() as stack:
            stack.enter_context(forced(backend))
            if backend == "triton":
                from dmtp_kernels.testing import interpreter, watch

                interpreter.install()
                stack.enter_context(watch.bounds_checked())
            for world, place, group in groups:
                for name, case in cases().items():
                    head, options = case.shard(place, world)
                    _spoil_scratch()
                    before = group._get_sequence_number_for_group()
                    outputs = call(case, head, group=group, **options)
                    results[backend, world, name] = outputs, group._get_sequence_number_for_group() - before
    torch.save(results, f"{folder}/{rank}.pt")
    # last: a rank that raises must not leave the others waiting for ever
    case = cases()["random"]
    try:
        call(case, case.shard(rank, 4)[0], mask_id=7 if rank else V)
    except (ValueError, RuntimeError) as error:
        torch.save(f"{type(error).__name__}: {error}", f"{folder}/{rank}.error")


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=4,
        timeout=datetime.timedelta(seconds=240),
    )
    run_rank(rank, folder, sys.argv[3:])
