"""The speculator of the V2 model runner, which needs a GPU, against its interfaces and on tensors of a running V1."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (make test-engines)")

from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from dmtp_kernels.engines.vllm import plugin
from dmtp_kernels.engines.vllm.proposer import DMTPProposer
from dmtp_kernels.engines.vllm.speculator import DMTPSpeculator
from tests.engines.vllm.harness import export, prompts, run, sampling, start

NEEDED = ("num_reqs", "num_tokens", "idx_mapping", "query_start_loc", "input_ids", "positions")


def test_propose_takes_what_the_runner_gives() -> None:
    ours, theirs = (inspect.signature(kind.propose).parameters for kind in (DMTPSpeculator, BaseSpeculator))
    assert list(ours) == list(theirs)
    defaults = {name: parameter.default for name, parameter in theirs.items()}
    assert {name: parameter.default for name, parameter in ours.items()} == defaults


def test_every_method_replaced_is_one_the_runner_calls() -> None:
    for name in ("load_draft_model", "init_cudagraph_manager", "capture", "propose"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (DMTPSpeculator, DFlashSpeculator))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_a_batch_has_the_fields_that_are_read() -> None:
    assert set(NEEDED) <= {field.name for field in dataclasses.fields(InputBatch)}


def as_v2(proposer: DMTPProposer, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a V1 proposal as the V2 runner would give them, requests in rows of its state turned around."""
    cad, count = call["common_attn_metadata"], len(call["target_token_ids"])
    batch_size = cad.num_reqs
    batch = object.__new__(InputBatch)
    batch.num_reqs, batch.num_tokens = batch_size, count
    batch.idx_mapping = torch.arange(batch_size).flip(0)
    batch.query_start_loc = cad.query_start_loc
    batch.input_ids = torch.cat([call["target_token_ids"], torch.zeros(5, dtype=torch.int32)])
    batch.positions = torch.cat([call["target_positions"], torch.full((5,), 7)])
    rejected = call["num_rejected_tokens_gpu"]
    # a request that sampled nothing takes the prompt's next token
    sampled = torch.tensor([row % 2 for row in range(batch_size)], dtype=torch.int32)
    by_state = call["next_token_ids"].flip(0)
    garbage = torch.full_like(by_state, 3)
    kept = sampled.flip(0) > 0
    _, metadata = SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata(proposer, cad)
    names = [*proposer.model.mtp_layers, *(cache.layer_name for cache in proposer.model.caches)]
    width = proposer.hidden_size
    features = call["target_hidden_states"].split(width, dim=-1)
    return {
        "input_batch": batch,
        "attn_metadata": metadata,
        "slot_mappings": {name: torch.cat([cad.slot_mapping[:count], torch.full((5,), -1)]) for name in names},
        "last_hidden_states": torch.cat([proposer._target_hidden[:count], torch.full((5, width), torch.nan)]),
        "aux_hidden_states": [torch.cat([part, torch.full((5, width), torch.nan)]) for part in features],
        "num_sampled": sampled,
        "num_rejected": torch.zeros(batch_size, dtype=torch.int32) if rejected is None else rejected,
        "last_sampled": torch.where(kept, by_state, garbage)[:, None],
        "next_prefill_tokens": torch.where(kept, garbage, by_state)[None],
        "temperature": torch.zeros(batch_size),
        "seeds": torch.zeros(batch_size, dtype=torch.int64),
    }


def test_both_runners_propose_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of a real run, prefills and rejections included; both write the same rows to the same slots."""
    target, drafter = export(tmp_path, "dmtp")
    built: list[DMTPSpeculator] = []
    compared: list[bool] = []

    def both(self: DMTPProposer, **call: Any) -> torch.Tensor:
        tokens = original(self, **call)
        if not built:
            speculator = init_speculator(self.vllm_config, torch.device("cpu"), None)
            speculator.model, speculator.head = self.model, self.head
            speculator.draft_kv_cache_group_id = 0
            built.append(speculator)
        cad = call["common_attn_metadata"]
        built[0].block_tables = type("Tables", (), {"input_block_tables": [cad.block_table_tensor]})
        again = built[0].propose(**as_v2(self, call))
        compared.append(torch.equal(tokens, again))
        return tokens

    original = DMTPProposer.propose
    monkeypatch.setattr(DMTPProposer, "propose", both)
    monkeypatch.setattr(DFlashSpeculator, "__new__", staticmethod(plugin._speculator))
    found = run(start(target, {"method": "dmtp", "model": str(drafter)}), prompts(6), sampling(24))
    assert isinstance(built[0], DMTPSpeculator)
    assert found.rounds > 20 and found.accepted > found.rounds
    assert len(compared) > 8 and all(compared)
