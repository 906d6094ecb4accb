"""The engine as Python's own: prompts in, answers out, without a mailbox of one's own."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ifb_handler.engine.answers import joined
from ifb_handler.engine.errors import QueueFullError, RequestError
from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.request import GenerationRequest
from ifb_handler.engine.sampling_params import SamplingParams, check_text

_RETRY_SECONDS = 0.01


class PythonAPI(ABC):
    """`generate` and `stream` over `submit` and `cancel`. `tokenizer` None: prompts are token ids."""

    tokenizer: Any

    @abstractmethod
    def submit(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """See `Engine.submit`."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt (text or token ids) -> its whole answer, in the order of the prompts.

        A prompt with `n` above 1 has its answers one after the other, as `index` tells.
        `params` is for all prompts or one for each. Raises RequestError if a prompt can never run; the others are then
        cancelled. A request that fails later has finish_reason `error` and its `error`.
        """
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        requests = [self._request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        answers = {(r.request_id, i): RequestOutput(r.request_id) for r in requests for i in range(r.params.n)}
        mailbox = Mailbox()
        todo = deque(requests)
        num_live = 0
        try:
            while todo or num_live:
                num_live += self._submit_what_fits(todo, mailbox, wait=not num_live)
                for output in mailbox.collect():
                    key = output.request_id, output.index
                    answers[key] = joined(answers[key], output)
                    num_live -= output.finished
        except BaseException:
            for request in requests:
                self.cancel(request.request_id)
            raise
        return list(answers.values())

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, yielding the news as they come. Closing the iterator cancels the request.

        Raises RequestError as `submit` does, and for a `best_of` above `n`, whose answers are known at the end only.
        """
        request = self._request(prompt, params)
        if request.params.ranked:
            raise RequestError("best_of: answers are not streamed where it is above n", "best_of")
        mailbox = Mailbox()
        self.submit(request, mailbox)
        try:
            num_live = request.params.n
            while num_live:
                for output in mailbox.collect():
                    num_live -= output.finished
                    yield output
        finally:
            self.cancel(request.request_id)

    def _request(self, prompt: str | Sequence[int], params: SamplingParams | None) -> GenerationRequest:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt: this engine has no tokenizer; give token ids", "prompt")
            check_text("prompt", prompt)
            prompt = self.tokenizer.encode(prompt)
        return GenerationRequest(f"python-{uuid.uuid4().hex}", prompt, params or SamplingParams())

    def _submit_what_fits(self, todo: deque[GenerationRequest], mailbox: Mailbox, wait: bool) -> int:
        """Submit from the head of `todo` until the waiting queue is full -> how many answers. `wait`: at least one."""
        submitted = 0
        while todo:
            try:
                self.submit(todo[0], mailbox)
            except QueueFullError:
                if submitted or not wait:
                    break
                time.sleep(_RETRY_SECONDS)  # others fill the queue; nothing of ours will tell us when it has room
            else:
                submitted += todo.popleft().params.n
        return submitted
