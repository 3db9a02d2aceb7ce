"""Rounds of the worker of `DMTP` through SGLang's own `forward_batch_generation`.

That method, with the buffers, kernels and samplers it calls, is SGLang's; its runners are replaced by the embedded
models over SGLang's tables.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from array import array
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.engines.sglang import tensors
from dmtp_kernels.engines.sglang.worker import DMTPRounds
from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.formats import export_trio
from dmtp_kernels.ops.draft_pages import draft_page_table_from_slots
from dmtp_kernels.training.data import held_out_prompts
from tests.engines import peers
from tests.engines.sglang.test_algorithm import server
from tests.engines.sglang.test_contract import Pool, last_mtp_state

MISSING = peers.missing("sglang", "tests/engines/sglang/requirements.txt")
pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.usefixtures("mended")]

SOURCE = (peers.package("sglang") or Path()) / "srt"
WORKER = SOURCE / "speculative/dflash_worker_v2.py"
BLOCK, MAX_LEN, NEW, PAGE = 8, 256, 24, 4


def record(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


class DraftInput(SimpleNamespace):
    """As much of `DFlashDraftInputV2` as a round reads."""

    nxt_kv_lens_cpu = None
    max_top_k, uniform_top_k_value = 1, None


class VerifyInput(SimpleNamespace):
    """In place of `DFlashVerifyInput`, whose preparation plans attention on a GPU."""

    def prepare_for_verify(self, batch: Any, target_worker: Any, defer_metadata_init: bool) -> tuple[Any, bool]:
        return record(
            input_ids=self.draft_token,
            positions=self.positions,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
        ), False


class Plan:
    """In place of `KVLocPlan`, ids as they are."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def bind(self, *_: Any) -> None:
        """Nothing is translated."""

    def write_ids(self, _: Any) -> torch.Tensor:
        return self.slots


def sglang_worker() -> type:
    """`DFlashWorkerV2` out of SGLang's source."""
    ops = "sglang.kernels.ops.speculative"
    dflash, locs = (importlib.import_module(f"{ops}.{name}") for name in ("dflash", "cache_locs"))
    lens = lambda prefix, extend: torch.cat(  # noqa: E731
        [p + torch.arange(n) for p, n in zip(prefix.tolist(), extend.tolist(), strict=True)]
    )
    found: type = peers.taken(
        WORKER,
        "DFlashWorkerV2",
        BaseSpecWorker=object,
        DFlashDraftInputV2=DraftInput,
        DFlashVerifyInput=VerifyInput,
        ForwardBatch=record,
        ForwardMode=record(TARGET_VERIFY="verify"),
        CaptureHiddenMode=record(FULL="full", NULL="null"),
        SpeculativeAlgorithm=record(DFLASH="dflash"),
        SpecTpSyncSite=record(DFLASH_TARGET=0, DFLASH_ACCEPT_GREEDY=1),
        SpeculativeSamplingMaskCapture=record(from_logits=lambda *_, **__: None),
        GenerationBatchResult=record,
        SIMULATE_ACC_LEN=0,
        _is_npu=False,
        _is_all_greedy=peers.taken(WORKER, "_is_all_greedy"),
        _commit_accept=peers.taken(WORKER, "_commit_accept"),
        _resolve_dflash_embedding_module=peers.taken(WORKER, "_resolve_dflash_embedding_module"),
        _prepare_dflash_draft_block_unchecked=dflash._prepare_dflash_draft_block_unchecked,
        _compute_dflash_accept_bonus_triton_unchecked=dflash._compute_dflash_accept_bonus_triton_unchecked,
        assign_extend_cache_locs_func=locs.assign_extend_cache_locs_func,
        async_h2d=lambda values, dtype, device: torch.tensor(values, dtype=dtype, device=device),
        compute_position=lambda _, prefix, extend, __: (lens(prefix, extend), None),
        draft_tp_context=lambda _: nullcontext(),
        enable_num_token_non_padded=lambda: False,
        get_parallel=lambda: record(attn_dp_enabled=False, tp_rank=0),
        make_draft_input_v2=lambda **fields: DraftInput(**fields),
        unwrap_lora_layer=lambda module: module,
        logger=logging.getLogger("sglang"),
    )
    return found


class Machine:
    """SGLang's runners over the embedded models: the target's worker and runner, the drafter's runner."""

    def __init__(self, trio: Checkpoint, requests: int) -> None:
        self.trio, self.drafter = trio, trio.drafters["dmtp"]
        pages = MAX_LEN // PAGE
        order = 1 + torch.randperm(requests * pages, generator=torch.Generator().manual_seed(1))
        table = order.view(requests, pages, 1) * PAGE + torch.arange(PAGE)
        self.table = torch.cat([torch.zeros(1, MAX_LEN), table.flatten(1)]).int()
        slots = PAGE * (1 + requests * pages)
        self.target = Pool.create(trio.target.config, slots, PAGE)
        self.context = Pool.create(self.drafter.config, slots, PAGE)
        file = SOURCE / "layers/logits_processor.py"
        kept = ("_get_hidden_states_to_store", "_get_last_hidden_states_to_store")
        pack = importlib.import_module("sglang.srt.layers.aux_hidden_states").pack_aux_hidden_states
        methods = {name: peers.taken(file, f"LogitsProcessor.{name}", pack_aux_hidden_states=pack) for name in kept}
        self.processor: Any = type("LogitsProcessor", (), methods)()
        self.processor.keep_last_hidden_states = False
        self.processor.is_deferred_shard = lambda logits: False
        self.device = torch.device("cpu")
        self.model_runner = record(
            model=record(
                get_input_embeddings=lambda: trio.target.embed_tokens,
                lm_head=record(
                    weight=trio.target.lm_head.weight,
                    shard_indices=record(num_org_elements=trio.target.config.num_valid),
                ),
            ),
            req_to_token_pool=record(req_to_token=self.table),
            token_to_kv_pool=record(size=slots - PAGE, page_size=PAGE),
            kv_index_translator=record(plan=lambda write_virtual, **_: Plan(write_virtual)),
            prefill_attention_backend_str="fa3",
            device=self.device,
        )

    def rows(self, ids: torch.Tensor, lens: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> Any:
        """The target over `ids[bs, R]`, written to `slots[bs, R]`; SGLang's `LogitsProcessorOutput`."""
        pages = draft_page_table_from_slots(self.table, lens, window=MAX_LEN, page_size=PAGE, req_pool_indices=pool)
        positions = lens[:, None] + torch.arange(ids.shape[1])
        layers = self.drafter.config.target_layers
        out = self.trio.target(ids, positions, self.target.attend(pages, causal=True), layers)
        count = torch.full((len(ids),), ids.shape[1])
        self.target.commit(self.target.rows_k, self.target.rows_v, slots, count)
        hidden, aux = out.hidden.flatten(0, 1), list(out.features.flatten(0, 1).chunk(len(layers), dim=-1))
        mode = record(need_capture=lambda: True, is_full=lambda: True)
        metadata = record(capture_hidden_mode=mode)
        logits = self.trio.target.logits(hidden)
        logits[:, self.trio.target.config.num_valid :] = -torch.inf
        return record(
            next_token_logits=logits,
            hidden_states=self.processor._get_hidden_states_to_store(
                hidden, None, aux, None, None, None, None, metadata
            ),
            last_hidden_states=self.processor._get_last_hidden_states_to_store(hidden, aux, metadata),
        )

    def forward_batch_generation(self, batch: Any, forward_batch: Any = None, **_: Any) -> Any:
        """`TpModelWorker`'s: a verification, or a prefill of one request."""
        if forward_batch is not None:
            shape = (len(forward_batch.seq_lens), BLOCK)
            slots = forward_batch.out_cache_loc.view(shape)
            ids = forward_batch.input_ids.view(shape)
            out = self.rows(ids, forward_batch.seq_lens, forward_batch.req_pool_indices, slots)
            return record(
                logits_output=out, can_run_cuda_graph=False, routed_experts_output=None, indexer_topk_output=None
            )
        prefix = torch.tensor(batch.prefix_lens)
        out = self.rows(batch.input_ids[None], prefix, batch.req_pool_indices, batch.out_cache_loc[None])
        drawn = out.next_token_logits[-1:].argmax(dim=-1)
        return record(logits_output=out, next_token_ids=drawn, kv_loc_plan=Plan(batch.out_cache_loc))

    def draft(self, forward_batch: Any) -> Any:
        """The drafter's runner; with `sampler` as if its graph had been replayed."""
        shape = (len(forward_batch.seq_lens), BLOCK)
        window = self.drafter.config.window
        assert window is not None
        pages = tensors.window_table(
            self.table,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            window=window,
            page_size=PAGE,
            block_size=0,
        )
        embeds = forward_batch.input_embeds.view(*shape, -1)
        positions = forward_batch.positions.view(shape)
        hidden = self.drafter(embeds, positions, self.context.attend(pages, causal=False)).flatten(0, 1)
        if self.sampler is not None:
            self.sampler(hidden)
        return record(logits_output=record(hidden_states=hidden), can_run_graph=self.sampler is not None)

    sampler: Any = None


def make_worker(machine: Machine, source: Any, graph: bool) -> Any:
    head = machine.model_runner.model.lm_head

    class Peer(sglang_worker()):  # type: ignore[misc]
        """SGLang's worker without what its `__init__` loads."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            self._target_worker, self.model_runner = target_worker, target_worker.model_runner
            self.device, self.page_size, self.block_size = target_worker.device, PAGE, BLOCK
            self.draft_model_runner = record(forward=machine.draft, kv_index_translator=None)
            self.draft_model, self.draft_parallel_layout = record(), None
            self.selector = self.lilicorr = self._selector_sample = self._full_embed_gpu = None
            self._is_domino = self.use_compact_draft_cache = self._need_mamba_verify_commit = False
            self._use_triton_prepare_block = self._use_triton_accept_bonus = True
            self._tp_sync = record(sync=lambda *_: None)
            self._mask_token_id, self._noise_embed_scale = machine.drafter.config.mask_token_id, 1.0
            self._draft_block_ids_buf = self._accept_len_buf = None
            self._accept_bonus_buffer_cap = self._accept_bonus_buffer_slot = 0
            self._draft_block_spec_info = None
            self._target_logits_processor = machine.processor
            self._draft_sampler = machine.sampler

        @property
        def target_worker(self) -> Any:
            return self._target_worker

        def alloc_memory_pool(self) -> None:
            """The pools are there."""

        def _wait_for_fused_hicache_load(self, batch: Any) -> None:
            """None is under way."""

        def _append_target_hidden_to_draft_kv_by_loc(
            self, *, target_hidden: Any, cache_loc: Any, positions: Any, commit_lens: Any = None, **_: Any
        ) -> None:
            rows = (1, len(cache_loc)) if commit_lens is None else (len(commit_lens), BLOCK)
            count = torch.tensor([len(cache_loc)]) if commit_lens is None else commit_lens
            context = machine.drafter.context_keys_values(target_hidden.view(*rows, -1), positions.view(rows))
            machine.context.commit([k for k, _ in context], [v for _, v in context], cache_loc.view(rows), count)

    if graph:
        kind = peers.taken(WORKER, "_DflashDraftSampler")
        valid = head.shard_indices.num_org_elements
        machine.sampler = kind(weight=head.weight, block_size=BLOCK, num_org=valid, org_vocab_start=0, max_bs=4)
    worker = type("DMTPWorker", (DMTPRounds, Peer), {})(source, 0, 0, machine)
    worker.alloc_memory_pool()
    return worker


def batch_of(machine: Machine, **fields: Any) -> Any:
    mode = record(is_extend=lambda: "extend_lens" in fields, is_idle=lambda: False)
    plain: dict[str, Any] = {
        "forward_mode": mode,
        "is_extend_in_batch": False,
        "input_ids": None,
        "spec_info": None,
        "sampling_info": None,
        "has_grammar": False,
        "return_logprob": False,
        "can_run_decode_cuda_graph": False,
        "seq_lens_cpu": fields["seq_lens"].clone(),
        "seq_lens_sum": int(fields["seq_lens"].sum()),
    }
    return record(**(plain | fields))


def prefill(worker: Any, machine: Machine, text: list[int], pool: int, cuts: list[int]) -> int:
    """A prompt in chunks that end at `cuts`; its first token."""
    request = record(full_untruncated_fill_ids=array("q", text))
    out: Any = None
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out = worker.forward_batch_generation(
            batch_of(
                machine,
                input_ids=torch.tensor(text[start:stop]),
                seq_lens=torch.tensor([stop]),
                prefix_lens=[start],
                extend_lens=[stop - start],
                req_pool_indices=torch.tensor([pool]),
                out_cache_loc=machine.table[pool, start:stop].long(),
                reqs=[request],
            )
        )
        assert out.logits_output.last_hidden_states is None
    return int(out.next_token_ids[0])


@pytest.fixture(scope="module")
def trio() -> Checkpoint:
    return load_checkpoint(drafters=["dmtp"])


@pytest.fixture(scope="module")
def source(trio: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Any:
    places = export_trio(tmp_path_factory.mktemp("models"), trio, "dmtp")
    return server(places.target, places.drafter)


def test_every_method_takes_what_sglang_gives() -> None:
    """The scheduler makes a worker by keywords; a method of this name stands before SGLang's."""
    theirs = sglang_worker()
    for name in ("__init__", "forward_batch_generation", "_greedy_sample_from_vocab_parallel_head"):
        wanted, found = (inspect.signature(getattr(kind, name)).parameters for kind in (theirs, DMTPRounds))
        assert list(found) == list(wanted), name
        assert [found[key].default for key in found] == [wanted[key].default for key in wanted], name
    assert callable(getattr(theirs, "alloc_memory_pool", None))


@torch.no_grad()
@pytest.mark.parametrize("graph", [False, True])
def test_rounds_equal_the_loop(graph: bool, trio: Checkpoint, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests, one longer than the window and prefilled in chunks, and a padded row."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    whole = "".join(prompt["text"] for prompt in held_out_prompts()).encode()
    texts = [list(whole[start : start + count]) for start, count in ((0, 140), (200, 3), (300, 40))]
    engine = Engine(trio, "dmtp", max_batch=3, max_tokens=MAX_LEN - BLOCK)
    order = {engine.submit(Request(tuple(text), NEW + BLOCK)): i for i, text in enumerate(texts)}
    wanted: list[list[list[int]]] = [[] for _ in texts]
    while engine.busy:
        for event in engine.step():
            wanted[order[event.request_id]].append(list(event.tokens))
    machine = Machine(trio, len(texts))
    worker = make_worker(machine, source, graph)
    cuts = [[50, 97], [], []]
    found = [[[prefill(worker, machine, text, 1 + i, cuts[i])]] for i, text in enumerate(texts)]
    pool, lens = torch.tensor([1, 2, 3, 0]), torch.tensor([*map(len, texts), 1])
    state = DraftInput(bonus_tokens=torch.tensor([*(row[0][0] for row in found), 0]), new_seq_lens=lens)
    published: list[torch.Tensor] = []
    while min(sum(map(len, row)) for row in found) < NEW:
        batch = batch_of(machine, seq_lens=lens, req_pool_indices=pool, spec_info=state)
        out = worker.forward_batch_generation(batch, on_publish=published.append)
        tokens = out.next_token_ids.view(-1, BLOCK)
        for i in range(3):
            found[i].append(tokens[i, : int(out.accept_lens[i])].tolist())
        state, lens = out.next_draft_input, torch.cat([out.new_seq_lens[:3], torch.tensor([1])])
        assert torch.equal(published[-1], out.new_seq_lens) and out.logits_output.last_hidden_states is None
    for i, (theirs, ours) in enumerate(zip(found, wanted, strict=True)):
        rounds = next(n for n in range(len(ours) + 1) if sum(map(len, ours[:n])) >= NEW)
        assert theirs[:rounds] == ours[:rounds]
        emitted = [token for part in theirs for token in part]
        assert torch.allclose(worker.mtp_draft.hidden[1 + i], last_mtp_state(trio, texts[i] + emitted), atol=1e-4)
    assert sum(len(part) for row in found for part in row[1:]) > 2 * sum(len(row) - 1 for row in found)
    assert not worker.mtp_draft.k[:, 0].any()
