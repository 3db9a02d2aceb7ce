"""The rows that `commit_kv` writes for vLLM's own DFlash model, whose caches a CPU tiles, against vLLM's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (make test-engines)")


from dmtp_kernels.engines.vllm.dflash import cache_reason
from dmtp_kernels.engines.vllm.steps import commit_context
from dmtp_kernels.engines.vllm.switches import Switches
from tests.engines.vllm.harness import drafter_of, export, start

PAGES, PAGE_SIZE = 5, 16


@torch.inference_mode()
def test_rows_are_those_of_vllm(tmp_path: Path) -> None:
    target, drafter = export(tmp_path, "dflash")
    llm = start(target, {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 7})
    model = drafter_of(llm).model.model
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(23, 192, generator=generator)
    positions = torch.arange(40, 63)
    # padding, the null page and places out of order
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:23]
    slots[3], slots[9] = -1, 2
    written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> None:
        written.append((k.clone(), v.clone()))

    for attention in model._attn_layers:
        attention.impl.do_kv_cache_update = record
    model.precompute_and_store_context_kv(states, positions, slots)
    for attention in model._attn_layers:
        attention.kv_cache = torch.full((PAGES, 2, PAGE_SIZE, 64), torch.nan)
    assert commit_context(Switches(["commit_kv"]), model, states, positions, slots)
    live = slots >= PAGE_SIZE
    raw, _ = model._project_context_kv(states, 23, 2, 2, 32)
    for i, (attention, (k, v)) in enumerate(zip(model._attn_layers, written, strict=True)):
        layer = model.layers[i].self_attn
        if i > 0:
            # vLLM 0.32 norms the keys of all layers with the first one's weight on a CPU: the layer's own norm and RoPE
            k = layer.k_norm(raw[i].reshape(-1, 32).contiguous()).view(23, 64)
            k = layer.rotary_emb(positions, k.clone(), k)[1].view(23, 2, 32)
        rows = attention.kv_cache.transpose(1, 2).reshape(PAGES * PAGE_SIZE, 2, 64)
        torch.testing.assert_close(rows[slots[live]], torch.cat([k, v], dim=-1)[live], rtol=2e-6, atol=2e-6)
        others = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
        others[slots[live]] = False
        assert rows[others].isnan().all()
    assert cache_reason(model, "auto") == "CPU_ATTN lays its caches out in a way of its own"
    assert not commit_context(Switches([]), model, states, positions, slots)
