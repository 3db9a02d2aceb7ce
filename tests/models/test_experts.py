"""The routed MLP: its sum written out, the two ways to compute it, what a device must not do, and the loop on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Request
from dmtp_kernels.models.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from dmtp_kernels.models.config import ExpertsConfig, LayerConfig
from dmtp_kernels.models.experts import AT_ONCE, RoutedMLP
from dmtp_kernels.models.formats import export_trio, read_trio
from dmtp_kernels.models.layers import MLP
from dmtp_kernels.testing.capture import CaptureError, capture_safe
from dmtp_kernels.testing.models import tiny_checkpoint
from tests.models.format_cases import edit_tensors, refused, write
from tests.models.public_cases import randomise
from tests.models.test_parts import rewrite

EXPERTS = ExpertsConfig(count=6, top_k=2, intermediate_size=24)
PROMPTS = ((1, 2, 3), (7,), (5, 4, 3, 2, 1, 0, 10))


def routed(count: int, top_k: int, normalize: bool = True) -> RoutedMLP:
    layer = LayerConfig(16, 24, 4, 2, 8, experts=ExpertsConfig(count, top_k, 12, normalize))
    assert layer.experts is not None
    module = RoutedMLP(layer, layer.experts, MLP(layer)).double().requires_grad_(False)
    randomise(module, count)
    return module


@pytest.mark.parametrize("normalize", [True, False])
def test_the_sum_written_out(normalize: bool) -> None:
    module = routed(5, 3, normalize)
    x = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)).double()
    found = module(x)
    for row, got in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        scores = torch.softmax(module.gate.weight @ row, 0)
        best = sorted(range(5), key=lambda e: -scores[e].item())[:3]
        total = sum(scores[e] for e in best) if normalize else torch.tensor(1.0)
        want = torch.sigmoid(module.shared_expert_gate.weight[0] @ row) * module.shared_expert(row)
        for expert in best:
            both = module.experts.gate_up_proj[expert] @ row
            inner = functional.silu(both[:12]) * both[12:]
            want = want + scores[expert] / total * (module.experts.down_proj[expert] @ inner)
        torch.testing.assert_close(got, want)


# rows, experts, choices: none; one; a block a choice; blocks of several rows, cut at AT_ONCE; every row in one expert
@pytest.mark.parametrize(
    ("rows", "count", "top_k"), [(0, 4, 2), (1, 8, 3), (3, 4, 4), (8, 16, 4), (50, 8, 8), (70, 40, 3), (40, 1, 1)]
)
@pytest.mark.parametrize("spread", ["even", "one", "two"])
def test_both_ways_are_the_same(rows: int, count: int, top_k: int, spread: str) -> None:
    module = routed(count, top_k)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 16, generator=generator).double()
    near = {"even": count, "one": top_k, "two": min(count, top_k + 1)}[spread]
    chosen = torch.rand(rows, near, generator=generator).argsort(dim=1)[:, :top_k]
    plain = module.experts.by_expert(x, chosen)
    assert plain.shape == (rows, top_k, 16)
    torch.testing.assert_close(module.experts.in_blocks(x, chosen), plain)
    for row, at in zip(x, range(rows), strict=True):
        torch.testing.assert_close(module.experts.by_expert(row[None], chosen[at : at + 1])[0], plain[at])


def test_a_row_of_nan_stays_alone() -> None:
    module = routed(6, 2)
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).double()
    _, chosen = module.route(x)
    spoilt = x.clone()
    spoilt[0] = float("nan")
    for way in (module.experts.by_expert, module.experts.in_blocks):
        found = way(spoilt, chosen)
        assert found[0].isnan().all() and torch.equal(found[1:], way(x, chosen)[1:])
    assert torch.equal(module(spoilt)[1:], module(x)[1:])


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_device_never_waits_for_the_host(rows: int) -> None:
    module = routed(AT_ONCE + 3, 2)
    x = torch.randn(rows, 16).double()
    _, chosen = module.route(x)
    with capture_safe() as mode:
        module.route(x)
        module.experts.in_blocks(x, chosen)
    assert mode.calls > 20
    with pytest.raises(CaptureError), capture_safe():
        module.experts.by_expert(x, chosen)


def test_gradients_reach_router_and_chosen_experts() -> None:
    module = routed(5, 2).requires_grad_(True)
    x = torch.randn(1, 16).double()
    chosen = set(module.route(x)[1][0].tolist())
    module(x).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert module.gate.weight.grad is not None and module.gate.weight.grad.abs().sum() > 0
    for grad in (module.experts.gate_up_proj.grad, module.experts.down_proj.grad):
        assert grad is not None and {e for e in range(5) if grad[e].abs().sum() > 0} == chosen


def decoded(checkpoint: Checkpoint, method: str, temperature: float = 0.7) -> list[tuple[list[int], list[int]]]:
    engine = Engine(checkpoint, method, max_batch=len(PROMPTS), max_tokens=80, graphs="exact")
    assert engine.graphs is not None
    engine.graphs.guard = lambda: capture_safe(numpy=True)
    done = engine.run(Request(prompt, 20, temperature, seed=i) for i, prompt in enumerate(PROMPTS))
    return [(completion.tokens, completion.histogram) for completion in done]


@pytest.mark.parametrize("method", ["dmtp", "mtp3"])
def test_the_loop_is_lossless_on_it(method: str) -> None:
    trio = tiny_checkpoint(5, mtp_experts=EXPERTS)
    plain = [tokens for tokens, _ in decoded(trio, "autoregressive", 0.0)]
    found = decoded(trio, method, 0.0)
    assert [tokens for tokens, _ in found] == plain
    # and its proposals come from it
    assert found != decoded(tiny_checkpoint(5), method, 0.0)


def test_a_trio_of_directories_and_one_of_a_file_decode_the_same(tmp_path: Path) -> None:
    trio = tiny_checkpoint(5, mtp_experts=EXPERTS)
    places = export_trio(tmp_path, trio, "dmtp")
    assert decoded(read_trio(places.target, places.drafter, places.mtp), "dmtp") == decoded(trio, "dmtp")
    read = load_checkpoint(save_checkpoint(tmp_path / "t.safetensors", trio, dtype=torch.float32, int8_drafters=False))
    assert read.mtp is not None and trio.mtp is not None and read.mtp.config == trio.mtp.config
    assert decoded(read, "dmtp") == decoded(trio, "dmtp")


def test_int8_experts(tmp_path: Path) -> None:
    trio = tiny_checkpoint(5, mtp_experts=EXPERTS)
    path = save_checkpoint(tmp_path / "trio.safetensors", trio, with_target=False)
    read = load_checkpoint(path, target=trio.target).mtp
    assert read is not None and trio.mtp is not None
    for name, want in trio.mtp.state_dict().items():
        if ".experts." in name:
            step = want.abs().amax(-1, keepdim=True) / 127
            got = read.state_dict()[name]
            assert not torch.equal(got, want) and ((got - want).abs() <= 0.51 * step).all()


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"count": 6, "top_k": 7, "intermediate_size": 24}, "top_k is 7, must be at most the 6"),
        ({"count": 6, "top_k": 2, "intermediate_size": 24, "normalize": 1}, "normalize is 1"),
        ({"count": 0, "top_k": 2, "intermediate_size": 24}, "count is 0"),
        (
            {"count": 2**31 - 1, "top_k": 2, "intermediate_size": 24},
            "gate.weight is [6, 32], expected [2147483647, 32]",
        ),
        ({"count": 6, "top_k": 2}, "intermediate_size"),
        ([6, 2, 24], "cannot be read"),
        (None, "is missing, expected shape"),
    ],
)
def test_a_file_whose_experts_cannot_be(tmp_path: Path, experts: object, message: str) -> None:
    path = save_checkpoint(tmp_path / "trio.safetensors", tiny_checkpoint(5, mtp_experts=EXPERTS))
    rewrite(path, lambda config: config["mtp"]["layer"].update(experts=experts))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_expert_that_is_missing_or_too_many(tmp_path: Path) -> None:
    write(tmp_path, "mtp of single experts")
    raw = (tmp_path / "model.safetensors").read_bytes()
    each = "mtp.layers.0.mlp.experts"
    edit_tensors(tmp_path, lambda t: t.pop(f"{each}.3.up_proj.weight"))
    refused(
        tmp_path, "mtp of single experts", f"{each}.3.up_proj.weight is missing, expected shape [12, 16]", "5 experts"
    )
    (tmp_path / "model.safetensors").write_bytes(raw)
    edit_tensors(tmp_path, lambda t: t.update({f"{each}.5.up_proj.weight": torch.zeros(12, 16)}))
    refused(tmp_path, "mtp of single experts", f"{each}.5.up_proj.weight is not part of the configuration")
    (tmp_path / "model.safetensors").write_bytes(raw)
    edit_tensors(tmp_path, lambda t: t.update({f"{each}.down_proj": torch.zeros(5, 16, 12)}))
    refused(tmp_path, "mtp of single experts", "down_proj.weight is not part of the configuration")
    edit_tensors(tmp_path, lambda t: [t.pop(name) for name in list(t) if f"{each}." in name])
    refused(tmp_path, "mtp of single experts", f"{each}.gate_up_proj is missing, expected shape [5, 24, 16]")
