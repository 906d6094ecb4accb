"""The several answers to one request (`n`, `best_of`): each is a sequence of its own in the engine.

The sequences share their prompt's pages through the prefix cache and differ in their seeds alone. Only a beam search is
one sequence, whatever its width (`beam_request.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.sampling_params import SamplingParams


class Answers:
    """From the outputs of a request's sequences to what its mailbox hears.

    live    ids of the sequences that have not ended; the request has ended when there is none
    """

    def __init__(self, request_id: str, params: SamplingParams, sequence_ids: Sequence[str], mailbox: Mailbox) -> None:
        """`params`: as the client gave them."""
        self.request_id = request_id
        self.mailbox = mailbox
        self.live = set(sequence_ids)
        self._params = params
        self._index = {sequence_id: index for index, sequence_id in enumerate(sequence_ids)}
        self._held = [RequestOutput(request_id) for _ in sequence_ids] if params.ranked else []

    def take(self, output: RequestOutput) -> list[RequestOutput]:
        """What the mailbox is to hear when a sequence has this to tell; `output` itself is made to say it."""
        index = self._index[output.request_id]
        if output.finished:
            self.live.remove(output.request_id)
        output.request_id, output.index = self.request_id, index
        if self._params.use_beam_search:
            return self._of_beams(output)
        if not self._params.ranked:
            return [output]
        self._held[index] = joined(self._held[index], output)
        return [] if self.live else self._best()

    def _of_beams(self, output: RequestOutput) -> list[RequestOutput]:
        """A beam search is one sequence that gives all answers at once, or ends all of them."""
        answers = output.beams or [dataclasses.replace(output, index=index) for index in range(self._params.n)]
        for answer in answers:
            answer.request_id = self.request_id
        return answers

    def _best(self) -> list[RequestOutput]:
        """The `n` best whole answers; one that has failed or was aborted comes first, for then the request has, too."""
        ranked = sorted(self._held, key=_rank)[: self._params.n]
        for index, output in enumerate(ranked):
            output.index = index
            if self._params.logprobs is None:
                output.logprobs = None
        return ranked


def _rank(output: RequestOutput) -> tuple[int, float]:
    ending = {FinishReason.ERROR: 0, FinishReason.ABORT: 1}.get(output.finish_reason, 2)
    return ending, -sum(token.logprob for token in output.logprobs or ())


def sequence_params(params: SamplingParams) -> SamplingParams:
    """What each of a request's sequences is run with: those that are to be ranked need their log probabilities."""
    return dataclasses.replace(params, logprobs=params.logprobs or 0) if params.ranked else params


def sequence_seed(seed: int, index: int) -> int:
    """Answer 0 is drawn with the request's own seed, as if it were the only one; the others with a hash of it."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")


def joined(so_far: RequestOutput, news: RequestOutput) -> RequestOutput:
    """One output that says what both do."""
    return dataclasses.replace(
        news,
        text=so_far.text + news.text,
        token_ids=so_far.token_ids + news.token_ids,
        logprobs=news.logprobs if so_far.logprobs is None else so_far.logprobs + (news.logprobs or []),
        prompt_logprobs=news.prompt_logprobs if so_far.prompt_logprobs is None else so_far.prompt_logprobs,
    )
