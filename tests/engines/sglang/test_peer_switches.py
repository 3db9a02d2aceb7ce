"""Each switch through SGLang's own hook registry: the same results as without it, and one line in the log."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dmtp_kernels.engines import sglang as plugin
from dmtp_kernels.engines.sglang import switches, tensors
from tests.engines import peers

MISSING = peers.missing("sglang", "tests/engines/sglang/requirements.txt")
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("mended")]

BLOCK = 8
WORKER = (peers.package("sglang") or Path()) / "srt/speculative/dflash_worker_v2.py"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's registry, empty before and after."""
    found = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    found.reset()
    yield found
    found.reset()


@pytest.fixture
def worker_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in the place of SGLang's worker, which needs a GPU to import, with the parts of it that do not."""
    module: Any = ModuleType("sglang.srt.speculative.dflash_worker_v2")
    locs = importlib.import_module("sglang.kernels.ops.speculative.cache_locs")
    module._DflashDraftSampler = peers.taken(WORKER, "_DflashDraftSampler")
    rebuild = peers.taken(
        WORKER,
        "DFlashWorkerV2._rebuild_compact_draft_cache",
        rebuild_compact_draft_req_to_token_func=locs.rebuild_compact_draft_req_to_token_func,
    )
    append = peers.taken(WORKER, "DFlashWorkerV2._append_target_hidden_fused")
    module.DFlashWorkerV2 = type(
        "DFlashWorkerV2", (), {"_rebuild_compact_draft_cache": rebuild, "_append_target_hidden_fused": append}
    )
    importlib.import_module("sglang.srt.speculative.spec_info")  # the plugin registers there; it does import
    package: Any = ModuleType("sglang.srt.speculative")
    package.dflash_worker_v2 = module
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative", package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def switch_on(registry: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setenv(switches.VARIABLE, ",".join(names))
    plugin.register()
    registry.apply_hooks()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == switches.logger.name]


@pytest.mark.parametrize("refused", [False, True])
def test_select(
    refused: bool, registry: Any, worker_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dtype = torch.float32 if refused else torch.bfloat16
    weight, hidden = (torch.randint(-2, 3, shape).to(dtype) for shape in ((90, 16), (3 * BLOCK, 16)))
    plain, hooked = (
        worker_module._DflashDraftSampler(weight=weight, block_size=BLOCK, num_org=80, org_vocab_start=0, max_bs=3)
        for _ in range(2)
    )
    plain(hidden)
    switch_on(registry, monkeypatch, "lm_head_select")
    for _ in range(2):
        hooked.out.fill_(-5)
        hooked(hidden, None)
        assert torch.equal(hooked.out, plain.out)
    (line,) = lines(caplog)
    assert line == (
        "dmtp: lm_head_select falls back to SGLang's own: logits are torch.float32, must be compared in bfloat16"
        if refused
        else "dmtp: lm_head_select runs in place of SGLang's own"
    )
    assert hasattr(hooked, "_dmtp_head") != refused


def test_accept(registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    module = importlib.import_module("sglang.kernels.ops.speculative.dflash")
    name = "_compute_dflash_accept_bonus_triton_unchecked"
    monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    candidates, target = torch.randint(2, (2, 5, BLOCK))

    def outputs() -> dict[str, torch.Tensor]:
        lens = torch.full((5,), -9, dtype=torch.int32)
        ids = torch.full((5,), -9)
        return {
            "accept_lens_out": lens,
            "commit_lens_out": lens.clone(),
            "bonus_ids_out": ids,
            "out_tokens_out": torch.full((5, BLOCK), -9),
            "new_seq_lens_out": ids.clone(),
        }

    given = {"candidates": candidates, "target_top1": target, "prefix_lens": torch.tensor([1, 5, 9, 1, 400])}
    theirs, ours = outputs(), outputs()
    getattr(module, name)(**given, **theirs)
    switch_on(registry, monkeypatch, "accept_prefix")
    getattr(module, name)(**given, **ours)
    live = torch.arange(BLOCK) < theirs["commit_lens_out"][:, None]
    theirs["out_tokens_out"] = torch.where(live, theirs["out_tokens_out"], -1)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
    assert lines(caplog) == ["dmtp: accept_prefix runs in place of SGLang's own"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_window(page_size: int, registry: Any, worker_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, pool = torch.tensor([70, 3, 16, 1]), torch.tensor([3, 1, 2, 0])
    table = torch.arange(4 * 96, dtype=torch.int32).view(4, 96)
    table[0] = 0
    compact = peers.taken(WORKER, "DFlashWorkerV2._compute_compact_draft_seq_lens")

    def worker() -> Any:
        made = worker_module.DFlashWorkerV2()
        made.draft_window_size, made.page_size, made.device = 16, page_size, torch.device("cpu")
        made._use_triton_compact_rebuild = True
        for name, rows in (("model_runner", table), ("draft_model_runner", torch.full((4, 40), 7, dtype=torch.int32))):
            setattr(made, name, SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=rows)))
        return made

    plain, hooked = worker(), worker()
    draft_lens = compact(plain, lens)
    given = {
        "req_pool_indices": pool,
        "prefix_lens": lens,
        "draft_prefix_lens": draft_lens,
        "verify_out_cache_loc_2d": tensors.block_slots(lens, pool, table, BLOCK),
        "bs": 4,
        "block_size": BLOCK,
    }
    plain._rebuild_compact_draft_cache(**given)
    switch_on(registry, monkeypatch, "draft_page_table")
    hooked._rebuild_compact_draft_cache(**given)
    rows = [made.draft_model_runner.req_to_token_pool.req_to_token[pool] for made in (plain, hooked)]
    read = torch.arange(40) < (draft_lens + BLOCK)[:, None]
    assert torch.equal(rows[0][read], rows[1][read])
    assert not rows[1][~read].eq(7).all()


@dataclass
class Pool:
    """As much of `MHATokenToKVPool` as a commit touches; `writes` counts its own, one a layer."""

    dtype: torch.dtype = torch.float32
    start_layer: int = 0
    writes: int = 0
    k_buffer: list[torch.Tensor] = field(default_factory=list)
    v_buffer: list[torch.Tensor] = field(default_factory=list)

    @property
    def store_dtype(self) -> torch.dtype:
        return torch.uint8 if self.dtype.itemsize == 1 else self.dtype

    def set_kv_buffer_prefix_valid(
        self, layer: Any, slots: torch.Tensor, commit_lens: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
    ) -> None:
        self.writes += 1
        live = (torch.arange(slots.shape[1]) < commit_lens[:, None]).flatten()
        for buffer, rows in ((self.k_buffer, k), (self.v_buffer, v)):
            buffer[layer.layer_id][slots.flatten()[live]] = rows[live].to(self.dtype)


@pytest.mark.parametrize("refused", [False, True])
def test_commit(
    refused: bool, registry: Any, worker_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    layers, shape = 3, (40, 2, 8)
    rows = torch.randn(layers, 2, 2 * BLOCK, *shape[1:])
    slots, commit_lens = torch.arange(1, 1 + 2 * BLOCK).view(2, BLOCK), torch.tensor([3, 8], dtype=torch.int32)

    def materialize(ctx_hidden: Any, positions: Any, write_layer_kv: Any) -> None:
        for layer, (k, v) in enumerate(rows):
            write_layer_kv(layer, k, v)

    def worker() -> Any:
        made = worker_module.DFlashWorkerV2()
        pool = Pool(torch.float8_e4m3fn if refused else torch.float32)
        for buffers in (pool.k_buffer, pool.v_buffer):
            buffers += [torch.zeros(shape).to(pool.dtype) for _ in range(layers)]
        made.draft_model_runner = SimpleNamespace(token_to_kv_pool=pool)
        parts = [SimpleNamespace(layer_id=i, k_scale=None, v_scale=None) for i in range(layers)]
        made.draft_model = SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=p)) for p in parts])
        made._fused_kv_helper = SimpleNamespace(materialize=materialize)
        return made

    plain, hooked = worker(), worker()
    given = {
        "ctx_hidden": torch.zeros(2 * BLOCK, 4),
        "ctx_positions": torch.zeros(2 * BLOCK, dtype=torch.int64),
        "ctx_cache_loc": slots.flatten(),
        "ctx_cache_loc_2d": slots,
        "commit_lens": commit_lens,
    }
    plain._append_target_hidden_fused(**given)
    switch_on(registry, monkeypatch, "commit_kv")
    hooked._append_target_hidden_fused(**given)
    ours, theirs = hooked.draft_model_runner.token_to_kv_pool, plain.draft_model_runner.token_to_kv_pool
    for mine, wanted in zip([*ours.k_buffer, *ours.v_buffer], [*theirs.k_buffer, *theirs.v_buffer], strict=True):
        assert torch.equal(mine.float(), wanted.float())
    assert theirs.writes == layers and ours.writes == (layers if refused else 0)
    (line,) = lines(caplog)
    assert ("the pool stores torch.float8_e4m3fn as torch.uint8" in line) == refused


def test_what_is_refused_at_once(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(switches.VARIABLE, raising=False)
    plugin.register()
    assert not registry._hooks
    monkeypatch.setenv(switches.VARIABLE, "commit_kv, nothing")
    with pytest.raises(ValueError, match="names nothing, must list some of lm_head_select, draft_page_table"):
        plugin.register()
    monkeypatch.setenv(switches.VARIABLE, "commit_kv")
    monkeypatch.setattr(plugin, "version", lambda name: "0.5.24")
    with pytest.raises(RuntimeError, match=r"SGLang is 0\.5\.24, the hooks are for 0\.5\.23; nothing is replaced"):
        plugin.register()
    assert not registry._hooks
