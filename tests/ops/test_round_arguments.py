"""Bad arguments of the round's ops are named: acceptance, sampling, the commit, the bookkeeping."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dmtp_kernels
from dmtp_kernels import _library
from dmtp_kernels.ops.accept import accept_block, accept_prefix, accept_rejection
from dmtp_kernels.ops.advance import advance_round
from dmtp_kernels.ops.commit_kv import commit_kv, commit_round
from dmtp_kernels.ops.sample import sample_rows

B, R, V = 2, 4, 10
IDS, COUNT, STOP, ONES = torch.ones(B, R).long(), torch.tensor([2, 3]), torch.tensor([5]), torch.ones(B)
LOGITS, Q = torch.zeros(B, R, V), torch.full((B, R - 1, V), 1 / V)
REQUEST = {"temperature": ONES, "seed": COUNT, "position": COUNT, "stop_ids": STOP, "budget": COUNT}
ROWS, CACHE, DST = torch.ones(B, R, 2, 8), torch.zeros(64, 2, 8), torch.arange(B * R).view(B, R)
TABLE = torch.zeros(B, 3, dtype=torch.int32)


def commit(**change: Any) -> torch.Tensor:
    call: dict[str, Any] = {"rows_k": [ROWS], "rows_v": [ROWS], "k_caches": [CACHE], "v_caches": [CACHE.clone()]}
    return commit_kv(**{**call, "valid": COUNT, "dst": DST, **change})


def advance(**change: Any) -> Any:
    names = ("length", "anchor", "budget", "finished", "commit_len", "bonus", "ended")
    call: dict[str, Any] = {name: COUNT.clone() for name in names}
    return advance_round(**{**call, "rows": R, "page_tables": [TABLE], "page_sizes": [16], **change})


def sampled(rule: Any = accept_rejection, **change: Any) -> Any:
    return rule(IDS, LOGITS, **{**REQUEST, "draft_probs": Q, **change})


def drawn(logits: torch.Tensor, **change: Any) -> Any:
    return sample_rows(logits, **{"temperature": ONES, "seed": COUNT, "position": COUNT, **change})


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "stop ids": (
        lambda: accept_prefix(IDS, IDS, stop_ids=None, budget=COUNT),  # type: ignore[arg-type]
        TypeError,
        "stop_ids: is None, must be a tensor (empty [0] for no stop ids)",
    ),
    "candidates": (
        lambda: accept_prefix(None, IDS, stop_ids=STOP, budget=COUNT),  # type: ignore[arg-type]
        TypeError,
        "candidates: is None, must be a tensor",
    ),
    "temperature": (lambda: sampled(temperature=None), TypeError, "temperature: is None, must be a tensor"),
    "q": (
        lambda: sampled(accept_block, draft_probs=None),
        TypeError,
        "draft_probs: is None, must be a tensor (what the candidates were drawn from",
    ),
    "shortlist": (
        lambda: sampled(draft_probs=Q[..., :4]),
        ValueError,
        "draft_probs: dimension 2 (V) is 4, must be 10 like target_logits, or pass draft_ids",
    ),
    "seed": (lambda: drawn(LOGITS[0, :2], seed=None), TypeError, "seed: is None, must be a tensor"),
    "logits of a round": (
        lambda: drawn(LOGITS),
        ValueError,
        "logits: has 3 dimensions (2, 4, 10), must be [n, V]; flatten [B, R, V] to [B*R, V] and repeat",
    ),
    "valid": (lambda: commit(valid=None), TypeError, "valid: is None, must be a tensor"),
    "dst": (lambda: commit(dst=DST[:, :3]), ValueError, "rows_k[0]: dimension 1 (R) is 4, must be 3 like dst"),
    "hidden": (
        lambda: commit(hidden=torch.ones(B, 3, 8), next_hidden=torch.ones(B, 8)),
        ValueError,
        "hidden: dimension 1 (R) is 3, must be 4 like dst",
    ),
    "one layer": (
        lambda: commit(k_caches=CACHE),
        TypeError,
        "k_caches: is one tensor, must be a list, one tensor per layer",
    ),
    "no rows": (lambda: commit(rows_v=None), TypeError, "rows_v: is None, must be a list"),
    "scale": (lambda: commit(v_scale="1"), TypeError, "v_scale[0]: is '1', must be a number"),
    "scale of a layer": (lambda: commit(k_scale=[None]), TypeError, "k_scale[0]: is None, must be a number"),
    "norm": (lambda: commit(k_norm=0.5), TypeError, "k_norm: is 0.5, must be a list, one tensor per layer"),
    "bonus": (lambda: advance(bonus=None), TypeError, "bonus: is None, must be a tensor"),
    "page size": (lambda: advance(page_sizes=16), TypeError, "page_sizes: is 16, must be a list, one whole number"),
    "page table": (lambda: advance(page_tables=TABLE), TypeError, "page_tables: is one tensor, must be a list"),
}


@pytest.mark.parametrize("name", CASES)
def test_named(name: str) -> None:
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize("op", _library.registered())
def test_every_form_of_every_op_names_a_required_tensor_that_is_none(op: str) -> None:
    functional = getattr(torch.ops.dmtp, op).default
    out = getattr(torch.ops.dmtp, f"{op}_out").default
    arguments = [a for a in functional._schema.arguments if not a.has_default_value()]
    # anything of the types in the schema: None is seen before shapes and dtypes
    some = {"Tensor": IDS, "List[Tensor]": [IDS], "int": 1, "float": 1.0, "bool": False, "str": "", "List[int]": [1]}
    tensors = [a.name for a in arguments if str(a.type) == "Tensor"]
    buffers = {a.name: IDS for a in out._schema.arguments[len(functional._schema.arguments) :]}
    for missing in tensors:
        values = [None if a.name == missing else some.get(str(a.type)) for a in arguments if not a.kwarg_only]
        named = {a.name: None if a.name == missing else some.get(str(a.type)) for a in arguments if a.kwarg_only}
        message = f"{missing}: is None, must be a tensor"
        for form, outputs in ((functional, {}), (out, buffers)):
            if all(not isinstance(v, (torch.Tensor, list)) for v in (*values, *outputs.values())):
                continue  # without a tensor nothing says which device's kernel to call
            with pytest.raises(TypeError, match=f"^{message}"):
                form(*values, **named, **outputs)
        assert str(dmtp_kernels.supports(op, *values, **named)).startswith(message)


def test_fakes_name_it_too() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        ids = mode.from_tensor(IDS)
        with pytest.raises(TypeError, match="stop_ids: is None"):
            torch.ops.dmtp.accept_prefix(ids, ids, None, ids[:, 0])


@pytest.mark.parametrize("scale", [0.5, [0.5], torch.tensor(0.5)], ids=str)
def test_scales_are_numbers_or_tensors(scale: Any) -> None:
    cache = CACHE.clone()
    assert commit(k_caches=[cache], k_scale=scale).tolist() == [0, 0]
    assert cache[:2].unique().tolist() == [2.0] and cache[8:].unique().tolist() == [0.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_slot": 1.5}, "first_slot: is 1.5, must be a whole number"),
        ({"first_slot": None}, "first_slot: is None, must be a whole number"),
        ({"first_slot": [0, True]}, "first_slot: is True, must be a whole number"),
        ({"valid": None, "k_scale": 1.0}, "valid: is None, must be a tensor"),
        ({"k_scale": 1e300}, "k_scale: is 1e+300, must be between"),
        ({"v_scale": [None, float("nan")]}, r"v_scale[1]: is nan, must be between"),
    ],
)
def test_commit_round_names_what_its_python_form_was_given(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "rows_k": [ROWS, ROWS],
        "rows_v": [ROWS, ROWS],
        "layers": [1, 1],
        "dst": [DST, DST],
        "valid": COUNT,
    }
    caches: dict[str, Any] = {"k_caches": [CACHE.clone(), CACHE.clone()], "v_caches": [CACHE.clone(), CACHE.clone()]}
    whole: Any = np.int64(0)
    assert commit_round(**call, **caches, first_slot=whole).tolist() == [0, 0]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        commit_round(**{**call, **caches, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_no_heads_have_no_scales_in_either_commit(dtype: torch.dtype) -> None:
    rows, none = torch.zeros(B, R, 0, 8), torch.zeros(0)
    k, v = ([torch.zeros(64, 0, 8).to(dtype)] for _ in range(2))
    assert commit_kv([rows], [rows], k, v, COUNT, DST, k_scale=[none], v_scale=[none]).tolist() == [0, 0]
    error = commit_round([rows], [rows], k, v, COUNT, [DST], layers=[1], k_scale=[none], v_scale=[none])
    assert error.tolist() == [0, 0]
