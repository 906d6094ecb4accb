"""A request: what a frontend hands over, and the state machine that the engine keeps of it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ifb_handler.engine.grammar import Matcher
from ifb_handler.engine.outputs import FinishReason, RequestTimes, TokenLogprobs
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler

if TYPE_CHECKING:
    from ifb_handler.engine.kv_pool import KVPool
    from ifb_handler.engine.prefix_cache import PrefixCache
    from ifb_handler.engine.scheduler import Schedule


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how to continue it.

    request_id    not that of another live request
    priority      with `scheduling_policy: priority` the lower value goes first
    cache_salt    only requests with the same salt share pages of the prefix cache
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str | None = None


class RequestState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_NEXT_STATES = {
    RequestState.WAITING: {RequestState.PREFILL, RequestState.FINISHED},
    RequestState.PREFILL: {RequestState.DECODE, RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.DECODE: {RequestState.PREEMPTED, RequestState.FINISHED},
    RequestState.PREEMPTED: {RequestState.WAITING},
    RequestState.FINISHED: set(),
}


class Request:
    """The engine's own record of a live request; only the engine thread touches it.

    tokens          prompt and generated ids together: after a preemption all of them are prefilled again
    arrival         its number in the order of arrival
    num_preemptions, num_passed_over    how often it lost its pages; how often a later arrival was admitted before it
    swapped, num_swapped    while it waits after a preemption: its pages in host memory, and how many tokens they hold
    num_computed    how many of `tokens` have their keys and values in the pool
    slot            the row of the pool's block tables while it runs, else None
    seed            its own, or one drawn for it; with the index of a token it decides that token's draw
    matcher         how far the answer has come in the grammar that it is held to, if any; it outlives preemption
    prompt_logprobs one for each token of the prompt so far (None for the first), if it asks for them, else None
    first           the request that tells it its prompt_logprobs, another answer to the same prompt; None: itself

    Of the prefix cache:
    cache_namespace        only requests of the same namespace share pages
    num_cached_tokens      prompt tokens that it did not have to compute when it first ran
    cache_node, cache_depth    while it runs: the tree's node of the last page that the cache knows, and its depth

    Of speculative decoding, None until it is first tried:
    acceptance     how much of what was proposed for it came true
    proposer       what the proposer knows of it
    """

    def __init__(
        self,
        request: GenerationRequest,
        arrival: int,
        seed: int,
        text: OutputAssembler,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.params = request.params
        self.arrival = arrival
        self.priority = request.priority
        self.num_preemptions = 0
        self.swapped: list[int] = []
        self.num_swapped = 0
        self.num_passed_over = 0
        self.seed = seed
        self.text = text
        self.matcher = matcher
        self.tokens = array("q", request.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )
        self.first: Request | None = None
        self.num_computed = 0
        self.slot: int | None = None
        self.cache_namespace: Hashable = request.cache_salt
        self.num_cached_tokens = 0
        self.cache_node: Any = None
        self.cache_depth = 0
        self.acceptance: Any = None
        self.proposer: Any = None
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.times = RequestTimes(arrived=time.monotonic())

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.state.value} {self.num_computed}/{len(self.tokens)} slot {self.slot}>"

    @property
    def max_len(self) -> int:
        """Tokens of prompt and longest answer together."""
        return self.num_prompt_tokens + self.text.max_tokens

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed: one while decoding, a prompt's rest in prefill."""
        return len(self.tokens) - self.num_computed

    # What a request with several rows in the batch (`BeamRequest`) says otherwise.

    @property
    def owner(self) -> Request:
        """The request that this is a row of."""
        return self

    @property
    def rows(self) -> Sequence[Request]:
        """What holds its pages while it runs, each in a slot of its own."""
        return [self]

    @property
    def width(self) -> int:
        """Most rows that it ever has."""
        return 1

    @property
    def num_next(self) -> int:
        """Tokens of its next step while decoding, all of them in one step."""
        return 1

    def num_pages(self, num_tokens: int, pool: KVPool, first_page: int = 0) -> int:
        """Most pages that it needs at a time to come to `num_tokens` tokens, if none before `first_page`."""
        return pool.most_pages(num_tokens - first_page * pool.block_size)

    def next_tokens(self, budget: int) -> dict[Request, int]:
        """While decoding: how many tokens of which rows come next. `budget` is at least `num_next`."""
        return {self: 1}

    @property
    def may_swap(self) -> bool:
        """Whether it may go on from what `slot` holds of it."""
        return True

    def extend(self, pool: KVPool, cache: PrefixCache | None, step: Schedule) -> bool:
        """While decoding, take pages for the next tokens. False, and nothing changed, if too few are available."""
        return pool.extend(self.slot, self.num_computed + 1)

    def lose_pages(self) -> None:
        """It has been preempted."""
        self.num_computed = 0
        self.num_preemptions += 1
        self.move(RequestState.PREEMPTED)
        self.move(RequestState.WAITING)

    def share_prompt_logprobs(self, first: Request) -> None:
        """Wait for those of `first` in place of computing them: to be called before either has run."""
        self.first, self.prompt_logprobs = first, first.prompt_logprobs

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether all of its prompt must be computed, even what the prefix cache holds."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def move(self, state: RequestState) -> None:
        if state not in _NEXT_STATES[self.state]:
            raise RuntimeError(f"{self!r} cannot become {state.value}")
        self.state = state
