"""What the API needs to know of the model that it answers for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ifb_handler.api.errors import APIError, shown


@dataclass(frozen=True)
class ServedModel:
    """name                 the name in answers
    aliases              other names that a request may use
    tokenizer            a transformers fast tokenizer
    max_model_len        most tokens of prompt and answer together
    vocab_size           token ids are below it
    default_max_tokens   of a plain body that names none
    """

    name: str
    tokenizer: Any
    max_model_len: int
    vocab_size: int
    default_max_tokens: int
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, fields: Mapping[str, Any]) -> None:
        """Raises a 404 when the body's `model` is another model's name."""
        name = fields.get("model")
        if name is not None and name != self.name and name not in self.aliases:
            raise APIError(
                404,
                f"model: {shown(name)} is not served here; {self.name!r} is",
                param="model",
                code="model_not_found",
            )

    @cached_property
    def longest_token(self) -> int:
        """Characters in the vocabulary's longest token: no token of a text covers more of it."""
        return max(map(len, self.tokenizer.get_vocab()))

    def fewest_tokens(self, characters: int) -> int:
        """A lower bound on the tokens of a text, without tokenizing it."""
        return -(-characters // self.longest_token)
