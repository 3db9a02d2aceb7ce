"""Random rounds of an engine with everything going wrong around it, and the books checked after each.

Requests join, are aborted and preempted, pools run short, rows sit rounds out, acceptance counts leave their range;
pages are NaN before their first use and again once released, and guards stand around caches and state. What must hold:
no page has two owners, tables say what the pools say, no guard changes, and every request that survives has the tokens
of autoregressive decoding. Random models agree on little, so most rows' candidates are replaced, up to a random place,
by what the target will say: all accept lengths occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from dmtp_kernels.decode import round as rounds
from dmtp_kernels.decode.caches import PagedCache
from dmtp_kernels.decode.engine import Engine
from dmtp_kernels.decode.request import Completion, FinishReason, Request
from dmtp_kernels.decode.round import RoundResult
from dmtp_kernels.decode.seating import Seating
from dmtp_kernels.decode.stack import Stack
from dmtp_kernels.decode.state import BatchState
from dmtp_kernels.decode.work import left
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.ops.accept import Acceptance
from dmtp_kernels.ops.advance import BAD_COUNT, RoundIndex

_GUARD_ROWS = 3
_GUARD = 12345


@dataclass
class SoakFigures:
    """What happened in a soak. `failures` is empty when everything held."""

    rounds: int = 0
    submitted: int = 0
    completed: int = 0
    aborted: int = 0
    preempted: int = 0
    ran_short: int = 0
    broken: int = 0
    sat_out: int = 0
    tokens: int = 0
    accepted: int = 0
    failures: list[str] = field(default_factory=list)


class Soak:
    """A soak of one engine. The plan follows from the seed alone.

    Args:
        checkpoint, method: as the engine takes them; requests are greedy.
        seed: of the plan.
        max_batch, num_pages, page_size, max_tokens: as the engine takes them. Few pages make preemptions.
        more: further options of the engine.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        method: str = "dmtp",
        *,
        seed: int = 0,
        max_batch: int = 6,
        num_pages: int = 22,
        page_size: int = 4,
        max_tokens: int = 64,
        **more: Any,
    ) -> None:
        self.rng = random.Random(seed)
        options: dict[str, Any] = {"max_tokens": max_tokens, "page_size": page_size, "prefill_chunk": 16}
        self.engine = Engine(checkpoint, method, max_batch=max_batch, num_pages=num_pages, **options, **more)
        self._plain = Engine(checkpoint, "autoregressive", max_batch=8, **options)
        self._stock: list[Completion] = []
        self._wanted: dict[int, Completion] = {}
        self.vocabulary = self.engine.stack.target.config.num_valid
        self.figures = SoakFigures()
        self._broken: set[int] = set()  # requests whose counts were spoiled: they end with an error
        self._open: list[int] = []
        self._guards = _with_guards(self.engine)
        for owner in self.engine.stack.owners:
            _poison_released(self.engine.stack.cache(owner))
        self.engine.round_function = self._round

    @torch.no_grad()
    def run(self, count: int, progress: Callable[[SoakFigures], None] | None = None) -> SoakFigures:
        """At least `count` rounds, then the rest of the requests."""
        figures, engine = self.figures, self.engine
        while engine.rounds < count or engine.busy:
            if engine.rounds < count:
                self._disturb()
            engine.step()
            self._check_books()
            self._check_finished()
            figures.rounds, figures.ran_short = engine.rounds, engine.preemptions - figures.preempted
            if progress is not None:
                progress(figures)
            if len(figures.failures) >= 5:
                break
        used = {owner: engine.stack.cache(owner).pool.used for owner in engine.stack.owners}
        if any(used.values()) and not figures.failures:
            self._fail(f"pages in use after the last request: {used}")
        return figures

    def _disturb(self) -> None:
        rng, engine = self.rng, self.engine
        if len(engine.waiting) < 4 and rng.random() < 0.6:
            wanted = self._next_request()
            request_id = engine.submit(wanted.request)
            self._wanted[request_id] = wanted
            self._open.append(request_id)
            self.figures.submitted += 1
        if (engine.live or engine.waiting) and rng.random() < 0.03:
            engine.abort(rng.choice(engine.live + engine.waiting))
            self.figures.aborted += 1
        if engine.live and rng.random() < 0.03:
            engine.preempt(rng.choice(engine.live))
            self.figures.preempted += 1

    def _next_request(self) -> Completion:
        """A request and its autoregressive completion."""
        rng = self.rng
        if not self._stock:
            requests = []
            for _ in range(self._plain.max_batch):
                prompt = tuple(rng.randrange(self.vocabulary) for _ in range(rng.randint(1, 20)))
                stops = (rng.randrange(self.vocabulary),) if rng.random() < 0.2 else ()
                requests.append(Request(prompt, rng.randint(1, 40), stop_ids=stops))
            self._stock = self._plain.run(requests)
            self._plain.completions.clear()
        return self._stock.pop()

    def _plain_round(self, stack: Stack, state: BatchState) -> RoundResult:
        draft = self._propose(stack, state)
        return RoundResult(draft, rounds.finish_round(stack, state))

    def _propose(self, stack: Stack, state: BatchState) -> rounds.Draft:
        """The stages up to the draft; then candidates of some rows are what the target will say, for a while."""
        draft = rounds.propose(stack, state)
        for row, request_id in enumerate(self.engine.live):
            wanted = self._wanted[request_id]
            emitted = int(state.length[row]) + 1 - len(wanted.request.prompt)
            right = wanted.tokens[emitted : emitted + self.rng.randint(0, stack.method.num_candidates)]
            if emitted > 0 and right and self.rng.random() < 0.7:
                draft.candidates[row, 1 : 1 + len(right)] = torch.tensor(right)
        return draft

    def _round(self, stack: Stack, state: BatchState) -> RoundResult:
        """One round; now and then some rows sit it out, or a count is spoiled between acceptance and commit."""
        dice = self.rng.random()
        if dice < 0.05:
            return self._sit_out(stack, state)
        return self._spoiled(stack, state) if dice < 0.08 else self._plain_round(stack, state)

    def _spoiled(self, stack: Stack, state: BatchState) -> RoundResult:
        live = self.engine.live
        row = self.rng.randrange(len(live))
        count = self.rng.choice([-1, stack.rows + 1, 2**31 - 1, -(2**31)])
        draft = self._propose(stack, state)
        running = int(state.budget[row]) > 0
        for name in rounds.STAGES[rounds.STAGES.index("verify") :]:
            rounds.stage(name)(stack, state)
            if name == "accept" and running:
                left(state.work.accepted).commit_len[row] = count
        if running:
            self._broken.add(live[row])
            self.figures.broken += 1
        if int(state.budget[row]) > 0 and not int(state.index.error[row]) & BAD_COUNT:
            self._fail(f"a count of {count} was not flagged")
        return RoundResult(draft, left(state.work.accepted))

    def _sit_out(self, stack: Stack, state: BatchState) -> RoundResult:
        """Two rounds: the rows that sit out the first have the second to themselves. The host sees them as one."""
        waits = torch.tensor([self.rng.random() < 0.5 for _ in self.engine.live])
        budget, before = state.budget.clone(), _request_fields(state)
        before = {n: t[waits].clone() for n, t in before.items() if n != "budget" and not n.endswith("_table")}
        state.budget[waits] = 0
        rounds.refresh(stack, state)
        first = self._plain_round(stack, state)
        moved = state.budget.clone()
        for name, value in before.items():
            if not torch.equal(value, _request_fields(state)[name][waits]):
                self._fail(f"a row that sat out a round changed its {name}")
        state.budget.copy_(torch.where(waits, budget, 0))
        rounds.refresh(stack, state)
        second = self._plain_round(stack, state)
        state.budget.copy_(torch.where(waits, state.budget, moved))
        rounds.refresh(stack, state)
        self.figures.sat_out += 1
        pairs = zip(first.accepted, second.accepted, strict=True)
        both = [torch.where(waits if a.dim() == 1 else waits[:, None], b, a) for a, b in pairs]
        state.work.accepted = Acceptance(*both)
        return RoundResult(second.draft, state.work.accepted)

    def _check_books(self) -> None:
        engine = self.engine
        for owner in engine.stack.owners:
            cache, owned = engine.stack.cache(owner), []
            for row, seat in enumerate(engine.seats):
                pages, tail = seat.pages[owner], seat.tail if owner == "mtp" else []
                owned += pages + tail
                if sorted(pages + tail) != cache.pool.owned_by(seat.request_id):
                    self._fail(f"{owner}: request {seat.request_id} holds other pages than the pool says")
                table = getattr(engine.state, f"{owner}_table")[row].tolist()
                if table != pages + [0] * (len(table) - len(pages)):
                    self._fail(f"{owner}: the table of request {seat.request_id} is {table}, it owns {pages}")
            if len(set(owned)) != len(owned) or len(owned) != cache.pool.used or 0 in owned:
                self._fail(f"{owner}: pages {sorted(owned)} for {cache.pool.used} in use")
            if cache.pool.used + cache.pool.free != cache.pool.num_pages:
                self._fail(f"{owner}: {cache.pool.used} used and {cache.pool.free} free of {cache.pool.num_pages}")
            if not all(bool(layer[0].isnan().all()) for layer in (*cache.k, *cache.v)):
                self._fail(f"{owner}: page 0 was written")
        for name, guard in self._guards.items():
            if not bool((guard == _GUARD).all()):
                self._fail(f"{name}: written outside")

    def _check_finished(self) -> None:
        for request_id in [i for i in self._open if self.engine.completions[i].finish_reason is not None]:
            self._open.remove(request_id)
            completion = self.engine.completions[request_id]
            self.figures.tokens += len(completion.tokens)
            wanted = self._wanted.pop(request_id)
            self.figures.accepted += sum(k * n for k, n in enumerate(completion.histogram))
            if completion.tokens != wanted.tokens[: len(completion.tokens)]:
                self._fail(f"request {request_id}: {completion.tokens}, must be {wanted.tokens}")
            if completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.figures.completed += 1
                if (completion.tokens, completion.finish_reason) != (wanted.tokens, wanted.finish_reason):
                    self._fail(f"request {request_id}: {completion.finish_reason} after {completion.tokens}")
            elif completion.finish_reason is FinishReason.ERROR and request_id not in self._broken:
                self._fail(f"request {request_id}: ended with an error that nobody planted")

    def _fail(self, what: str) -> None:
        self.figures.failures.append(f"round {self.engine.rounds}: {what}")


def _request_fields(state: BatchState) -> dict[str, torch.Tensor]:
    named = {f.name: getattr(state, f.name) for f in fields(state)}
    return {n: t for n, t in named.items() if isinstance(t, torch.Tensor) and n not in ("grants", "idle")}


def _poison_released(cache: PagedCache) -> None:
    """Make released pages NaN again: nobody may read what an earlier owner wrote."""
    release = cache.pool.release

    def poisoning(pages: list[int], owner: int) -> None:
        release(pages, owner)
        for layer in (*cache.k, *cache.v):
            layer[pages] = float("nan")

    cache.pool.release = poisoning  # type: ignore[method-assign]


def _with_guards(engine: Engine) -> dict[str, torch.Tensor]:
    """Move the engine's state and caches into memory with guards around them; returns the guards."""
    state, stack, guards = engine.state, engine.stack, {}

    def guarded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        size = len(tensor)
        wide = torch.full((size + 2 * _GUARD_ROWS, *tensor.shape[1:]), _GUARD, dtype=tensor.dtype)
        inside = wide[_GUARD_ROWS : _GUARD_ROWS + size]
        inside.copy_(tensor)
        guards[f"before {name}"], guards[f"after {name}"] = wide[:_GUARD_ROWS], wide[_GUARD_ROWS + size :]
        return inside

    for name, tensor in state._tensors().items():
        setattr(state, name, guarded(name, tensor))
    state.index = RoundIndex(**{n: guarded(n, t) for n, t in state.index._asdict().items()})
    for owner in stack.owners:
        cache = stack.cache(owner)
        for kind in ("k", "v"):
            layers = [guarded(f"{owner} {kind} {n}", t) for n, t in enumerate(getattr(cache, kind))]
            setattr(cache, kind, layers)
            setattr(cache, f"flat_{kind}", [layer.flatten(0, 1) for layer in layers])
    engine.seating = Seating(stack, state, engine.max_batch)
    return guards
