"""Continuous batching around `decode_round`: requests join and leave between rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dmtp_kernels.decode.caches import pages_for
from dmtp_kernels.decode.graphs import GraphRunner, graph_sizes
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.prefill import prefill
from dmtp_kernels.decode.readback import Landing, Readback
from dmtp_kernels.decode.request import Completion, Event, FinishReason, Request
from dmtp_kernels.decode.round import decode_round
from dmtp_kernels.decode.seating import Seat, Seating
from dmtp_kernels.decode.stack import MAX_ROWS, Stack, build_stack, get_method
from dmtp_kernels.decode.state import MAX_STOP_IDS, BatchState
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.ops.accept import LENGTH, STOPPED

_REASONS = {STOPPED: FinishReason.STOP, LENGTH: FinishReason.LENGTH}
_NO_PREFIX_CACHE = (
    "prefix_cache: is True, must be False: no two requests share pages. A prefix can be used again only with all its "
    "states (target rows, drafter context, MTP history, and the hidden state of its last token, which the next MTP row "
    "pairs with); target pages alone would leave the drafter and MTP reading rows that were never written"
)


@dataclass
class _Flight:
    """A launched round and who sat in its rows then, so that late results find their owner or nobody."""

    seats: list[Seat]
    landing: Landing


class Engine:
    """Decodes requests with one method over a fixed number of rows.

    Live requests occupy rows 0..B-1. A round's results are read one round later; a request that ended meanwhile runs
    one inert round. A request is admitted with pages for its prompt and its first rounds, from each cache the method
    has; more are granted ahead of need. Where a pool runs short the request admitted last gives its pages back and
    starts over, with the tokens it has, when there is room. Requests that cannot get pages wait, in order.

    Args:
        checkpoint: models and weights; decoding runs in their dtype on their device.
        method: a method's name or the `Method` itself.
        max_batch: rows.
        max_tokens: longest prompt plus output of one request.
        num_pages: pages of each cache (default: enough for `max_batch` requests of `max_tokens`).
        page_size: rows per page.
        prefill_chunk: prompt tokens per prefill pass.
        verification: `target` keeps the candidates that the target draws itself; `rejection` and `block` draw the
            candidates too and keep them by the rules of that name. All three give the target's distribution.
        mtp_steps: most candidates that MTP proposes before the drafter continues; how many of them a request uses
            follows its recent acceptance. 1 leaves T2.. to the drafter.
        prefix_cache: must be False; the error says why.
        graphs: rounds as CUDA graphs, `exact` for one set per request count, `padded` for buckets of counts; None runs
            them eagerly. Without CUDA the same stages run eagerly at the same sizes. `warmup` captures them, at the
            latest the first `step`.

    Raises:
        ValueError: a size is out of range, or the checkpoint lacks the method's weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        method: str | Method = "dmtp",
        *,
        max_batch: int = 8,
        max_tokens: int = 1024,
        num_pages: int | None = None,
        page_size: int = 16,
        prefill_chunk: int = 64,
        verification: str = "target",
        mtp_steps: int = 1,
        prefix_cache: bool = False,
        graphs: str | None = None,
    ) -> None:
        self.method = get_method(method) if isinstance(method, str) else method
        sizes = {"max_batch": max_batch, "page_size": page_size, "prefill_chunk": prefill_chunk}
        for name, value in (sizes if num_pages is None else sizes | {"num_pages": num_pages}).items():
            if not isinstance(value, int):
                raise TypeError(f"{name}: is {value!r}, must be a whole number")
            if value < 1:
                raise ValueError(f"{name}: is {value}, must be at least 1")
        limit = checkpoint.target.config.max_positions - MAX_ROWS
        if not 2 <= max_tokens <= limit:
            raise ValueError(f"max_tokens: is {max_tokens}, must be between 2 and {limit}")
        if prefix_cache:
            raise ValueError(_NO_PREFIX_CACHE)
        # a round may look MAX_ROWS positions past the last committed token
        max_pages = pages_for(max_tokens + MAX_ROWS, page_size)
        if num_pages is None:
            num_pages = max_batch * max_pages
        self.max_batch, self.max_tokens, self.prefill_chunk = max_batch, max_tokens, prefill_chunk
        self.stack = build_stack(
            checkpoint,
            self.method,
            num_pages=num_pages,
            page_size=page_size,
            max_batch=max_batch,
            verification=verification,
            mtp_steps=mtp_steps,
        )
        self.device = self.stack.target.embed_tokens.weight.device
        self.state = BatchState.create(self.stack, max_batch, max_pages)
        self.seating = Seating(self.stack, self.state, max_batch)
        self.completions: dict[int, Completion] = {}
        self.graphs = None if graphs is None else GraphRunner(self.stack, self.state, graph_sizes(graphs, max_batch))
        self.round_function: Callable[[Stack, BatchState], Any] = self.graphs or decode_round
        self.rounds = self.preemptions = 0
        self._readback = Readback(max_batch, self.stack.rows, self.device)
        self._waiting: deque[int] = deque()
        self._joining: Seat | None = None
        self._flight: _Flight | None = None
        self._events: list[Event] = []  # not yet returned: an error in a step loses none

    @property
    def seats(self) -> list[Seat]:
        """Seats by row."""
        return self.seating.seats

    @property
    def live(self) -> list[int]:
        """Request ids by row."""
        return [seat.request_id for seat in self.seats]

    @property
    def waiting(self) -> list[int]:
        """Request ids not yet admitted, in order."""
        return list(self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises:
            ValueError: it can never run here: too long, ids outside the vocabulary, or more pages than the pool has.
        """
        total = len(request.prompt) + request.max_new_tokens
        if total > self.max_tokens:
            raise ValueError(
                f"prompt: {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {total}, "
                f"the cache holds {self.max_tokens} per request"
            )
        vocabulary = self.stack.target.config.vocab_size
        if min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
            raise ValueError(f"prompt: has a token id outside 0..{vocabulary - 1}")
        for owner, count in self.seating.needs(total).items():
            if count > (most := self.stack.cache(owner).pool.num_pages):
                raise ValueError(f"prompt: the request needs {count} pages of the {owner} cache, its pool has {most}")
        request_id = len(self.completions)
        self.completions[request_id] = Completion(request, histogram=[0] * (self.method.num_candidates + 1))
        self._waiting.append(request_id)
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request now; tokens of a round still in flight are dropped. A finished request is left as it is."""
        completion = self._completion(request_id)
        if completion.finish_reason is not None:
            return
        completion.finish_reason = FinishReason.ABORTED
        if request_id in self._waiting:
            self._waiting.remove(request_id)
        elif self._joining is None or self._joining.request_id != request_id:  # a prefill ends after its chunk
            self.seating.leave(self._seat(request_id))

    def preempt(self, request_id: int) -> None:
        """Take a live request's row and pages; it rejoins later and re-ingests its prompt and the tokens read so
        far."""
        if request_id not in self.live:
            raise ValueError(f"request_id: {request_id} is not live")
        self.seating.leave(self._seat(request_id))
        self._waiting.append(request_id)
        self.preemptions += 1

    def warmup(self, *, progress: bool = False) -> None:
        """Compile and, with `graphs`, capture everything a round launches, before the first request joins.

        Raises:
            RuntimeError: a request has joined already.
        """
        runner = self.graphs or GraphRunner(self.stack, self.state, graph_sizes("exact", self.max_batch))
        runner.warmup(progress=progress, capture=self.graphs is not None)

    def step(self) -> list[Event]:
        """Admit what fits, launch one round, and return what the round before it produced.

        After an error in a round every request starts over from the tokens the host has, at the next step.
        """
        if self.graphs is not None and not self.graphs.ready:
            self.warmup()
        self._admit()
        try:
            for seat in self.seating.grow(self._total):
                self._waiting.appendleft(seat.request_id)
                self.preemptions += 1
            launched = None
            if self.seats:
                view = self.seating.round_view()
                self.round_function(self.stack, view)
                launched = _Flight(list(self.seats), self._readback.start(view))
                self.rounds += 1
            landed, self._flight = self._flight, launched
            if landed is not None:
                self._land(landed)
        except BaseException:
            self._start_over()
            raise
        return self._take_events()

    def _start_over(self) -> None:
        """Preempt everybody: the device may be a round past what the host has read, whose results are lost."""
        self._flight = None
        while self.seats:
            self.seating.leave(self.seats[-1])
        lost = [i for i, c in self.completions.items() if c.finish_reason is None and i not in self._waiting]
        self._waiting.extendleft(reversed(lost))
        self.preemptions += len(lost)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        """Whether a request is waiting, live or in flight."""
        return bool(self._waiting or self.seats or self._flight)

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Submit all requests, decode until every one ended, and return their completions in order.

        Raises:
            ValueError: as `submit`; then none of the requests is queued.
        """
        ids: list[int] = []
        try:
            ids += (self.submit(request) for request in requests)
        except ValueError:
            for request_id in ids:
                self.abort(request_id)
            raise
        while self.busy:
            self.step()
        return [self.completions[i] for i in ids]

    def _completion(self, request_id: int) -> Completion:
        if request_id not in self.completions:
            raise ValueError(f"request_id: no request {request_id}")
        return self.completions[request_id]

    def _seat(self, request_id: int) -> Seat:
        return next(seat for seat in self.seats if seat.request_id == request_id)

    def _total(self, seat: Seat) -> int:
        request = self.completions[seat.request_id].request
        return len(request.prompt) + request.max_new_tokens

    def admit(self) -> list[Event]:
        """Let waiting requests join, in order, while rows and pages last; returns their first tokens. `step` calls
        it."""
        self._admit()
        return self._take_events()

    def _admit(self) -> None:
        while self._waiting and len(self.seats) < self.max_batch:
            completion = self.completions[request_id := self._waiting[0]]
            request = completion.request
            length, total = len(request.prompt) + len(completion.tokens), len(request.prompt) + request.max_new_tokens
            rows = min(length + self.seating.ahead, total)
            if not self.seating.has_room(rows):
                break
            seat = self.seating.sit(request_id, rows)
            self._waiting.popleft()
            seat.known, self._joining = length, seat
            try:
                event = self._join(seat, completion)
            except BaseException:
                # nobody may decode a row that was only half prepared
                completion.finish_reason = FinishReason.ERROR
                raise
            finally:
                self._joining = None
                if completion.finish_reason is not None:
                    self.seating.leave(seat)
            if event is not None:
                self._events.append(event)

    def _join(self, seat: Seat, completion: Completion) -> Event | None:
        """Fill the row of a seat and prefill it; None if it was aborted meanwhile."""
        request, view = completion.request, self.seating.row(seat)
        view.budget.fill_(request.max_new_tokens - len(completion.tokens))
        view.temperature.fill_(request.temperature)
        view.top_k.fill_(request.top_k)
        view.top_p.fill_(request.top_p)
        view.seed.fill_(request.seed)
        stops = list(request.stop_ids) + [-1] * (MAX_STOP_IDS - len(request.stop_ids))
        view.stop_ids.copy_(torch.tensor([stops]))
        prompt = torch.tensor([[*request.prompt, *completion.tokens]], device=self.device)
        first = prefill(self.stack, view, prompt, self.prefill_chunk, lambda: completion.finish_reason is None)
        if first is None:
            return None
        return self._record(completion, seat, first.out_tokens[0].tolist(), int(first.finished[0]), None)

    def _land(self, flight: _Flight) -> None:
        """Read a finished round. Seats that were left since are skipped: their row's result is nobody's."""
        for seat, tokens, finished, matched, error in zip(flight.seats, *flight.landing.read(), strict=True):
            if seat not in self.seats:
                continue
            completion = self.completions[seat.request_id]
            event = self._record(completion, seat, tokens, finished, matched, error)
            seat.known += len(event.tokens)
            if event.finish_reason is not None:
                self.seating.leave(seat)
            self._events.append(event)

    def _record(
        self, completion: Completion, seat: Seat, row: list[int], finished: int, matched: int | None, error: int = 0
    ) -> Event:
        tokens = tuple(token for token in row if token >= 0)
        if error:
            tokens = ()  # its caches are not what its tokens say
        completion.tokens += tokens
        # a live row that emits nothing met logits without a choice (NaN): end it rather than guess
        completion.finish_reason = _REASONS.get(finished) if tokens else FinishReason.ERROR
        if matched is not None and tokens:
            completion.histogram[matched] += 1
        return Event(seat.request_id, tokens, completion.finish_reason)
