"""Continuous batching around `decode_round`: requests join and leave between rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dmtp_kernels.decode.caches import PagedCache, pages_for
from dmtp_kernels.decode.method import Method
from dmtp_kernels.decode.prefill import prefill
from dmtp_kernels.decode.request import Completion, Event, FinishReason, Request
from dmtp_kernels.decode.round import RoundResult, decode_round, refresh
from dmtp_kernels.decode.stack import MAX_ROWS, Stack, build_stack, get_method
from dmtp_kernels.decode.state import MAX_STOP_IDS, BatchState
from dmtp_kernels.models.checkpoint import Checkpoint
from dmtp_kernels.ops.accept import LENGTH, STOPPED, Acceptance

_REASONS = {STOPPED: FinishReason.STOP, LENGTH: FinishReason.LENGTH}


@dataclass(eq=False)
class Seat:
    """A request's stay in a row, with the pages it holds; a request that was preempted gets a new one."""

    request_id: int
    pages: list[tuple[PagedCache, list[int]]]


@dataclass
class _Flight:
    """A launched round and who sat in its rows then, so that late results find their owner or nobody."""

    seats: list[Seat]
    accepted: Acceptance


class Engine:
    """Decodes requests with one method over a fixed number of rows.

    Live requests occupy rows 0..B-1. A round's results are read one round later; a request that ended meanwhile runs
    one inert round. All pages a request can need are taken when it is admitted, from each cache the method has; a
    request that cannot get them waits, in order of submission.

    Args:
        checkpoint: models and weights; decoding runs in their dtype on their device.
        method: a method's name or the `Method` itself.
        max_batch: rows.
        max_tokens: longest prompt plus output of one request.
        num_pages: pages of each cache (default: enough for `max_batch` requests of `max_tokens`).
        page_size: rows per page.
        prefill_chunk: prompt tokens per prefill pass.

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
    ) -> None:
        self.method = get_method(method) if isinstance(method, str) else method
        for name, value in (("max_batch", max_batch), ("page_size", page_size), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name}: is {value}, must be at least 1")
        limit = checkpoint.target.config.max_positions - MAX_ROWS
        if not 2 <= max_tokens <= limit:
            raise ValueError(f"max_tokens: is {max_tokens}, must be between 2 and {limit}")
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
        )
        self.device = self.stack.target.embed_tokens.weight.device
        self.state = BatchState.create(self.stack, max_batch, max_pages)
        self._views = {n: self.state.rows(0, n) for n in range(1, max_batch + 1)}
        self._stale = False
        self.completions: dict[int, Completion] = {}
        self.round_function: Callable[[Stack, BatchState], RoundResult] = decode_round
        self.rounds = 0
        self._waiting: deque[int] = deque()
        self.seats: list[Seat] = []
        self._flight: _Flight | None = None

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
        for cache, count in self._needs(total):
            if count > cache.pool.num_pages:
                raise ValueError(f"prompt: the request needs {count} pages, the pool has {cache.pool.num_pages}")
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
        else:
            self._leave(self._seat(request_id))

    def preempt(self, request_id: int) -> None:
        """Take a live request's row and pages; it rejoins later and re-ingests its prompt and the tokens read so
        far."""
        if request_id not in self.live:
            raise ValueError(f"request_id: {request_id} is not live")
        self._leave(self._seat(request_id))
        self._waiting.append(request_id)

    def step(self) -> list[Event]:
        """Admit what fits, launch one round, and return what the round before it produced."""
        events = self.admit()
        launched = None
        if self.seats:
            view = self._views[len(self.seats)]
            if self._stale:
                refresh(self.stack, view)
                self._stale = False
            result = self.round_function(self.stack, view)
            launched = _Flight(list(self.seats), result.accepted)
            self.rounds += 1
        landed, self._flight = self._flight, launched
        if landed is not None:
            events += self._land(landed)
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

    def _needs(self, total: int) -> list[tuple[PagedCache, int]]:
        """Pages of each cache that a request of `total` tokens takes."""
        stack = self.stack
        needs = []
        for cache in (stack.target_cache, stack.drafter_cache, stack.mtp_cache):
            if cache is not None:
                tail = stack.tail_pages if cache is stack.mtp_cache else 0
                needs.append((cache, pages_for(total + MAX_ROWS, cache.page_size) + tail))
        return needs

    def _seat(self, request_id: int) -> Seat:
        return next(seat for seat in self.seats if seat.request_id == request_id)

    def admit(self) -> list[Event]:
        """Let waiting requests join, in order, while rows and pages last; returns their first tokens. `step` calls
        it."""
        events = []
        while self._waiting and len(self.seats) < self.max_batch:
            request_id = self._waiting[0]
            request = self.completions[request_id].request
            needs = self._needs(len(request.prompt) + request.max_new_tokens)
            if any(count > cache.pool.free for cache, count in needs):
                break
            self._waiting.popleft()
            seat = Seat(request_id, [(cache, cache.pool.allocate(count, request_id)) for cache, count in needs])
            try:
                events.append(self._join(seat))
            except BaseException:
                # nobody may decode a row that was only half prepared
                if seat in self.seats:
                    self._leave(seat)
                self.completions[request_id].finish_reason = FinishReason.ERROR
                raise
            if events[-1].finish_reason is not None:
                self._leave(seat)
        return events

    def _join(self, seat: Seat) -> Event:
        completion = self.completions[seat.request_id]
        request, row = completion.request, len(self.seats)
        self.seats.append(seat)
        view = self.state.rows(row, row + 1)
        view.budget.fill_(request.max_new_tokens - len(completion.tokens))
        view.temperature.fill_(request.temperature)
        view.top_k.fill_(request.top_k)
        view.top_p.fill_(request.top_p)
        view.seed.fill_(request.seed)
        stops = list(request.stop_ids) + [-1] * (MAX_STOP_IDS - len(request.stop_ids))
        view.stop_ids.copy_(torch.tensor([stops]))
        self._set_tables(view, seat)
        prompt = torch.tensor([[*request.prompt, *completion.tokens]], device=self.device)
        first = prefill(self.stack, view, prompt, self.prefill_chunk)
        return self._record(completion, seat.request_id, first.out_tokens[0].tolist(), int(first.finished[0]), None)

    def _set_tables(self, view: BatchState, seat: Seat) -> None:
        stack = self.stack
        for cache, pages in seat.pages:
            if cache is stack.target_cache:
                table = view.target_table
            elif cache is stack.drafter_cache:
                table = view.drafter_table
            else:
                table = view.mtp_table
                tail, pages = pages[-stack.tail_pages :], pages[: -stack.tail_pages]
                slots = [page * cache.page_size + i for page in tail for i in range(cache.page_size)]
                view.tail_slots.copy_(torch.tensor([slots[: 1 + MAX_ROWS]]))
            table.fill_(0)
            table[0, : len(pages)] = torch.tensor(pages, dtype=table.dtype)

    def _land(self, flight: _Flight) -> list[Event]:
        """Read a finished round. Seats that were left since are skipped: their row's result is nobody's."""
        accepted = flight.accepted
        columns = (accepted.out_tokens.tolist(), accepted.finished.tolist(), accepted.accept_len.tolist())
        events = []
        for seat, tokens, finished, matched in zip(flight.seats, *columns, strict=True):
            if seat not in self.seats:
                continue
            event = self._record(self.completions[seat.request_id], seat.request_id, tokens, finished, matched)
            if event.finish_reason is not None:
                self._leave(seat)
            events.append(event)
        return events

    def _record(
        self, completion: Completion, request_id: int, row: list[int], finished: int, matched: int | None
    ) -> Event:
        tokens = tuple(token for token in row if token >= 0)
        completion.tokens += tokens
        # a live row that emits nothing met logits without a choice (NaN): end it rather than guess
        completion.finish_reason = _REASONS.get(finished) if tokens else FinishReason.ERROR
        if matched is not None and tokens:
            completion.histogram[matched] += 1
        return Event(request_id, tokens, completion.finish_reason)

    def _leave(self, seat: Seat) -> None:
        """Free a seat's row and pages; the last row moves into the gap."""
        row, last = self.seats.index(seat), len(self.seats) - 1
        if row != last:
            self.state.move(last, row)
            self.seats[row] = self.seats[last]
        self.seats.pop()
        self.state.clear(last, self.method.num_candidates)
        self._stale = True
        for cache, pages in seat.pages:
            cache.pool.release(pages, seat.request_id)
