"""A request that is answered by beam search: one entry in the scheduler's books, several rows in the batch.

Its prompt is prefilled once, by the request itself. From then on its rows are its `Beam`s. After each step the search
says which of them go on, some of them more than once and some not at all: those give their pages up, and before the
next step the others fork (`Scheduler`). Full pages are shared by reference, and of a page that is partly filled every
beam but one gets a copy.

A preempted request's beams are computed again: first what they have in common, as if that were the prompt, then each
beam's own rest, and they go on together.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.beam_search import BeamSearch, Candidates, Hypothesis, rank
from ifb_handler.engine.logit_edits import LogitEdits
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request, RequestState
from ifb_handler.engine.stopping import OutputAssembler

if TYPE_CHECKING:
    from ifb_handler.engine.kv_pool import KVPool
    from ifb_handler.engine.prefix_cache import PrefixCache
    from ifb_handler.engine.scheduler import Schedule


class Beam(Request):
    """One row. It goes on from what `parent`, a row of the same request, has computed."""

    def __init__(self, owner: BeamRequest, tokens: Sequence[int], parent: Request) -> None:
        same = dataclasses.replace(owner.asked, prompt_token_ids=tokens)
        super().__init__(same, owner.arrival, owner.seed, owner.text)
        self._owner = owner
        self.num_prompt_tokens = owner.num_prompt_tokens
        self.prompt_logprobs = None
        self.times = owner.times
        self.num_computed = parent.num_computed
        self.state = RequestState.DECODE if self.num_pending == 1 else RequestState.PREFILL

    @property
    def owner(self) -> BeamRequest:
        return self._owner


class BeamRequest(Request):
    """`tokens` is the prompt or, when it comes back from preemption, what its beams have in common.

    search     what is known of its answers
    beams      its rows; none before its own tokens are computed
    parents    for each of the search's running beams the row that it continues; None: the rows are those beams
    """

    def __init__(
        self,
        request: GenerationRequest,
        arrival: int,
        texts: Sequence[OutputAssembler],
        eos_token_ids: Sequence[int],
    ) -> None:
        """`texts`: one for each of the `n` answers."""
        super().__init__(request, arrival, 0, texts[0])
        params = request.params
        ends = frozenset([*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)])
        self.asked = request
        self.texts = texts
        self.search = BeamSearch(params.width, ends, texts[0].max_tokens, params.length_penalty, params.early_stopping)
        self.beams: list[Beam] = []
        self.parents: list[Request] | None = None

    @property
    def rows(self) -> Sequence[Request]:
        return self.beams or [self]

    @property
    def width(self) -> int:
        return self.search.width

    @property
    def num_next(self) -> int:
        return len(self.search.running)

    @property
    def may_swap(self) -> bool:
        return self.state is RequestState.PREFILL

    def num_pages(self, num_tokens: int, pool: KVPool, first_page: int = 0) -> int:
        """Every beam has pages of its own for all but the full ones of `tokens`.

        A sliding window does not count: after a preemption each beam has pages for all that it computes again.
        """
        shared = len(self.tokens) // pool.block_size
        num_tokens = max(num_tokens, self.num_prompt_tokens + self.search.length)
        return shared + self.width * (pool.pages_for(num_tokens) - shared) - first_page

    def next_tokens(self, budget: int) -> dict[Request, int]:
        """All beams step together: one that is behind, after a preemption, first computes all but its last token."""
        behind = [beam for beam in self.beams if beam.num_pending > 1]
        if not behind:
            for beam in self.beams:
                if beam.state is RequestState.PREFILL:
                    beam.move(RequestState.DECODE)
            return dict.fromkeys(self.beams, 1)
        counts: dict[Request, int] = {}
        for beam in behind:
            if count := min(beam.num_pending - 1, budget):
                counts[beam] = count
                budget -= count
        return counts

    def tokens_of(self, index: int) -> Sequence[int]:
        """Of the search's running beam of that number, with the prompt's; quickly, where one is new to its parent."""
        path, tokens = self.search.running[index], self.parents[index].tokens
        if len(tokens) + 1 == self.num_prompt_tokens + self.search.length:
            return tokens + array("q", [path.token_id])
        return self.tokens[: self.num_prompt_tokens] + array("q", path.token_ids)

    def extend(self, pool: KVPool, cache: PrefixCache | None, step: Schedule) -> bool:
        """Once after each step, fork: the last beam of each row takes its place, the others share its pages."""
        if self.slot is not None and self.parents is None:
            return super().extend(pool, cache, step)
        if self.parents is None:
            return True
        last = {parent: index for index, parent in enumerate(self.parents)}
        forks = [parent for index, parent in enumerate(self.parents) if last[parent] != index]
        num_tokens = self.num_prompt_tokens + self.search.length
        wanted = pool.pages_for(num_tokens)
        missing = sum(wanted - parent.num_computed // pool.block_size for parent in forks)
        missing += sum(max(0, wanted - int(pool.num_pages[parent.slot])) for parent in last)
        if missing > pool.num_available:
            return False
        beams: list[Beam] = []
        for index, parent in enumerate(self.parents):
            if last[parent] != index:
                beam = Beam(self, self.tokens_of(index), parent)
                beam.slot, copies = pool.fork(parent.slot, parent.num_computed)
                if cache is not None:
                    cache.fork(parent, beam)
                step.copies += copies
                step.forked.append(beam)
            elif isinstance(parent, Beam):
                beam = parent
                beam.tokens.append(self.search.running[index].token_id)
            else:
                beam = Beam(self, self.tokens_of(index), self)
                beam.slot, self.slot = self.slot, None
                if cache is not None:
                    cache.hand_over(self, beam)
                step.forked.append(beam)
            pool.extend(beam.slot, num_tokens)
            beams.append(beam)
        self.beams, self.parents = beams, None
        return True

    def take_losers(self) -> list[Beam]:
        """The rows that no beam continues, which are no longer its own."""
        losers = [beam for beam in self.beams if beam not in self.parents]
        self.beams = [beam for beam in self.beams if beam in self.parents]
        return losers

    @property
    def is_coming_back(self) -> bool:
        """What its beams have in common is being computed again, so that nothing is to be ranked."""
        return not self.beams and bool(self.search.running)

    def advance(self, candidates: Candidates | None) -> None:
        """All tokens of its rows have been computed; None: it is just coming back."""
        if self.state is RequestState.PREFILL:
            self.move(RequestState.DECODE)
        rows = self.rows
        if candidates is None:
            self.parents = [self] * len(self.search.running)
        else:
            self.parents = [rows[beam] for beam in self.search.advance(candidates)]

    def answers(self, common: RequestOutput) -> list[RequestOutput]:
        """The `n` best, once the search is done. `common`: what all of them say."""
        common.prompt_logprobs = self.prompt_logprobs
        return [
            _answer(hypothesis, text, dataclasses.replace(common, index=index))
            for index, (hypothesis, text) in enumerate(zip(self.search.hypotheses, self.texts, strict=False))
        ]

    def lose_pages(self) -> None:
        super().lose_pages()
        self.beams, self.parents = [], None
        paths = [path.token_ids for path in self.search.running]
        if paths:
            common = _num_common(paths)
            del self.tokens[self.num_prompt_tokens :]
            self.tokens.extend(paths[0][: min(common, len(paths[0]) - 1)])


def rank_beams(batch: Batch, logits: torch.Tensor, edits: LogitEdits) -> dict[BeamRequest, Candidates | None]:
    """For each search in the batch that `logits`, float32 [S, V], came of: its candidates, None for lack of numbers."""
    rows: dict[BeamRequest, list[int]] = {}
    for row, at in enumerate(batch.sample_rows.tolist()):
        owner = batch.requests[at].owner
        if isinstance(owner, BeamRequest) and not owner.is_coming_back:
            rows.setdefault(owner, []).append(row)
    if not rows:
        return {}
    every = [row for of_one in rows.values() for row in of_one]
    beams = [batch.requests[at] for at in batch.sample_rows[every].tolist()]
    logprobs = logits[every].log_softmax(-1)
    slots = np.fromiter((beam.slot for beam in beams), np.int64)
    edits.apply(logprobs, slots, np.fromiter((beam.num_generated for beam in beams), np.int64), None)
    return dict(zip(rows, rank(logprobs, [request.search for request in rows]), strict=True))


def _answer(hypothesis: Hypothesis, text: OutputAssembler, output: RequestOutput) -> RequestOutput:
    output.token_ids = hypothesis.path.token_ids
    output.num_generated_tokens = len(output.token_ids)
    output.score = hypothesis.score
    news = [text.append(token_id) for token_id in output.token_ids]
    output.text = "".join(delta.text for delta in news)
    output.finish_reason, output.stop_reason = news[-1].finish_reason, news[-1].stop_reason
    return output


def _num_common(paths: Sequence[Sequence[int]]) -> int:
    """How many tokens all have in common from their beginning: as many as the first and the last in order have."""
    first, last = min(paths), max(paths)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), len(first))
