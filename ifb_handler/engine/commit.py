"""What comes of a step: pages are counted as computed, answers grow by their tokens, end, or fail.

The last part of an iteration (see `core.py`), and the only way that a request ends.
"""

from __future__ import annotations

import logging
import time

from ifb_handler.engine.answers import joined
from ifb_handler.engine.batch import Batch
from ifb_handler.engine.beam_request import BeamRequest
from ifb_handler.engine.beam_search import Candidates
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from ifb_handler.engine.prefix_cache import PrefixCache
from ifb_handler.engine.request import Request, RequestState
from ifb_handler.engine.sampler import INVALID_TOKEN
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.scheduler import Schedule, Scheduler
from ifb_handler.engine.speculation import Speculator, accepted

_NO_NUMBERS = "the model gave no usable logits (NaN)"

logger = logging.getLogger(__name__)


class Committer:
    """Turns what a step has computed and chosen into the news of its requests.

    prompt_tokens, generation_tokens    counted so far: of the requests that have a first token, and of all answers
    finished                            how many requests ended, by finish reason
    """

    def __init__(self, requests: dict[str, Request], scheduler: Scheduler, cache: PrefixCache | None) -> None:
        """`requests`: the live ones by id; who ends is taken out."""
        self._requests = requests
        self._scheduler = scheduler
        self._cache = cache
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = {reason.value: 0 for reason in FinishReason}

    def commit(
        self,
        schedule: Schedule,
        batch: Batch,
        drafts: dict[Request, list[int]],
        tokens: list[tuple[int, TokenLogprobs | None]],
        speculator: Speculator | None,
    ) -> list[RequestOutput]:
        """Count what was computed, and add to each answer its new token, after those of its draft that came true.

        tokens        one for each of the batch's `sample_tokens`
        speculator    hears what came of its drafts
        """
        sampled: dict[Request, list[tuple[int, TokenLogprobs | None]]] = {}
        for row, token in zip(batch.sample_rows.tolist(), tokens, strict=True):
            sampled.setdefault(batch.requests[row], []).append(token)
        for request, count in schedule.num_tokens.items():
            if request.state is RequestState.FINISHED:  # padding of a static batch
                sampled.pop(request)
                continue
            request.num_computed += count
            if self._cache is not None and not (request in sampled and sampled[request][0][0] == INVALID_TOKEN):
                self._cache.computed(request)
        outputs = []
        for request, choices in sampled.items():
            if isinstance(request.owner, BeamRequest):
                continue
            draft = drafts.get(request, [])
            token_ids = [token_id for token_id, _ in choices]
            num_accepted = accepted(draft, token_ids)
            if num_accepted and token_ids[num_accepted] == INVALID_TOKEN:
                num_accepted -= 1  # it is met again at the next step, and alone
            outputs.append(self._extend(request, choices[: num_accepted + 1]))
            if speculator is not None:
                speculator.settle(request, draft, num_accepted, outputs[-1].token_ids)
        return outputs

    def _extend(self, request: Request, tokens: list[tuple[int, TokenLogprobs | None]]) -> RequestOutput:
        """Add tokens to the answer up to the one that ends it; the keys and values of all but the last are computed."""
        first, *more = tokens
        output = self._append(request, *first)
        for token in more:
            if output.finished:
                break
            request.num_computed += 1
            if self._cache is not None:
                self._cache.computed(request)
            output = joined(output, self._append(request, *token))
        return output

    def advance_beams(
        self, schedule: Schedule, candidates: dict[BeamRequest, Candidates | None]
    ) -> list[RequestOutput]:
        """The beam searches of the step take a step of their own; those that have ended give their answers."""
        for request in schedule.num_tokens:
            if isinstance(request, BeamRequest) and request.is_coming_back and not request.num_pending:
                request.advance(None)
        outputs = [self._advance(request, found) for request, found in candidates.items()]
        return [output for output in outputs if output is not None]

    def _advance(self, request: BeamRequest, candidates: Candidates | None) -> RequestOutput | None:
        if candidates is None:
            return self.fail(request, _NO_NUMBERS)
        self._note_first_token(request)
        self.generation_tokens += len(request.rows)
        request.advance(candidates)
        if not request.search.done:
            self._scheduler.leave_behind(request)
            return None
        count, wanted = len(request.search.hypotheses), request.params.n
        if count < wanted:
            field = _restriction(request.params)
            return self.fail(
                request, f"{field or 'the model'} leaves {count} answers to give, and n is {wanted}", field
            )
        try:
            answers = request.answers(self._output(request))
        except Exception as error:  # one request's text must not end its neighbours
            logger.exception("request %s: its text could not be made", request.request_id)
            return self.fail(request, f"the answers' text could not be made: {error}")
        output = self.finish(request, answers[0].finish_reason)
        output.beams = answers
        return output

    def _append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        matcher = request.matcher
        if matcher is not None and token_id != INVALID_TOKEN:
            matcher.accept(token_id)
        if matcher is not None and matcher.error:
            return self.fail(request, f"the answer's grammar ended it: {matcher.error}", _restriction(request.params))
        if token_id == INVALID_TOKEN:
            field = _restriction(request.params)
            why = f"{field} leaves no token to generate" if field else _NO_NUMBERS
            return self.fail(request, why, field)
        if request.state is RequestState.PREFILL:
            request.move(RequestState.DECODE)
        self._note_first_token(request)
        request.tokens.append(token_id)
        self.generation_tokens += 1
        try:
            news = request.text.append(token_id, complete=matcher is not None and matcher.is_complete)
        except Exception as error:  # one request's text must not end its neighbours
            logger.exception("request %s: its text could not be made", request.request_id)
            return self.fail(request, f"the text of token {token_id} could not be made: {error}")
        output = self._output(request) if news.finish_reason is None else self.finish(request, news.finish_reason)
        output.token_ids, output.text, output.stop_reason = [token_id], news.text, news.stop_reason
        output.logprobs = None if logprobs is None else [logprobs]
        output.prompt_logprobs = request.prompt_logprobs if request.num_generated == 1 else None
        return output

    def _note_first_token(self, request: Request) -> None:
        if request.times.first_token is None:
            request.times.first_token = time.monotonic()
            self.prompt_tokens += request.num_prompt_tokens

    def finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        """Evict: the pages are free from here on."""
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        self.finished[reason.value] += 1
        request.times.finished = time.monotonic()
        request.finish_reason = reason
        request.matcher = None
        return self._output(request)

    def fail(self, request: Request, error: str, param: str | None = None) -> RequestOutput:
        output = self.finish(request, FinishReason.ERROR)
        output.error, output.error_param = error, param
        return output

    def _output(self, request: Request) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_generated_tokens=request.num_generated,
            finish_reason=request.finish_reason,
            times=request.times,
        )


def _restriction(params: SamplingParams) -> str | None:
    """The field that forbids most tokens, if one does: at fault when none is left."""
    if params.structured is not None:
        return params.structured.field
    return next((name for name in ("allowed_token_ids", "bad_words", "logit_bias") if getattr(params, name)), None)
