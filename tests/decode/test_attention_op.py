"""Every attention of prefill and round is `block_attention`; the drafter's window is a `draft_page_table`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dmtp_kernels.decode import forward
from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.stack import Stack
from tests.decode.engine_cases import CHECKPOINT, REQUESTS, engine_of

# no attention without a softmax, and the models have no other use for one
_ATTENTION = ("attention", "softmax", "logsumexp")


class Traced(TorchDispatchMode):
    """Records the calls of `block_attention`; refuses attention by any other operation.

    What an op does inside itself does not pass here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []
        self.draft_tables: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.dmtp.block_attention.default:
            names = [a.name for a in func._schema.arguments]
            self.calls.append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        elif func is torch.ops.dmtp.draft_page_table.default:
            self.draft_tables.append(result[0])
        elif func.namespace != "dmtp":
            name = func._schema.name
            attends = name == "aten::exp" or any(word in name for word in _ATTENTION)
            assert not attends, f"{name} outside block_attention"
        return result

    def of(self, cache: Any) -> list[dict[str, Any]]:
        """Calls that read one of the three caches, layer by layer."""
        layers = {k.data_ptr(): layer for layer, k in enumerate(cache.k)}
        return [call | {"layer": layers[p]} for call in self.calls if (p := call["k_cache"].data_ptr()) in layers]


@torch.no_grad()
def traced_run(method: str) -> tuple[list[Traced], Stack]:
    """Two steps of an engine: the first one prefills, in chunks, and runs a round; the second one only runs a round."""
    engine = engine_of(method)
    for request in REQUESTS[:2]:
        engine.submit(request)
    traces = []
    for _ in range(2):
        with Traced() as trace:
            engine.step()
        traces.append(trace)
    return traces, engine.stack


def layers_of(calls: list[dict[str, Any]]) -> list[int]:
    return [call["layer"] for call in calls]


@pytest.mark.parametrize("name", METHODS)
def test_a_round_attends_through_the_op_alone(name: str) -> None:
    (_, last), stack = traced_run(name)
    target = last.of(stack.target_cache)
    assert layers_of(target) == list(range(len(stack.target_cache.k)))
    assert all(call["block_causal"] and call.get("window") is None for call in target)
    seen = len(target)
    if stack.mtp_cache is not None:
        # one advance, and one pass per later candidate of a chain
        passes = max(stack.method.chain, 1)
        mtp = last.of(stack.mtp_cache)
        assert layers_of(mtp) == list(range(len(stack.mtp_cache.k))) * passes
        assert all(call["block_causal"] and call.get("window") is None for call in mtp)
        seen += len(mtp)
    drafted = 0
    if stack.drafter_cache is not None:
        drafted = 1
        drafter = last.of(stack.drafter_cache)
        assert layers_of(drafter) == list(range(len(stack.drafter_cache.k)))
        (table,) = last.draft_tables
        assert all(call["page_table"].data_ptr() == table.data_ptr() for call in drafter)
        assert all(not call.get("block_causal") and call["valid_from"] is not None for call in drafter)
        seen += len(drafter)
    assert len(last.draft_tables) == drafted and len(last.calls) == seen


@pytest.mark.parametrize("name", ["dmtp", "mtp3", "autoregressive"])
def test_a_prefill_chunk_is_the_same_op(name: str) -> None:
    # requests of 3 and 30 tokens in chunks of 16: three chunks, then the first round
    (first, last), stack = traced_run(name)
    chunks = 3
    for cache in (stack.target_cache, stack.mtp_cache):
        if cache is not None:
            extra = len(first.of(cache)) - len(last.of(cache))
            assert extra == chunks * len(cache.k)
    lengths = [call["q"].shape[1] for call in first.of(stack.target_cache) if call["layer"] == 0][:chunks]
    assert lengths == [3, 16, 14]


def test_sdpa_in_a_model_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k_cache: Any, v_cache: Any, table: Any, ctx_len: Any, *, block_k: Any, **_: Any) -> Any:
        group = q.shape[2] // block_k.shape[2]
        k = block_k.repeat_interleave(group, dim=2).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, k).transpose(1, 2), None

    monkeypatch.setattr(forward, "block_attention", attend)
    with pytest.raises(AssertionError, match="outside block_attention"):
        traced_run("dmtp")


def test_the_checkpoint_has_a_window_to_express() -> None:
    assert all(drafter.config.window is not None for drafter in CHECKPOINT.drafters.values())
