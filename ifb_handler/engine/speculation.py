"""Speculative decoding: guess the next few tokens cheaply, and let one step of the model judge all of them at once.

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding" (ICML 2023); Chen et al.,
"Accelerating large language model decoding with speculative sampling" (2023). A decoding request enters the step with
its draft tokens behind its own, and a token is sampled at each place, with the random number of that place, just as it
would be without a draft. A draft token is accepted if it is the token that was sampled before it: so the answer is
token for token what it is without speculation, greedy or drawn, and nothing but the time depends on the draft. For a
proposal that is one token this accepts with probability p(token), as rejection sampling does; the coupling by a common
random number is that of Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative
decoding" (2024).

How much is drafted is decided at each step by what it may bring and what it costs, as in SmartSpec (Liu et al.,
"Optimizing speculative decoding for serving large language models using goodput", 2024): where steps of more tokens
take no longer all is tried, in a full batch only what is almost certain. Drafts take what budget and pages are left
when everyone has been served, and pages that they did not fill go back at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.proposer import Proposer
from ifb_handler.engine.request import Request, RequestState
from ifb_handler.engine.scheduler import Schedule
from ifb_handler.engine.step_time import StepTime

# Before a request has shown anything, its rate of acceptance is taken to be this, as if seen once.
_FIRST_RATE = 0.6
# What an observation's weight is multiplied by at every later one, and at every step that goes by without one.
_MEMORY = 0.97
_FADING = 0.99
# Variance, in tokens, that a step's size must have shown for its slope to be believed: without any, drafts are tried.
_RIDGE = 0.5


class Acceptance:
    """The chance that a request's next draft token is right, if those before it were."""

    def __init__(self) -> None:
        self._hits, self._trials = _FIRST_RATE, 1.0

    @property
    def rate(self) -> float:
        return self._hits / self._trials

    def observe(self, hits: int, trials: int) -> None:
        kept = _MEMORY**trials
        self._hits = _FIRST_RATE + kept * (self._hits - _FIRST_RATE) + hits
        self._trials = 1.0 + kept * (self._trials - 1.0) + trials

    def fade(self) -> None:
        """A step in which nothing was drafted: what was seen counts a little less, until it is tried again."""
        self._hits = _FIRST_RATE + _FADING * (self._hits - _FIRST_RATE)
        self._trials = 1.0 + _FADING * (self._trials - 1.0)


class Speculator:
    """Drafts for the decoding requests of a step, and learns what became of it."""

    def __init__(self, proposer: Proposer, most: int, pool: KVPool) -> None:
        """`most`: draft tokens of one request in a step."""
        self.proposer = proposer
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._most = most
        self._pool = pool
        self._step_time = StepTime()
        self._seconds = 0.0
        self._pages: dict[Request, int] = {}

    def draft(self, schedule: Schedule) -> dict[Request, list[int]]:
        """What some of the step's requests are to go on with; the pages for it are theirs until `settle`."""
        most = {request: room for request in schedule.num_tokens if (room := self._room(request)) > 0}
        offered = self.proposer.begin(most)
        for request in offered:
            request.acceptance = request.acceptance or Acceptance()
        wanted = self._choose(offered, sum(schedule.num_tokens.values()), schedule.budget)
        for request in offered.keys() - wanted.keys():
            request.acceptance.fade()
        self._pages = {request: int(self._pool.num_pages[request.slot]) for request in wanted}
        granted = {request: count for request in wanted if (count := self._take_pages(request, wanted[request]))}
        started = time.perf_counter()
        drafts = self.proposer.propose(granted, schedule.num_tokens)
        self._seconds = time.perf_counter() - started
        return drafts

    def settle(self, request: Request, draft: Sequence[int], num_accepted: int, appended: Sequence[int]) -> None:
        """After a step: of its `draft` so many tokens were accepted, and `appended` is how the answer went on."""
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += num_accepted
        if offer := self.proposer.offers.get(request):  # what was not drafted can be judged, too
            tried = min(len(offer), len(appended))
            hits = accepted(offer, appended)
            request.acceptance.observe(hits, min(tried, hits + 1))
        if request in self._pages and request.state is RequestState.DECODE:
            self._pool.shrink(request.slot, max(self._pages[request], self._pool.pages_for(request.num_computed)))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of decodes alone took `seconds`, drafting included."""
        self._step_time.observe(num_tokens, seconds - self._seconds)

    def _room(self, request: Request) -> int:
        """Most draft tokens that could be of use. Some requests cannot speculate: their logits at one place are
        changed by what the answer holds at the places before it, or their beams compete at every token."""
        params = request.params
        if request.state is not RequestState.DECODE or params.depends_on_answer or params.use_beam_search:
            return 0
        return min(self._most, request.max_len - len(request.tokens) - 1)

    def _choose(self, offered: dict[Request, int], num_tokens: int, budget: int) -> dict[Request, int]:
        """The draft lengths that make the most of the step: useful tokens a second, for a step of `num_tokens` so far.

        A draft's j-th token is useful with probability rate ** j. The likeliest come first, as many as is best.
        """
        if not offered or budget < 1 or not self._step_time.is_known:
            return {}
        requests = list(offered)
        rates = np.fromiter((request.acceptance.rate for request in requests), np.float64, len(requests))
        depths = np.arange(1, self._most + 1)
        chances = rates[:, None] ** depths
        chances[depths > np.fromiter(offered.values(), np.int64, len(requests))[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")[: min(budget, sum(offered.values()))]
        who, depth = np.divmod(order, self._most)
        useful = num_tokens + np.concatenate([[0.0], np.cumsum(chances.ravel()[order])])
        fixed, per_token = self._step_time.fit(_RIDGE)
        rounds = np.concatenate([[0], np.maximum.accumulate(depth + 1)])
        seconds = fixed + per_token * (num_tokens + np.arange(len(useful))) + self.proposer.seconds_per_round * rounds
        best = int(np.argmax(useful / seconds))
        counts = np.bincount(who[:best], minlength=len(requests))
        return {requests[i]: int(counts[i]) for i in np.flatnonzero(counts).tolist()}

    def _take_pages(self, request: Request, count: int) -> int:
        """As many of the draft tokens as there are pages for: nobody gives up any for a draft."""
        while count and not self._pool.extend(request.slot, request.num_computed + 1 + count):
            count -= 1
        return count


def accepted(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many tokens of `draft` are those that were sampled in their places."""
    pairs = zip(draft, sampled, strict=False)
    return next((i for i, (guess, token) in enumerate(pairs) if guess != token), min(len(draft), len(sampled)))
