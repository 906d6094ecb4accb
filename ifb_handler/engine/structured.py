"""The form that an answer is held to: plain data. `grammar.py` makes masks of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ifb_handler.engine.errors import RequestError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
MAX_CHARACTERS = 131_072
"""Longest schema, regex, grammar, or choices with their JSON punctuation."""


@dataclass(frozen=True)
class StructuredOutput:
    """Validated on construction as far as its form goes: RequestError names the field, the value and what is allowed.

    kind     json_schema, json_object, regex, choice or grammar
    value    json_schema: the schema, a mapping (Draft 2020-12; a keyword that cannot be enforced is refused later on)
             json_object: None; any JSON object
             regex: a regular expression of Rust's `regex` crate, without look-around; the whole answer matches it
             choice: a list of texts, of which the answer is one
             grammar: a context-free grammar in llguidance's variant of Lark, or in the GBNF of llama.cpp
    field    the name of the client's field that asked for it, for errors
    text     `value` as text, JSON where it is no text: with `kind` it is all that a grammar is made of
    """

    kind: str
    value: Any = dataclasses.field(default=None, compare=False)
    field: str = dataclasses.field(default="structured", compare=False)
    text: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise self.error(f"{self.kind!r} is not one of {', '.join(KINDS)}")
        text = getattr(self, f"_{self.kind}")()
        if len(text) > MAX_CHARACTERS:
            raise self.error(f"the {self.kind} has {len(text)} characters; at most {MAX_CHARACTERS} are allowed")
        object.__setattr__(self, "text", text)

    def error(self, message: str) -> RequestError:
        return RequestError(f"{self.field}: {message}", self.field)

    def _json_schema(self) -> str:
        if not isinstance(self.value, Mapping):
            raise self.error(f"{_shown(self.value)} is not a JSON schema, an object")
        try:
            return json.dumps(self.value, allow_nan=False)  # in the order given: it is that of the answer's properties
        except (TypeError, ValueError, RecursionError) as error:
            raise self.error(f"the JSON schema cannot be written as JSON: {error}") from None

    def _json_object(self) -> str:
        if self.value is not None:
            raise self.error(f"json_object takes no value, and {_shown(self.value)} was given")
        return ""

    def _choice(self) -> str:
        choices = self.value
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
            raise self.error(f"{_shown(choices)} is not a list of texts to choose from")
        return json.dumps([self._whole_text(choice) for choice in choices])

    def _regex(self) -> str:
        return self._whole_text(self.value)

    def _grammar(self) -> str:
        return self._whole_text(self.value)

    def _whole_text(self, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self.error(f"{_shown(value)} is not a non-empty text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{_shown(value)} holds half a surrogate pair") from None
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
