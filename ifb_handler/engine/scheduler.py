"""Iteration-level scheduling: before every step decide anew which sequences run, and how many tokens of each.

Orca (Yu et al., OSDI 2022) for scheduling by iteration; Sarathi-Serve (Agrawal et al., OSDI 2024) for one token budget
spent on decodes first, then on running prefills, then on new requests, so that no prompt ever stalls a running answer.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.prefix_cache import NOTHING, Prefix, PrefixCache
from ifb_handler.engine.request import Request, RequestState


@dataclass
class Schedule:
    """One step: tokens to compute by request, decodes first; who came in from the queue; who was sent back to it.

    `copies` are pages to copy before all else, (from, to): copy-on-write of a page whose beginning is known.
    `seconds` is what it took to decide.
    """

    num_tokens: dict[Request, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0


class Scheduler:
    """First come, first served.

    `waiting` is in the order of arrival. A request may pass an earlier one for one reason only: the earlier one waits
    for a prefix that a running request is just computing (see `prefix_cache.py`), and will then have less to do itself.
    """

    def __init__(
        self, pool: KVPool, max_num_seqs: int, max_num_batched_tokens: int, cache: PrefixCache | None = None
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Fill one step. It is empty only if nothing waits and nothing runs.

        There are never more decodes than the budget holds: each took at least one token of it to finish its prefill.
        """
        step = Schedule()
        budget = self.max_num_batched_tokens
        for request in [r for r in self.running if r.state is RequestState.DECODE]:
            if request.state is RequestState.DECODE and self._make_room(request, step):
                step.num_tokens[request] = 1
                budget -= 1
        for request in [r for r in self.running if r.state is RequestState.PREFILL]:
            budget -= self._take_chunk(request, budget, step)
        for request in list(self.waiting):
            if not budget or len(self.running) == self.max_num_seqs:
                break
            known = self.cache.match(request) if self.cache is not None else NOTHING
            if known is None:
                continue
            if not self._admit(request, known, step):
                break
            step.admitted.append(request)
            budget -= self._take_chunk(request, budget, step)
        return step

    def _take_chunk(self, request: Request, budget: int, step: Schedule) -> int:
        chunk = min(request.num_pending, budget)
        if chunk:
            step.num_tokens[request] = chunk
        return chunk

    def _make_room(self, request: Request, step: Schedule) -> bool:
        """A page for the next token of `request`, if need be from the latest arrival, which may be `request` itself."""
        while not self.pool.extend(request.slot, request.num_computed + 1):
            victim = max(self.running, key=lambda r: r.arrival)
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """By recompute: its pages go, its tokens stay, and it waits to be prefilled again."""
        self._release(victim)
        victim.num_computed = 0
        victim.move(RequestState.PREEMPTED)
        victim.move(RequestState.WAITING)
        bisect.insort(self.waiting, victim, key=lambda r: r.arrival)

    def _admit(self, request: Request, known: Prefix, step: Schedule) -> bool:
        """Start a request if pages for all its tokens are available: a prefill never runs out of pages midway.

        A page for each running sequence is left free: without it a full pool would admit a request only to preempt it
        a few steps later. With nothing running any request fits (the engine refuses those that never could).
        """
        pages = known.pages
        missing = self.pool.pages_for(len(request.tokens) + 1) - len(pages)
        if self.running and missing > self.pool.num_available_beside(pages) - len(self.running):
            return False
        self.waiting.remove(request)
        request.slot = self.pool.open()
        self.pool.adopt(request.slot, pages)
        self.pool.extend(request.slot, len(request.tokens))
        request.num_computed = len(pages) * self.pool.block_size
        if known.tail is not None and known.tail.page is not None:  # it may just have been reclaimed
            step.copies.append((known.tail.page, int(self.pool.tables[request.slot, len(pages)])))
            request.num_computed += known.num_tail
        if self.cache is not None:
            self.cache.start(request, known, request.num_computed)
        request.move(RequestState.PREFILL)
        self.running.append(request)
        return True

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        pages = self.pool.close(request.slot)
        request.slot = None
        if self.cache is not None:
            self.cache.stop(request, pages.tolist())

    def remove(self, request: Request) -> None:
        """Evict a request that has ended, wherever it is; its pages are free at once."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._release(request)
        request.move(RequestState.FINISHED)

    def check(self) -> None:
        """The pool's and the cache's books, and that they agree with the requests'; else RuntimeError."""
        self.pool.check()
        if self.cache is not None:
            self.cache.check()
        arrivals = [r.arrival for r in self.waiting]
        if arrivals != sorted(arrivals):
            raise RuntimeError(f"scheduler: the queue is not in order of arrival: {arrivals}")
        for request in self.running:
            if request.slot is None or request.num_computed > self.pool.num_pages[request.slot] * self.pool.block_size:
                raise RuntimeError(f"scheduler: {request!r} runs without the pages it needs")
        if any(r.slot is not None or r.num_computed for r in self.waiting):
            raise RuntimeError("scheduler: a waiting request holds a slot")
        held = sum(int(self.pool.num_pages[r.slot]) for r in self.running)
        if held != int(self.pool.num_pages.sum()):
            raise RuntimeError("scheduler: pages are held by no running request")
