"""Iteration-level scheduling: before every step decide anew which sequences run, and how many tokens of each.

Orca (Yu et al., OSDI 2022) for scheduling by iteration; Sarathi-Serve (Agrawal et al., OSDI 2024) for one token budget
a step, which a long prompt shares in chunks with everything else that runs. Where systems differ there is a policy
(`policies/`).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.policies import Policies
from ifb_handler.engine.prefix_cache import NOTHING, Prefix, PrefixCache
from ifb_handler.engine.request import Request, RequestState
from ifb_handler.engine.swap_space import SwapSpace

# A request that has been preempted this often is not preempted again while there is another, and comes back only when
# there are pages for its longest answer.
_MOST_PREEMPTIONS = 2


@dataclass
class Schedule:
    """One step.

    budget        tokens that may still be added to it
    num_tokens    tokens to compute, by request
    admitted      who came in from the queue
    preempted     who was sent back to it
    forked        rows that go on in a slot of their own from what another row has computed
    swap_out, copies, swap_in    pages to move before all else, in this order, each (from, to): a preempted request's to
                  host memory; copy-on-write of one whose beginning is known or shared; from host memory those of a
                  request that comes back
    seconds       what it took to decide
    """

    budget: int
    num_tokens: dict[Request, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    forked: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


class Scheduler:
    """`waiting` is in the order of arrival. `ended` are rows that a static batch carries on as padding."""

    def __init__(
        self,
        pool: KVPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache: PrefixCache | None = None,
        policies: Policies | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.policies = policies or Policies()
        self.swap = swap or SwapSpace(0)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Fill one step. It is empty only if nothing waits and nothing runs."""
        step = Schedule(self.max_num_batched_tokens)
        self.swap.next_step()
        if self.pool.window is not None:
            self._slide()
        self.policies.prefill_priority.fill(self, step)
        self._top_up(step)
        step.num_tokens |= dict.fromkeys(self.ended, 1)
        return step

    def _slide(self) -> None:
        """What has fallen out of a request's window goes, and as many pages ahead of it come."""
        for request in self.running:
            for row in request.rows:
                pages = self.pool.slide(row.slot, row.num_computed)
                if pages and self.cache is not None:
                    self.cache.given_up(pages)
            if request.slot is not None:
                # Of pages that others share, giving up makes none available.
                ahead = self.pool.pages_ahead(int(self.pool.first_page[request.slot]), self._num_reserved(request))
                ahead = min(ahead, int(self.pool.num_pages[request.slot]) + self.pool.num_available)
                self.pool.extend(request.slot, ahead * self.pool.block_size)

    def _num_reserved(self, request: Request) -> int:
        """Tokens that a request is to have pages for beforehand, as far as it can use them already."""
        spared = request.num_preemptions >= _MOST_PREEMPTIONS
        return request.max_len if spared else self.policies.kv_reservation.num_tokens(request)

    def decode(self, step: Schedule) -> None:
        """A token for every running answer, as far as the budget goes."""
        for request in [r for r in self.running if r.state is RequestState.DECODE]:
            if not step.budget:
                break
            if request.num_next > step.budget:
                continue
            if request.state is RequestState.DECODE and self._make_room(request, step):
                counts = request.next_tokens(step.budget)
                step.num_tokens |= counts
                step.budget -= sum(counts.values())

    def prefill(self, step: Schedule) -> None:
        """Chunks of the prompts that are being prefilled already.

        While others wait who could come in, half of the budget is kept for them: a short prompt does not wait for the
        end of a very long one. What they do not take is given out after all (`_top_up`).
        """
        kept = step.budget // 2 if self.policies.enable_chunked_prefill and self._may_admit() else 0
        step.budget -= kept
        for request in [r for r in self.running if r.state is RequestState.PREFILL]:
            if request.state is RequestState.PREFILL:
                self._take_chunk(request, step)
        step.budget += kept

    def _top_up(self, step: Schedule) -> None:
        if self.policies.enable_chunked_prefill:
            for request in self.running:
                if step.budget and request.state is RequestState.PREFILL:
                    places = min(request.num_pending, self._num_places(request))
                    more = min(places - step.num_tokens.get(request, 0), step.budget)
                    if more:
                        step.num_tokens[request] = step.num_tokens.get(request, 0) + more
                        step.budget -= more

    def _may_admit(self) -> bool:
        return self.num_free_rows > 0 and bool(self.waiting)

    @property
    def num_free_rows(self) -> int:
        """Rows that the batch has room for at the next step, as far as `max_num_seqs` is concerned."""
        if not self.policies.batching.may_admit(len(self.running)):
            return 0
        return self.max_num_seqs - self._num_rows

    @property
    def _num_rows(self) -> int:
        return sum(request.width for request in self.running)

    def admit(self, step: Schedule) -> None:
        """New requests, as far as budget, places and pages go.

        A request may pass an earlier one that waits for a prefix which a running request is just computing (see
        `prefix_cache.py`): it will then have less to do itself. Otherwise none passes the one whose turn it is.
        """
        if not self._may_admit():
            return
        free = self.num_free_rows
        for request in list(self.policies.ordering.in_order(self.waiting, self.cache)):
            if free < request.width:
                break
            known = NOTHING if self.cache is None or request.swapped else self.cache.match(request)
            if request.swapped:
                known = Prefix(self.pool.first_visible_page(request.num_swapped), [])
            if known is None:
                continue
            num_pending = len(request.tokens) - known.depth * self.pool.block_size
            # All of a static batch comes in at once, whatever the budget.
            if not (self._chunk(num_pending, step) or self.policies.batching.keeps_ended):
                break
            if not self._admit(request, known, step):
                break
            free -= request.width
            step.admitted.append(request)
            self._take_chunk(request, step)

    def _take_chunk(self, request: Request, step: Schedule) -> None:
        chunk = self._chunk(request.num_pending, step)
        if chunk and (self._num_places(request) or self._make_room(request, step)):
            chunk = min(chunk, self._num_places(request))
            step.num_tokens[request] = chunk
            step.budget = max(0, step.budget - chunk)

    def _num_places(self, request: Request) -> int:
        """Tokens that there are pages for beyond those computed: the rest of the prompt, or of a window's width."""
        return int(self.pool.num_pages[request.slot]) * self.pool.block_size - request.num_computed

    def _chunk(self, num_pending: int, step: Schedule) -> int:
        """How many of a prompt's `num_pending` tokens the step has room for."""
        chunk = min(num_pending, step.budget)
        if chunk < num_pending and not self.policies.enable_chunked_prefill:
            # Whole or not at all; but one that is longer than any budget must run some day, alone of its kind.
            prefills = any(r.state is RequestState.PREFILL for r in step.num_tokens)
            return 0 if prefills or not step.budget else num_pending
        return chunk

    def _make_room(self, request: Request, step: Schedule) -> bool:
        """Pages for the next tokens of `request`, if need be from another, or from itself: then it is not True."""
        while not request.extend(self.pool, self.cache, step):
            if self.ended:  # padding gives way
                self._close(self.ended.pop())
                continue
            spared = [r for r in self.running if r.num_preemptions < _MOST_PREEMPTIONS]
            victim = self.policies.ordering.victim(spared or self.running)
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def leave_behind(self, request: BeamRequest) -> None:
        """Rows that none of its beams goes on from give their pages back."""
        for row in request.take_losers():
            self._close(row)

    def _preempt(self, victim: Request, step: Schedule) -> None:
        """Its pages go, to host memory or to be computed again; its tokens stay, and it waits to come back."""
        step.budget += sum(step.num_tokens.pop(row, 0) for row in victim.rows)
        step.preempted.append(victim)
        arrived_now = victim in step.admitted  # its pages are not filled before the step is executed
        if arrived_now:
            step.admitted.remove(victim)
        elif victim.may_swap:
            self._swap_out(victim, step)
        self._forget_moves(victim, step)
        self._release(victim)
        victim.lose_pages()
        bisect.insort(self.waiting, victim, key=lambda r: r.arrival)

    def _swap_out(self, victim: Request, step: Schedule) -> None:
        """If that costs less than to compute them again, its computed pages are to be kept in host memory."""
        first, end = int(self.pool.first_page[victim.slot]), self.pool.pages_for(victim.num_computed)
        if self.swap.worth_it(victim.num_computed, end - first):
            victim.swapped = self.swap.take(end - first)
            victim.num_swapped = victim.num_computed
            step.swap_out += zip(self.pool.tables[victim.slot, first:end].tolist(), victim.swapped, strict=True)

    def _forget_moves(self, victim: Request, step: Schedule) -> None:
        """The pages that were to be filled for it may be another's by the end of this step."""
        step.forked = [row for row in step.forked if row.owner is not victim]
        if step.copies or step.swap_in:
            pages = {page for row in victim.rows for page in self.pool.pages_of(row.slot).tolist()}
            step.copies = [(source, target) for source, target in step.copies if target not in pages]
            step.swap_in = [(source, target) for source, target in step.swap_in if target not in pages]

    def _admit(self, request: Request, known: Prefix, step: Schedule) -> bool:
        """Start a request if pages for all its tokens are available: a prefill does not run out of pages midway.

        Where a window slides, for all that it can use at a time: what it leaves behind pays for what is ahead.
        """
        num_tokens = self._num_reserved(request)
        missing = request.num_pages(max(num_tokens, len(request.tokens) + 1), self.pool, known.first_page)
        missing -= len(known.pages)
        available = self.pool.num_available_beside(known.pages)
        fits = self.policies.capacity.fits(request, missing, available, self.running, self.pool)
        if self.running and not (fits and missing <= available):
            return False
        self.waiting.remove(request)
        for other in self.waiting:
            other.num_passed_over += other.arrival < request.arrival
        request.slot = self.pool.open()
        self.pool.adopt(request.slot, known.pages, known.first_page)
        self.pool.extend(request.slot, self.pool.pages_ahead(known.first_page, num_tokens) * self.pool.block_size)
        request.num_computed = known.depth * self.pool.block_size
        if known.has_tail:  # it may just have been reclaimed
            step.copies.append((known.tail, int(self.pool.tables[request.slot, known.depth])))
            request.num_computed += known.num_tail
        if request.swapped:
            pages = self.pool.tables[request.slot, known.depth : known.depth + len(request.swapped)].tolist()
            step.swap_in += zip(request.swapped, pages, strict=True)
            request.num_computed = request.num_swapped
            self._leave_swap_space(request)
        if self.cache is not None:
            self.cache.start(request, known, request.num_computed)
        request.move(RequestState.PREFILL)
        self.running.append(request)
        return True

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        for row in request.rows:
            self._close(row)
        self._close_ended_batch()

    def _close_ended_batch(self) -> None:
        """A static batch is over when none of it runs: what it has carried on as padding goes, too."""
        if not self.running:
            while self.ended:
                self._close(self.ended.pop())

    def _close(self, request: Request) -> None:
        pages = self.pool.close(request.slot)
        request.slot = None
        if self.cache is not None:
            self.cache.stop(request, pages.tolist())

    def _leave_swap_space(self, request: Request) -> None:
        self.swap.leave(request.swapped)
        request.swapped = []

    def remove(self, request: Request) -> None:
        """Evict a request that has ended, wherever it is; its pages are free at once, unless the batch is static."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self._leave_swap_space(request)
        elif self._may_pad(request):
            # As padding it computes its last token but one again and again, which changes nothing.
            request.num_computed = len(request.tokens) - 2
            self.running.remove(request)
            self.ended.append(request)
            self._close_ended_batch()
        else:
            self._release(request)
        request.move(RequestState.FINISHED)

    def _may_pad(self, request: Request) -> bool:
        """Whether a request that has ended stays in its batch. One that is cancelled may have left too much behind."""
        if not self.policies.batching.keeps_ended or request.state is not RequestState.DECODE or request.slot is None:
            return False
        return self.pool.first_page[request.slot] <= self.pool.first_visible_page(len(request.tokens) - 2)

    def check(self) -> None:
        """The pool's and the cache's books, and that they agree with the requests'; else RuntimeError."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
        arrivals = [r.arrival for r in self.waiting]
        if arrivals != sorted(arrivals):
            raise RuntimeError(f"scheduler: the queue is not in order of arrival: {arrivals}")
        rows = [row for request in self.running for row in request.rows]
        for row in rows:
            if row.slot is None or self._num_places(row) < 0:
                raise RuntimeError(f"scheduler: {row!r} runs without the pages it needs")
        if self._num_rows > self.max_num_seqs or any(len(request.rows) > request.width for request in self.running):
            raise RuntimeError("scheduler: more rows run than may")
        if any(r.slot is not None or r.num_computed for r in self.waiting):
            raise RuntimeError("scheduler: a waiting request holds a slot")
        self.swap.check([page for r in self.waiting for page in r.swapped])
        for row in (*rows, *self.ended):
            if self.pool.first_page[row.slot] > self.pool.first_visible_page(row.num_computed):
                raise RuntimeError(f"scheduler: {row!r} has given back pages that it still sees")
        held = sum(int(self.pool.num_pages[r.slot]) for r in (*rows, *self.ended))
        if held != int(self.pool.num_pages.sum()):
            raise RuntimeError("scheduler: pages are held by no running request")
