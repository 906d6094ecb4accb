"""The three forms of a prompt, and how each becomes token ids.

A prompt is measured before it is tokenized: megabytes that can never fit are refused at once, and a long text is
tokenized off the thread that serves the others (`tokenize` lets go of the interpreter's lock).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ifb_handler.api.errors import APIError, bad_field, shown
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
        """Raises a 400 when the prompt is sure to be longer than the model's length, however it is tokenized."""
        fewest = model.fewest_tokens(self.characters)
        if fewest >= model.max_model_len:
            raise bad_field(
                self.param,
                f"{self.characters} characters are at least {fewest} tokens; prompt and answer hold at most "
                f"{model.max_model_len} tokens",
            )


@dataclass(frozen=True)
class TokenPrompt(Prompt):
    ids: list[int]
    param: str = "prompt"

    def token_ids(self, model: ServedModel) -> list[int]:
        return self.ids

    def check_length(self, model: ServedModel) -> None:
        for token in self.ids:
            if not 0 <= token < model.vocab_size:
                raise bad_field(self.param, f"token id {shown(token)} is not from 0 to {model.vocab_size - 1}")


@dataclass(frozen=True)
class TextPrompt(Prompt):
    text: str
    param: str = "prompt"

    @property
    def characters(self) -> int:  # type: ignore[override]
        return len(self.text)

    def token_ids(self, model: ServedModel) -> list[int]:
        return tokenize(model, self.text, self.param, add_special_tokens=True)


@dataclass(frozen=True)
class ChatPrompt(Prompt):
    """Messages, to be laid out by the model's chat template. The template writes the special tokens, BOS too."""

    messages: list[dict[str, Any]]
    param: str = "messages"

    @property
    def characters(self) -> int:  # type: ignore[override]
        return sum(len(message["content"]) for message in self.messages)

    def token_ids(self, model: ServedModel) -> list[int]:
        if not model.tokenizer.chat_template:
            raise APIError(
                400,
                f"the model {model.name!r} has no chat template: use v1/completions, or a tokenizer that has one",
                param=self.param,
                code="no_chat_template",
            )
        try:
            text = model.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template refuses in its own words: roles out of order, for instance
            raise bad_field(self.param, f"the model's chat template refuses them: {error}") from error
        return tokenize(model, text, self.param, add_special_tokens=False)


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


def read_prompt(value: object, param: str = "prompt") -> Prompt:
    """A text, a list of token ids, or a list of one of either."""
    if value is None:
        raise bad_field(param, "is missing; it must be a text or a list of token ids")
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise bad_field(param, f"{len(value)} prompts in one request are not supported yet; send one")
        value = value[0]
    if not isinstance(value, (str, list)):
        raise bad_field(param, f"{shown(value)} is not a text or a list of token ids")
    if not value:
        raise bad_field(param, "is empty")
    if isinstance(value, str):
        return TextPrompt(value, param)
    for token in value:
        if type(token) is not int:
            raise bad_field(param, f"{shown(token)} is not a token id")
    return TokenPrompt(value, param)
