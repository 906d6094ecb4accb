"""The forms of a prompt, and how each becomes token ids.

A prompt is measured before it is tokenized: megabytes that can never fit are refused at once, and a long text is
tokenized off the thread that serves the others (`tokenize` lets go of the interpreter's lock).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import Fields, integer
from ifb_handler.api.limits import check_batch, check_characters, check_tokens
from ifb_handler.api.served_model import ServedModel


class Prompt(ABC):
    """param         the field that it came in
    characters    how much there is to tokenize; 0 for token ids
    """

    param: str = "prompt"
    characters: int = 0

    @abstractmethod
    def token_ids(self, model: ServedModel) -> list[int]:
        """Raises a 400 APIError when it cannot be tokenized or comes to no token at all."""

    def check_length(self, model: ServedModel) -> None:
        """Raises a 400 when the prompt is sure to be longer than a prompt may be, however it is tokenized."""
        check_characters(self.characters, self.param, model)

    def echo(self, model: ServedModel, token_ids: list[int]) -> str:
        """The prompt as a text, to stand before its answer; `token_ids` is what it came to."""
        return model.tokenizer.decode(token_ids, skip_special_tokens=True)


@dataclass(frozen=True)
class TokenPrompt(Prompt):
    ids: list[int]
    param: str = "prompt"

    def token_ids(self, model: ServedModel) -> list[int]:
        return self.ids

    def check_length(self, model: ServedModel) -> None:
        check_tokens(len(self.ids), self.param, model)
        for token in self.ids:
            if not 0 <= token < model.vocab_size:
                raise bad_field(self.param, f"token id {shown(token)} is not from 0 to {model.vocab_size - 1}")


@dataclass(frozen=True)
class TextPrompt(Prompt):
    text: str
    param: str = "prompt"
    add_special_tokens: bool = True

    @property
    def characters(self) -> int:  # type: ignore[override]
        return len(self.text)

    def token_ids(self, model: ServedModel) -> list[int]:
        return tokenize(model, self.text, self.param, add_special_tokens=self.add_special_tokens)

    def echo(self, model: ServedModel, token_ids: list[int]) -> str:
        return self.text


@dataclass(frozen=True)
class TruncatedPrompt(Prompt):
    """The last `keep` tokens of another prompt."""

    whole: Prompt
    keep: int

    @property
    def param(self) -> str:  # type: ignore[override]
        return self.whole.param

    @property
    def characters(self) -> int:  # type: ignore[override]
        return self.whole.characters

    def token_ids(self, model: ServedModel) -> list[int]:
        return self.whole.token_ids(model)[-self.keep :]

    def check_length(self, model: ServedModel) -> None:
        """It fits, however long it is."""


def tokenize(model: ServedModel, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """A batch of one: only the batch call of `tokenizers` releases the interpreter's lock while it works."""
    try:
        encodings = model.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError):
        raise bad_field(param, "holds half of a surrogate pair, which is no character") from None
    ids = encodings[0].ids
    if not ids:
        raise bad_field(param, "comes to no token at all")
    return ids


def read_prompts(value: object, model: ServedModel, param: str = "prompt", **text_options: Any) -> list[Prompt]:
    """A text, a list of token ids, or a list of texts and lists of token ids. `text_options`: TextPrompt's."""
    if value is None:
        raise bad_field(param, "is missing; it must be a text or a list of token ids")
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [_read_one(value, param, text_options)]
    check_batch(param, len(value), model.config)
    several = len(value) > 1
    return [_read_one(each, f"{param}[{i}]" if several else param, text_options) for i, each in enumerate(value)]


def read_prompt(value: object, model: ServedModel, param: str = "prompt") -> Prompt:
    """Where one answer is given: a text, a list of token ids, or a list of one of either."""
    prompts = read_prompts(value, model, param)
    if len(prompts) > 1:
        raise bad_field(param, f"{len(prompts)} prompts where one answer is given; use v1/completions")
    return prompts[0]


def truncated(fields: Fields, prompt: Prompt, model: ServedModel) -> Prompt:
    """vLLM's `truncate_prompt_tokens`: the last so many; -1: as many as fit."""
    keep = integer(fields, "truncate_prompt_tokens", -1)
    if keep is None:
        return prompt
    if keep == 0:
        raise bad_field("truncate_prompt_tokens", f"{shown(keep)} is not -1 or an integer of at least 1")
    return TruncatedPrompt(prompt, model.max_prompt_tokens if keep == -1 else keep)


def _read_one(value: object, param: str, text_options: dict[str, Any]) -> Prompt:
    if not isinstance(value, (str, list)):
        raise bad_field(param, f"{shown(value)} is not a text or a list of token ids")
    if not value:
        raise bad_field(param, "is empty")
    if isinstance(value, str):
        return TextPrompt(value, param, **text_options)
    for token in value:
        if type(token) is not int:
            raise bad_field(param, f"{shown(token)} is not a token id")
    return TokenPrompt(value, param)
