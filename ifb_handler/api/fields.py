"""Typed reading of a body's fields. null means not given; a field that nobody knows is ignored, as OpenAI does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ifb_handler.api.errors import bad_field, shown
from ifb_handler.engine.sampling_params import SamplingParams

Fields = Mapping[str, Any]

_SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name != "max_tokens")

# Fields that would change the answer and are not served: each with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([], ""),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "truncate_prompt_tokens": (),
}


def flag(fields: Fields, name: str, where: str = "") -> bool:
    """False when not given. `where` is the field's full name if it lies inside another."""
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_field(where or name, f"{shown(value)} is not true or false")
    return value


def include_usage(fields: Fields) -> bool:
    """`stream_options.include_usage`, which OpenAI allows with `stream` only."""
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_field("stream_options", f"{shown(options)} is not an object")
    if not flag(fields, "stream"):
        raise bad_field("stream_options", 'is allowed only with "stream": true')
    return flag(options, "include_usage", "stream_options.include_usage")


def sampling_params(fields: Fields, max_tokens: int | None, max_tokens_field: str = "max_tokens") -> SamplingParams:
    """The sampling fields; `max_tokens` is what holds when `max_tokens_field` is not given."""
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    if fields.get(max_tokens_field) is not None:
        max_tokens = fields[max_tokens_field]
        if type(max_tokens) is not int or max_tokens < 1:
            raise bad_field(max_tokens_field, f"{shown(max_tokens)} is not an integer of at least 1")
    return SamplingParams(max_tokens=max_tokens, **given)


def refuse_unserved(fields: Fields) -> None:
    """Raises a 400 for a field that is not served yet and whose value would change the answer."""
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, each) for each in neutral):
            hint = f" (only {' or '.join(shown(each) for each in neutral)})" if neutral else ""
            raise bad_field(name, f"{shown(value)} is not supported yet{hint}")


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
