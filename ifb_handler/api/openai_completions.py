"""OpenAI's `POST v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ifb_handler.api import structured_output
from ifb_handler.api.answer import Answer, Asked, Choice, Part, together
from ifb_handler.api.errors import bad_field
from ifb_handler.api.fields import (
    Fields,
    best_of,
    flag,
    include_usage,
    integer,
    names_no_length,
    refuse_unserved,
    sampling_params,
)
from ifb_handler.api.limits import check_sampling, handling
from ifb_handler.api.logprobs import CompletionLogprobs, prompt_logprobs
from ifb_handler.api.prompts import read_prompts, truncated
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from ifb_handler.engine.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class CompletionAsked(Asked):
    """echo             the prompt stands before its answer
    only_echo        nothing but the prompt: `max_tokens` 0, as for scoring a text
    show_prompt      vLLM's `prompt_logprobs` were asked for by that name
    """

    echo: bool = False
    only_echo: bool = False
    show_prompt: bool = False


def read(fields: Fields, model: ServedModel) -> CompletionAsked:
    """Raises APIError or RequestError naming the field at fault."""
    model.check_name(fields)
    refuse_unserved(fields)
    stream, echo = flag(fields, "stream"), flag(fields, "echo")
    logprobs = None if fields.get("logprobs") is False else integer(fields, "logprobs", 0)
    given = integer(fields, "prompt_logprobs", 0)
    if given is not None and stream:
        raise bad_field("prompt_logprobs", 'is not given with "stream": true')
    only_echo = echo and fields.get("max_tokens") == 0 and fields.get("max_tokens") is not False
    params = sampling_params(
        {**fields, "max_tokens": 1} if only_echo else fields,
        DEFAULT_MAX_TOKENS,
        n=fields.get("n"),
        best_of=best_of(fields, stream),
        logprobs=logprobs,
        prompt_logprobs=logprobs if given is None and echo else given,
        structured=structured_output.read(fields),
    )
    check_sampling(params, model.config)
    add_special_tokens = flag(fields, "add_special_tokens", default=True)
    prompts = read_prompts(fields.get("prompt"), model, add_special_tokens=add_special_tokens)
    return CompletionAsked(
        parts=[Part(truncated(fields, prompt, model), params, names_no_length(fields)) for prompt in prompts],
        stream=stream,
        include_usage=include_usage(fields),
        **handling(fields, model.config),
        echo=echo,
        only_echo=only_echo,
        show_prompt=given is not None,
    )


class CompletionAnswer(Answer):
    """Objects `text_completion`; chunks and the whole have the same shape."""

    id_prefix = "cmpl-"
    asked: CompletionAsked

    def __init__(
        self, asked: CompletionAsked, request_id: str, model: ServedModel, public_id: str | None = None
    ) -> None:
        super().__init__(asked, request_id, model, public_id)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    @property
    def usage(self) -> dict[str, Any]:
        usage = super().usage
        if self.asked.only_echo:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage | {"prompt_tokens_details": {"cached_tokens": self.num_cached_tokens}}

    def _events(self, choice: Choice, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        news = together(outputs)
        if not (news.text or news.logprobs or news.finished or (self.asked.echo and not choice.opened)):
            return []
        told = self._choice(choice, news.text, news.token_ids, news.logprobs, first=not choice.opened)
        return [self._envelope([told]) | ({"usage": None} if self.asked.include_usage else {})]

    def _closing(self) -> list[dict[str, Any]]:
        return [self._envelope([]) | {"usage": self.usage}]

    def _body(self) -> dict[str, Any]:
        choices = [self._choice(c, "".join(c.text), c.token_ids, c.logprobs, first=True) for c in self.choices]
        return self._envelope(choices) | {"usage": self.usage}

    def _choice(
        self,
        choice: Choice,
        text: str,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs] | None,
        first: bool,
    ) -> dict[str, Any]:
        """What is new of a choice; `first`: an echoed prompt stands before it."""
        part = self.asked.parts[choice.part]
        prompt_ids = self.prompt_token_ids[choice.part]
        if self.asked.only_echo:
            text, token_ids, entries = "", (), ()
        logprobs = None
        if part.params.logprobs is not None:
            logprobs = self._told_logprobs(choice, part.params, token_ids, entries or (), first)
        if self.asked.echo and first:
            text = part.prompt.echo(self.model, prompt_ids) + text
        reason = FinishReason.LENGTH if self.asked.only_echo else choice.finish_reason
        told = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason and str(reason),
            "stop_reason": None if self.asked.only_echo else choice.stop_reason,
        }
        if self.asked.show_prompt:
            told["prompt_logprobs"] = prompt_logprobs(self.model, self.prompt_logprobs[choice.part] or [])
        return told

    def _told_logprobs(
        self,
        choice: Choice,
        params: SamplingParams,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        first: bool,
    ) -> dict[str, Any]:
        prompt_ids = self.prompt_token_ids[choice.part]
        teller = self._logprobs.get(choice.index)
        if teller is None:
            context = () if self.asked.echo else prompt_ids
            teller = self._logprobs[choice.index] = CompletionLogprobs(self.model, context, params.skip_special_tokens)
        if self.asked.echo and first:
            entries = [*(self.prompt_logprobs[choice.part] or [None] * len(prompt_ids)), *entries]
            token_ids = [*prompt_ids, *token_ids]
        return teller.push(token_ids, entries, params.logprobs or 0)

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }
