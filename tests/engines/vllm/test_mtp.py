"""Ops in vLLM's own MTP proposer, on the embedded target and MTP module in a format whose MTP vLLM runs here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.formats.layer import layer_fields
from tests.engines.vllm.harness import Outcome, drafter_of, log_lines, loop, prompts, run, sampling, start

from vllm.config import VllmConfig, set_current_vllm_config  # isort: skip (after the check that vLLM is there)
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm  # isort: skip
from vllm.model_executor.models import qwen3_next_mtp  # isort: skip

from dmtp_kernels.engines.vllm.mtp import fuse_input  # isort: skip
from dmtp_kernels.engines.vllm.switches import Switches  # isort: skip

COUNT, DRAFTED = 40, 3
OWN = "vLLM's own"
LINES = {
    "none": [],
    "fused_t1_prep": [f"dmtp: fused_t1_prep runs in place of {OWN}"],
    "lm_head_select": [f"dmtp: lm_head_select runs in place of {OWN}"],
    "commit_kv": [
        f"dmtp: commit_kv falls back to {OWN}: MTP's attention writes its rows itself, at the target's slots"
    ],
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(drafters=[])


@pytest.fixture(scope="module")
def target(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K-EXAONE with dense layers: norms, attention, MLP and MTP are Qwen3's and this library's; no vision part."""
    directory, config = tmp_path_factory.mktemp("exaone"), checkpoint.target.config
    assert checkpoint.mtp is not None
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint.target.state_dict().items()}
    tensors |= {f"mtp.{name}": tensor for name, tensor in checkpoint.mtp.state_dict().items()}
    del tensors["model.lm_head.weight"]
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    fields = {
        "architectures": ["ExaoneMoeForCausalLM"],
        "model_type": "exaone_moe",
        **layer_fields(config.layer),
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "mlp_layer_types": ["dense"] * config.num_layers,
        "sliding_window": config.max_positions,
        "num_nextn_predict_layers": checkpoint.mtp.config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture(scope="module")
def plain(target: Path) -> Outcome:
    return run(start(target, None), prompts(8), sampling(COUNT))


@pytest.fixture(scope="module")
def chain(checkpoint: Checkpoint) -> Outcome:
    with torch.no_grad():
        return loop(checkpoint, prompts(8), COUNT, "mtp3")


@pytest.mark.parametrize("op", list(LINES))
def test_one_op_in_vllms_own_mtp(
    op: str, target: Path, plain: Outcome, chain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of vLLM without speculation, candidates of this library's MTP chain."""
    monkeypatch.setenv("DMTP_VLLM_OPS", op)
    with log_lines() as lines:
        llm = start(target, {"method": "mtp", "num_speculative_tokens": DRAFTED})
        found = run(llm, prompts(8), sampling(COUNT))
    assert type(drafter_of(llm)).__name__ == ("EagleProposer" if op == "none" else "FusedMTPProposer")
    assert found.tokens == plain.tokens
    assert lines == LINES[op]
    assert chain.tokens == found.tokens and found.length > 2
    assert (found.rounds, found.accepted) == pytest.approx((chain.rounds, chain.accepted), rel=0.01)


@torch.no_grad()
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("embedded", [False, True])
def test_the_input_of_vllms_modules(kind: type, embedded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the forward of Qwen3-Next's module, which is Qwen3.5's; ids, or embeddings of a model with images."""
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(qwen3_next_mtp, "get_pp_group", lambda: alone)
    width, count = 24, 6
    with set_current_vllm_config(VllmConfig()):
        norms = [kind(width, eps=1e-5) for _ in range(3)]
    for norm in norms:
        norm.weight.data = torch.rand(width) + 0.2
    layer: Any = lambda positions, hidden_states, residual: (hidden_states * 0.5, hidden_states)  # noqa: E731
    layer.use_attn_reduce_scatter_for_moe = False
    table = torch.randn(11, width)
    module = SimpleNamespace(
        fc=torch.nn.Linear(2 * width, width, bias=False),
        pre_fc_norm_embedding=norms[0],
        pre_fc_norm_hidden=norms[1],
        norm=norms[2],
        embed_tokens=SimpleNamespace(weight=table),
        embed_input_ids=lambda ids: table[ids],
        layers=[layer],
        num_mtp_layers=1,
    )
    calls: list[int] = []

    def own(*arguments: Any) -> torch.Tensor:
        calls.append(len(arguments[0]))
        made: torch.Tensor = qwen3_next_mtp.Qwen3NextMultiTokenPredictor.forward(module, *arguments)
        return made

    module.forward = partial(own)
    ids, positions, hidden = torch.randint(11, (count,)), torch.arange(count), torch.randn(count, width)
    given = (ids, positions, hidden, None, table[ids] if embedded else None)
    wanted = module.forward(*given)
    fuse_input(module, Switches(["fused_t1_prep"]), most=count)
    assert torch.allclose(module.forward(*given), wanted, atol=1e-5) and calls == [count]
    # a chunk of a prompt goes the way it went
    module.forward(torch.cat([ids, ids]), torch.arange(2 * count), torch.cat([hidden, hidden]))
    assert calls == [count, 2 * count]


def test_an_op_that_is_off_leaves_the_module_alone() -> None:
    module = SimpleNamespace(
        fc=torch.nn.Linear(8, 4, bias=False),
        pre_fc_norm_embedding=SimpleNamespace(weight=torch.ones(4), variance_epsilon=1e-6),
        pre_fc_norm_hidden=SimpleNamespace(weight=torch.ones(4), variance_epsilon=1e-6),
        embed_tokens=SimpleNamespace(weight=torch.ones(5, 4)),
        forward=lambda *arguments: arguments,
    )
    fuse_input(module, Switches([]), most=8)
    ids, hidden = torch.zeros(2, dtype=torch.int64), torch.ones(2, 4)
    assert module.forward(ids, ids, hidden) == (ids, ids, hidden, None, None, 0)
