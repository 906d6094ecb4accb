"""The bare path: a prompt as TorchServe's users send one, answered with text, token ids, finish_reason and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ifb_handler.api import structured_output
from ifb_handler.api.answer import Answer, Asked, Choice, Part, together
from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import (
    Fields,
    flag,
    include_usage,
    integer,
    names_no_length,
    refuse_unserved,
    sampling_params,
)
from ifb_handler.api.limits import check_sampling, handling
from ifb_handler.api.logprobs import finite
from ifb_handler.api.prompts import read_prompt
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import RequestOutput, TokenLogprobs
from ifb_handler.engine.sampling_params import SamplingParams


def read(fields: Fields, model: ServedModel) -> Asked:
    """Raises APIError or RequestError naming the field at fault."""
    model.check_name(fields)
    return Asked(
        parts=[Part(read_prompt(fields.get("prompt"), model), one_answer(fields, model), names_no_length(fields))],
        stream=flag(fields, "stream"),
        include_usage=include_usage(fields),
        **handling(fields, model.config),
    )


def one_answer(fields: Fields, model: ServedModel) -> SamplingParams:
    """The sampling fields where one answer is given."""
    refuse_unserved(fields)
    n = fields.get("n")
    if n is not None and n != 1:
        raise bad_field("n", f"{shown(n)}: one answer is given here; use v1/completions for more")
    if flag(fields, "echo"):
        raise bad_field("echo", "true: the prompt is not repeated here; use v1/completions")
    params = sampling_params(
        fields,
        model.config.default_max_tokens,
        best_of=integer(fields, "best_of", 1),
        logprobs=None if fields.get("logprobs") is False else integer(fields, "logprobs", 0),
        structured=structured_output.read(fields),
    )
    if params.ranked and fields.get("stream"):
        raise bad_field("best_of", 'is not given with "stream": true')
    check_sampling(params, model.config)
    return params


class PlainAnswer(Answer):
    """`{"text", "token_ids", "finish_reason", "usage"}`; streamed: text and token ids that are new, then the rest."""

    def _events(self, choice: Choice, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        news = together(outputs)
        if news.finished:
            return [self._told(choice, news.text, news.token_ids, news.logprobs)]
        if not (news.text or news.token_ids):
            return []
        return [{"text": news.text, "token_ids": news.token_ids} | _logprobs(news.logprobs)]

    def _body(self) -> dict[str, Any]:
        (choice,) = self.choices
        return self._told(choice, "".join(choice.text), choice.token_ids, choice.logprobs)

    def _told(
        self, choice: Choice, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.model.name,
            "text": text,
            "token_ids": token_ids,
            **_logprobs(logprobs),
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "usage": self.usage,
        }


def _logprobs(entries: list[TokenLogprobs] | None) -> dict[str, Any]:
    """One entry a token, if they were asked for."""
    if not entries:
        return {}
    return {
        "logprobs": [
            {"logprob": finite(entry.logprob), "top": [[token, finite(logprob)] for token, logprob in entry.top]}
            for entry in entries
        ]
    }
