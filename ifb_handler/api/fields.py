"""Typed reading of a body's fields. null means not given; a field that nobody knows is ignored, as OpenAI does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ifb_handler.api.errors import bad_field, shown
from ifb_handler.engine.sampling_params import SamplingParams

Fields = Mapping[str, Any]

# Read by the route itself: their form or their default depends on it.
_BY_ROUTE = ("max_tokens", "n", "best_of", "logprobs", "prompt_logprobs", "structured")
_SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _BY_ROUTE)

# Fields that would change the answer and are not served: each with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "prompt_embeds": (),
}
_INSTEAD = {"functions": "use tools", "function_call": "use tool_choice", "suffix": "a prompt is only continued"}


def flag(fields: Fields, name: str, where: str = "", default: bool = False) -> bool:
    """`default` when not given. `where` is the field's full name if it lies inside another."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_field(where or name, f"{shown(value)} is not true or false")
    return value


def integer(fields: Fields, name: str, low: int, where: str = "") -> int | None:
    """None when not given."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < low):
        raise bad_field(where or name, f"{shown(value)} is not an integer of at least {low}")
    return value


def text(fields: Fields, name: str, where: str = "") -> str | None:
    """None when not given. A text holds whole characters: half a surrogate pair could not be sent back."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not is_encodable(value):
        raise bad_field(where or name, f"{shown(value)} is not a text")
    return value


def is_encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def section(fields: Fields, name: str, where: str = "") -> dict[str, Any]:
    """An object inside the body; empty when not given."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_field(where or name, f"{shown(value)} is not an object")
    return value


def include_usage(fields: Fields) -> bool:
    """`stream_options.include_usage`, which OpenAI allows with `stream` only."""
    if fields.get("stream_options") is None:
        return False
    options = section(fields, "stream_options")
    if not flag(fields, "stream"):
        raise bad_field("stream_options", 'is allowed only with "stream": true')
    return flag(options, "include_usage", "stream_options.include_usage")


def sampling_params(
    fields: Fields, max_tokens: int | None, max_tokens_field: str = "max_tokens", **by_route: Any
) -> SamplingParams:
    """The sampling fields; `max_tokens` is what holds when `max_tokens_field` is not given.

    by_route    what the route has read itself; None for what was not asked for
    """
    given = {name: fields.get(name) for name in _SAMPLING} | by_route
    asked = integer(fields, max_tokens_field, 1)
    return SamplingParams(
        max_tokens=max_tokens if asked is None else asked,
        **{name: value for name, value in given.items() if value is not None},
    )


def best_of(fields: Fields, stream: bool) -> int | None:
    """OpenAI refuses it with `stream`: which answers are the best is known only at the end.

    A beam search is streamed even so, each answer as one event: with or without `best_of`, it knows none before.
    """
    value = integer(fields, "best_of", 1)
    if stream and not flag(fields, "use_beam_search") and value is not None and value > (integer(fields, "n", 1) or 1):
        raise bad_field("best_of", f'{value} is above n; with "stream": true every answer is given')
    return value


def names_no_length(fields: Fields, name: str = "max_tokens") -> bool:
    """Whether the answer's length is the route's own."""
    return fields.get(name) is None


def refuse_unserved(fields: Fields) -> None:
    """Raises a 400 for a field that is not served and whose value would change the answer."""
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(_same(value, each) for each in neutral):
            hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise bad_field(name, f"{shown(value)} is not supported{hint}")


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
