"""DMTP through vLLM's own scheduler, caches and verification, on the V1 model runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmtp_kernels.models.checkpoint import Checkpoint, load_checkpoint
from dmtp_kernels.models.target import Target
from tests.engines.vllm.harness import (
    Outcome,
    export,
    log_lines,
    long_prompts,
    loop,
    prompts,
    run,
    sampling,
    start,
)

from dmtp_kernels.engines.vllm.model import DMTPDraft  # isort: skip (after the check that vLLM is there)

COUNT = 40
PROMPTS = 32


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(drafters=["dmtp", "dflash"])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("models")
    made = {method: export(root, method) for method in ("dmtp", "dflash")}
    return made["dmtp"][0], {method: drafter for method, (_, drafter) in made.items()}


@pytest.fixture(scope="module")
def plain(places: tuple[Path, dict[str, Path]]) -> Outcome:
    """vLLM without speculation: the held-out prompts, then the long ones."""
    return run(start(places[0], None), prompts(PROMPTS) + long_prompts(), sampling(COUNT))


@pytest.fixture(scope="module")
def drafted(places: tuple[Path, dict[str, Path]]) -> Outcome:
    """vLLM with DMTP, eight requests at a time."""
    llm = start(places[0], {"method": "dmtp", "model": str(places[1]["dmtp"])})
    return run(llm, prompts(PROMPTS), sampling(COUNT))


def test_greedy_text_is_that_of_vllm_without_speculation(drafted: Outcome, plain: Outcome) -> None:
    assert len(drafted.tokens) == PROMPTS
    assert drafted.tokens == plain.tokens[:PROMPTS]


@torch.no_grad()
def test_vllm_counts_what_our_loop_counts(drafted: Outcome, checkpoint: Checkpoint) -> None:
    ours = loop(checkpoint, prompts(PROMPTS), COUNT)
    assert ours.tokens == drafted.tokens
    assert drafted.length == pytest.approx(ours.length, rel=0.01)
    assert drafted.places == pytest.approx(ours.places, rel=0.01)


def test_lengths_are_above_vllms_own_dflash(
    drafted: Outcome, plain: Outcome, places: tuple[Path, dict[str, Path]]
) -> None:
    spec = {"method": "dflash", "model": str(places[1]["dflash"]), "num_speculative_tokens": 7}
    dflash = run(start(places[0], spec), prompts(PROMPTS), sampling(COUNT))
    assert dflash.tokens == plain.tokens[:PROMPTS]
    assert drafted.length > 1.05 * dflash.length


@torch.no_grad()
def test_prompts_longer_than_the_window_and_chunked(
    plain: Outcome, checkpoint: Checkpoint, places: tuple[Path, dict[str, Path]]
) -> None:
    """A chunk ends inside a page and inside the window; MTP's row there needs the prompt's next token."""
    spec = {"method": "dmtp", "model": str(places[1]["dmtp"])}
    llm = start(places[0], spec, max_num_batched_tokens=97)
    found = run(llm, long_prompts(), sampling(COUNT))
    ours = loop(checkpoint, long_prompts(), COUNT)
    assert found.tokens == plain.tokens[PROMPTS:] == ours.tokens
    assert (found.rounds, found.accepted) == pytest.approx((ours.rounds, ours.accepted), rel=0.01)
    # once more from the prefix cache, whose pages hold the drafts' rows too; vLLM's counts go on
    again = run(llm, long_prompts(), sampling(COUNT))
    assert again.tokens == ours.tokens
    assert (again.rounds, again.accepted) == pytest.approx((2 * ours.rounds, 2 * ours.accepted), rel=0.01)


def test_mtp_reads_the_token_after_each_row(
    places: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a chunk ends inside the prompt it is the prompt's next one."""
    prompt = long_prompts()[0]
    read: dict[int, int] = {}
    original = DMTPDraft.run_mtp

    def spy(self: DMTPDraft, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        read.update(zip(positions.tolist(), ids.tolist(), strict=True))
        return original(self, ids, hidden, positions)

    monkeypatch.setattr(DMTPDraft, "run_mtp", spy)
    spec = {"method": "dmtp", "model": str(places[1]["dmtp"])}
    found = run(start(places[0], spec, max_num_batched_tokens=97), [prompt], sampling(1))
    assert [read[i] for i in range(len(prompt))] == prompt[1:] + found.tokens[0]


def test_requests_aborted_in_flight_leave_the_others_alone(
    plain: Outcome, places: tuple[Path, dict[str, Path]]
) -> None:
    llm = start(places[0], {"method": "dmtp", "model": str(places[1]["dmtp"])})
    engine, given = llm.llm_engine, prompts(12)
    for i, ids in enumerate(given):
        engine.add_request(str(i), {"prompt_token_ids": ids}, sampling(COUNT))
    done: dict[int, list[int]] = {}
    steps, aborted = 0, {1: "0", 3: "5", 4: "2"}
    while engine.has_unfinished_requests():
        if steps in aborted:
            engine.abort_request([aborted[steps]])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                done[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
        steps += 1
    left = sorted(set(range(12)) - {0, 2, 5})
    assert sorted(done) == left
    assert [done[i] for i in left] == [plain.tokens[i] for i in left]


@torch.no_grad()
def test_sampled_text_follows_the_target(checkpoint: Checkpoint, places: tuple[Path, dict[str, Path]]) -> None:
    """Law of the prefill's token and of the first that a verification emits, at temperature 1, against the target's."""
    prompt, count = list(b"    def __init__(self"), 512
    llm = start(places[0], {"method": "dmtp", "model": str(places[1]["dmtp"])}, seed=1)
    found = run(llm, [prompt] * count, sampling(2, temperature=1.0))
    target = checkpoint.target
    after = _law(target, torch.tensor([prompt]))[0]
    rows = torch.tensor([[*prompt, token] for token in range(len(after))])
    second = (after[:, None] * _law(target, rows)).sum(dim=0)
    for place, law in ((0, after), (1, second)):
        seen = torch.bincount(torch.tensor([tokens[place] for tokens in found.tokens]), minlength=len(law)).double()
        often = law * count >= 5
        expected = torch.cat([law[often], law[~often].sum()[None]]) * count
        got = torch.cat([seen[often], seen[~often].sum()[None]])
        statistic = float(((got - expected) ** 2 / expected.clamp(min=1e-9)).sum())
        freedom = int(often.sum())
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4, (place, statistic, freedom)
    assert found.accepted > 0.2 * found.rounds


def _law(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """`[B, V]` probabilities of the token after `ids[B, T]`, by causal attention written out."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return target.logits(target(ids, positions, attend).hidden[:, -1]).double().softmax(dim=-1)


@pytest.mark.parametrize("op", ["none", "fused_t1_prep", "lm_head_select", "commit_kv"])
def test_one_op_at_a_time_changes_nothing(
    op: str, plain: Outcome, places: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMTP_VLLM_OPS", op)
    llm = start(places[0], {"method": "dmtp", "model": str(places[1]["dmtp"])})
    found = run(llm, prompts(8), sampling(COUNT))
    assert found.tokens == plain.tokens[:8]
    ran = [line for line in found.log.splitlines() if "runs in place" in line]
    assert ran == ([] if op == "none" else [f"dmtp: {op} runs in place of vLLM's own"])


@pytest.mark.parametrize("op", ["fused_t1_prep", "lm_head_select", "commit_kv"])
def test_one_op_in_vllms_own_dflash(
    op: str, plain: Outcome, places: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMTP_VLLM_OPS", op)
    spec = {"method": "dflash", "model": str(places[1]["dflash"]), "num_speculative_tokens": 7}
    with log_lines() as lines:
        llm = start(places[0], spec)
        found = run(llm, prompts(8), sampling(COUNT))
    assert found.tokens == plain.tokens[:8]
    wanted = {"commit_kv": "falls back to vLLM's own: CPU_ATTN lays its caches out in a way of its own"}
    assert [line for line in lines if op in line] == [
        f"dmtp: {op} {wanted.get(op, 'runs in place of vLLM' + chr(39) + 's own')}"
    ]
