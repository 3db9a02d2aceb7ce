"""commit_round on up to three caches against one dictionary each, whatever hypothesis thinks of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmtp_kernels.ops.commit_kv import commit_round
from tests.ops.commit_kv_oracle import model, same
from tests.ops.conftest import INTERPRETED

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

KERNEL_OPS = ("commit_round",)
EXTREMES = [-(2**63), -(2**31), -1, 2**31 - 1, 2**63 - 1]
bounded = hypothesis.settings(
    max_examples=8 if INTERPRETED else 150,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@st.composite
def rounds(draw: Any) -> dict[str, Any]:
    """Caches of few slots, numbered alike, so that one number is in use in several of them."""
    batch, width, caches = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def numbers(element: Any, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor(draw(st.lists(element, min_size=size, max_size=size)), dtype=torch.int64).view(shape)

    sizes = [draw(st.integers(0, 8)) for _ in range(caches)]
    slots = [st.integers(-1, n) | st.sampled_from(EXTREMES) for n in sizes]
    call: dict[str, Any] = {
        "valid": numbers(st.integers(-1, width + 1) | st.sampled_from(EXTREMES), batch),
        "dst": [numbers(slot, batch, width) for slot in slots],
        "sizes": sizes,
        "layers": [draw(st.integers(1, 2)) for _ in range(caches)],
        "heads": [draw(st.integers(1, 2)) for _ in range(caches)],
        "paged": [draw(st.booleans()) for _ in range(caches)],
        "first_slot": [draw(st.integers(0, 3)) for _ in range(caches)],
        "tail": {},
        "live": numbers(st.integers(0, 1), batch).bool() if draw(st.booleans()) else None,
    }
    if draw(st.booleans()):
        call["tail"] = {"pending_slot": numbers(slots[-1], batch), "promote_dst": numbers(slots[-1], batch)}
    if draw(st.booleans()):
        call["tail"]["scratch_dst"] = numbers(slots[-1], batch, width)
    return call


@hypothesis.given(rounds())
@bounded
def test_any_round_equals_one_dictionary_a_cache(call: dict[str, Any]) -> None:
    valid, dst, layers = call["valid"], call["dst"], call["layers"]
    batch, width = dst[0].shape
    lists: list[list[torch.Tensor]] = [[], [], [], []]
    want, errors = [], [0] * batch
    live = None if call["live"] is None else call["live"].tolist()
    for c, count in enumerate(layers):
        tail = call["tail"] if c == len(layers) - 1 else {}
        given = {
            "pending": tail["pending_slot"].tolist() if "pending_slot" in tail else None,
            "promote": tail["promote_dst"].tolist() if "promote_dst" in tail else None,
            "scratch": tail.get("scratch_dst"),
        }
        for _ in range(count):
            for kind in range(2):
                shape = (call["heads"][c], 2 + c + kind)
                at = float(len(lists[0]) * 1000 + kind * 500)
                rows = at + torch.arange(batch * width * shape[0] * shape[1]).view(batch, width, *shape)
                cache = -1 - at - torch.arange(call["sizes"][c] * shape[0] * shape[1]).view(-1, *shape)
                after, found = model(
                    rows, cache, valid.tolist(), dst[c], live=live, first_slot=call["first_slot"][c], **given
                )
                want.append((2 + kind, len(lists[2 + kind]), after))
                lists[kind].append(rows)
                lists[2 + kind].append(cache.unsqueeze(1).clone() if call["paged"][c] else cache.clone())
                errors = [a | b for a, b in zip(errors, found, strict=True)]
    rows_k, rows_v, k_caches, v_caches = lists
    error = commit_round(
        rows_k,
        rows_v,
        k_caches,
        v_caches,
        valid,
        dst,
        layers=layers,
        first_slot=call["first_slot"],
        live=call["live"],
        **call["tail"],
    )
    assert error.tolist() == errors
    for kind, layer, after in want:
        assert same(lists[kind][layer].view(after.shape), after)
