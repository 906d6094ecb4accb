"""What a client asked for, and its answer as it grows: as server-sent events or as one JSON body.

A request may hold several prompts, and each may be answered `n` times. Each prompt goes to the engine as a request of
its own; each answer to one is a choice here, and the choices are numbered prompt by prompt.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ifb_handler.api import sse
from ifb_handler.api.errors import APIError
from ifb_handler.api.limits import check_sequences, fit
from ifb_handler.api.prompts import Prompt
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from ifb_handler.engine.request import GenerationRequest
from ifb_handler.engine.sampling_params import SamplingParams

_PART = "/"  # between a request's id and a prompt's number; TorchServe's ids are UUIDs


@dataclass(frozen=True)
class Part:
    """One prompt and how to continue it.

    may_be_cut    `params.max_tokens` is the route's own: less will do where there is room for less
    priority      in place of the request's, as `cache_salt` is; None: the request's
    """

    prompt: Prompt
    params: SamplingParams
    may_be_cut: bool = False
    priority: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A generation request as its client put it, checked field by field; only the prompts' tokens are unknown yet.

    timeout       seconds until it is ended with an error; None: never
    priority      with `scheduling_policy: priority` the lower value goes first
    cache_salt    only requests with the same one share pages of the prefix cache
    """

    parts: Sequence[Part]
    stream: bool = False
    include_usage: bool = False
    timeout: float | None = None
    priority: int = 0
    cache_salt: str | None = None

    @property
    def characters(self) -> int:
        """How much there is to tokenize."""
        return sum(part.prompt.characters for part in self.parts)

    @property
    def grammars(self) -> list[SamplingParams]:
        """The parameters that hold an answer to a form, which must be compiled."""
        return [part.params for part in self.parts if part.params.structured is not None]

    def check_sizes(self, model: ServedModel) -> None:
        """Raises a 400 APIError for a prompt that can never fit, or for more answers than the engine's queue holds."""
        check_sequences(sum(part.params.num_sequences for part in self.parts), model.config)
        for part in self.parts:
            part.prompt.check_length(model)

    def token_ids(self, model: ServedModel) -> list[list[int]]:
        """Of each prompt. Raises a 400 APIError."""
        return [part.prompt.token_ids(model) for part in self.parts]


@dataclass
class Choice:
    """One answer to one prompt, as far as it has come."""

    index: int
    part: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    opened: bool = False  # something has been said of it


class Answer(ABC):
    """One request's answer. Feed it every output once, in order, by `stream` or by `add`.

    id_prefix    what the answer's id begins with
    done         what a stream ends with
    """

    id_prefix = ""
    done = sse.DONE

    def __init__(self, asked: Any, request_id: str, model: ServedModel, public_id: str | None = None) -> None:
        """`public_id`: the client's own name for the request, which its answer's id then carries."""
        self.asked = asked
        self.model = model
        self.id = f"{self.id_prefix}{public_id or request_id}"
        self.created = int(time.time())
        num_parts = len(asked.parts)
        self.engine_ids = [request_id if num_parts == 1 else f"{request_id}{_PART}{i}" for i in range(num_parts)]
        self.choices: list[Choice] = []
        self._first: list[int] = []  # of each part, its first choice
        for i, part in enumerate(asked.parts):
            self._first.append(len(self.choices))
            self.choices += [Choice(len(self.choices) + j, i) for j in range(part.params.n)]
        self.prompt_token_ids: list[list[int]] = []
        self.prompt_logprobs: list[list[TokenLogprobs | None] | None] = [None] * num_parts
        self._cached_tokens = [0] * num_parts

    def requests(self, prompt_token_ids: list[list[int]]) -> list[GenerationRequest]:
        """What the engine is to do, once the prompts are known. Raises a 400 APIError for one that is too long."""
        self.prompt_token_ids = prompt_token_ids
        return [
            GenerationRequest(
                engine_id,
                ids,
                fit(part.params, len(ids), part.prompt.param, self.model, part.may_be_cut),
                self.asked.priority if part.priority is None else part.priority,
                part.cache_salt or self.asked.cache_salt,
            )
            for engine_id, ids, part in zip(self.engine_ids, prompt_token_ids, self.asked.parts, strict=True)
        ]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def add(self, output: RequestOutput) -> Choice:
        """Take an output into the whole -> the choice that it is news of.

        Raises the APIError that the client must hear if it says that all is lost.
        """
        if output.finish_reason is FinishReason.ERROR:
            status = 400 if output.error_param else 500
            message = f"generation failed: {output.error or 'the engine gave no reason'}"
            raise APIError(status, message, param=output.error_param)
        if output.finish_reason is FinishReason.ABORT:
            raise APIError(503, "generation was aborted: the engine is stopping", code="engine_stopped")
        _, _, part = output.request_id.partition(_PART)
        choice = self.choices[self._first[int(part or 0)] + output.index]
        choice.text.append(output.text)
        choice.token_ids.extend(output.token_ids)
        choice.logprobs.extend(output.logprobs or ())
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[choice.part] = output.prompt_logprobs
        self._cached_tokens[choice.part] = max(self._cached_tokens[choice.part], output.num_cached_tokens)
        return choice

    def stream(self, outputs: Sequence[RequestOutput]) -> str:
        """The events for these outputs as one piece of text; empty when they say nothing that a client would see.

        Outputs of a choice that arrive together make one event. Raises like `add`.
        """
        news: dict[int, list[RequestOutput]] = {}
        for output in outputs:
            news.setdefault(self.add(output).index, []).append(output)
        events: list[dict[str, Any]] = []
        for index, outputs_of_it in news.items():
            choice = self.choices[index]
            if not choice.opened:
                events += self._opening(choice)
            events += self._events(choice, outputs_of_it)
            choice.opened = True
        if self.finished and self.asked.include_usage:
            events += self._closing()
        return "".join(map(sse.event, events)) + (self.done if self.finished else "")

    def whole(self) -> str:
        """The one JSON body, once the last output has been added."""
        return sse.compact(self._body())

    @property
    def usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.prompt_token_ids))
        generated = sum(len(choice.token_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed."""
        return sum(self._cached_tokens)

    @classmethod
    def status_of(cls, error: APIError) -> int:
        """The HTTP status of an error in this form."""
        return error.status

    @classmethod
    def error_body(cls, error: APIError) -> dict[str, Any]:
        """An error in this form."""
        return error.body()

    def _opening(self, choice: Choice) -> list[dict[str, Any]]:
        """The event before a choice's first token, where the form has one."""
        return []

    def _closing(self) -> list[dict[str, Any]]:
        """The event after the last token when usage was asked for, where the form has one."""
        return []

    @abstractmethod
    def _events(self, choice: Choice, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """The events for what is new of a choice; none when it says nothing that a client would see."""

    @abstractmethod
    def _body(self) -> dict[str, Any]: ...


def owner(engine_id: str) -> str:
    """The id of the request that an engine's request is a part of."""
    return engine_id.partition(_PART)[0]


def together(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of one choice, as one."""
    if len(outputs) == 1:
        return outputs[0]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return dataclasses.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
    )
