"""A small model of the same vocabulary guesses what the large one will say (Leviathan et al. 2023, Chen et al. 2023).

It draws each token with the random number that the large model's token of that place will be drawn with, and under the
same settings, so that the two agree as often as their distributions do; greedy requests, where the likeliest token is
the same. Its keys and values lie in pages of the same numbers as the large model's: whatever becomes of a page, shared,
copied or swapped, becomes of both. It computes them a page at a time, in prefill chunk by chunk, whether or not it
drafts: pages that the prefix cache gives to others hold them, but for a last page whose owner ended before they were
computed. That costs a few acceptances and never an answer.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.errors import ConfigError
from ifb_handler.engine.executor import Executor
from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.proposer import Proposer
from ifb_handler.engine.request import Request, RequestState
from ifb_handler.engine.sampler import INVALID_TOKEN, Sampler
from ifb_handler.models.errors import ModelError
from ifb_handler.models.loading import open_checkpoint
from ifb_handler.models.progress import Progress
from ifb_handler.models.source import ModelFiles, resolve
from ifb_handler.models.tokenizer import load_tokenizer

# Weight of the past in the running mean of what a round takes, and what becomes of it at a step without one, so that
# one that took long by accident is forgotten. Rounds that compute more tokens of a request than this catch up.
_PAST = 0.9
_FADING = 0.99
_MOST_TOKENS = 2


class DraftModelProposer(Proposer):
    """`request.proposer`: how many of the request's tokens have their keys and values in the draft model's pages."""

    def __init__(self, executor: Executor, sampler: Sampler, pool: KVPool) -> None:
        super().__init__()
        self._executor = executor
        self._sampler = sampler
        self._pool = pool

    def start(self, request: Request) -> None:
        if request.params.use_beam_search:
            return
        # A page that was shared or copied before it was full may lack some: what is in the last one is computed again.
        known = request.num_computed // self._pool.block_size * self._pool.block_size
        request.proposer = known if request.proposer is None else min(request.proposer, known)

    def begin(self, most: dict[Request, int]) -> dict[Request, int]:
        return most

    def propose(self, wanted: dict[Request, int], num_tokens: dict[Request, int]) -> dict[Request, list[int]]:
        self.offers = {request: [] for request in wanted}
        drafting = list(wanted)
        if not drafting:
            self.seconds_per_round *= _FADING
        behind = [request for request in num_tokens if request not in wanted and self._is_behind(request, num_tokens)]
        if not drafting and not behind:
            return {}
        self._round(drafting, behind, num_tokens)
        for done in range(1, max(wanted.values(), default=0)):
            if drafting := [r for r in drafting if len(self.offers[r]) == done < wanted[r]]:
                self._round(drafting, [], num_tokens)
        return {request: offer for request, offer in self.offers.items() if offer}

    def _is_behind(self, request: Request, num_tokens: dict[Request, int]) -> bool:
        """Whether the step fills a page of the large model's that is not full of the draft model's yet."""
        if request.state is RequestState.FINISHED or request.proposer is None:
            return False
        size = self._pool.block_size
        return (request.num_computed + num_tokens[request]) // size > self._num_known(request) // size

    def _num_known(self, request: Request) -> int:
        """What was computed of refused draft tokens does not count, and what no layer sees any more is not wanted."""
        behind = int(self._pool.first_page[request.slot]) * self._pool.block_size
        return max(min(request.proposer, request.num_computed), behind)

    def _round(self, drafting: list[Request], behind: list[Request], num_tokens: dict[Request, int]) -> None:
        """One more token for each of those `drafting`; what those `behind` lack."""
        started = time.perf_counter()
        rows, starts, texts = [*drafting, *behind], [], []
        for request in rows:
            offer = self.offers.get(request)
            if offer:
                starts.append(len(request.tokens) + len(offer) - 1)
                texts.append(offer[-1:])
            else:
                start, end = self._num_known(request), request.num_computed + num_tokens[request]
                starts.append(start)
                texts.append(request.tokens[start:end])
            request.proposer = starts[-1] + len(texts[-1])
        batch = Batch.ragged(rows, starts, texts, [1] * len(drafting) + [0] * len(behind), self._pool)
        logits = self._executor.execute_draft(batch)
        if logits is None:
            return
        slots = np.fromiter((r.slot for r in drafting), np.int64, len(drafting))
        generated = [r.num_generated + len(self.offers[r]) for r in drafting]
        for request, token_id in zip(drafting, self._sampler.sample(logits, slots, generated).tolist(), strict=True):
            if token_id != INVALID_TOKEN:
                self.offers[request].append(token_id)
        if len(batch.token_ids) <= _MOST_TOKENS * len(drafting):
            seconds = time.perf_counter() - started
            self.seconds_per_round = _PAST * (self.seconds_per_round or seconds) + (1 - _PAST) * seconds


def find_draft_model(name: str, progress: Progress | None = None) -> ModelFiles:
    """The files of the `speculative_model` of that name. Raises ConfigError if there are none, or none to be read."""
    try:
        files = resolve(name, progress)
        open_checkpoint(files)
    except ModelError as error:
        raise ConfigError(f"speculative_model: {error}") from error
    return files


def check_vocabulary(tokenizer: Any, draft: ModelFiles) -> None:
    """Raises ConfigError if the draft model's tokens are not `tokenizer`'s. One that has no tokenizer passes."""
    try:
        tokens = load_tokenizer(draft).get_vocab()
    except ModelError:
        return
    ours = tokenizer.get_vocab()
    if tokens != ours:
        text, token_id = min(ours.items() ^ tokens.items(), key=lambda item: item[1])
        raise ConfigError(
            f"speculative_model: {draft.name!r} has another vocabulary: {text!r} is token {token_id} of one of the two"
        )
