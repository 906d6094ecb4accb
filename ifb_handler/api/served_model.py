"""What the API needs to know of the model that it answers for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ifb_handler.api.errors import APIError, shown
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.detokenizer import Vocabulary

if TYPE_CHECKING:
    from ifb_handler.engine.engine import Engine

# What Hugging Face's clients and TGI's manual send for "whichever model is served there".
_ANY_MODEL = ("tgi", "dummy")


@dataclass(frozen=True)
class ServedModel:
    """name             the name in answers
    aliases          other names that a request may use
    tokenizer        a transformers fast tokenizer
    max_model_len    most tokens of prompt and answer together
    vocab_size       token ids are below it
    config           the engine's options, the limits on requests among them
    dtype            what it computes in; on a device of `device_type`
    """

    name: str
    tokenizer: Any
    max_model_len: int
    vocab_size: int
    config: EngineConfig = field(default_factory=EngineConfig)
    aliases: tuple[str, ...] = ()
    dtype: str = "float32"
    device_type: str = "cpu"
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, engine: Engine, aliases: Sequence[str] = ()) -> ServedModel:
        return cls(
            name=engine.model_name,
            tokenizer=engine.tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            config=engine.config,
            aliases=tuple(aliases),
            dtype=engine.dtype,
            device_type=engine.device_type,
        )

    def answers_to(self, name: object) -> bool:
        return name == self.name or name in self.aliases

    def check_name(self, fields: Mapping[str, Any]) -> None:
        """Raises a 404 when the body's `model` is another model's name."""
        name = fields.get("model")
        if name is not None and not self.answers_to(name) and name not in _ANY_MODEL:
            raise APIError(
                404,
                f"model: {shown(name)} is not served here; {self.name!r} is",
                param="model",
                code="model_not_found",
            )

    @property
    def max_prompt_tokens(self) -> int:
        """What leaves room for one token of the answer, or `max_input_tokens` if that is less."""
        most = min(self.max_model_len, self.config.max_total_tokens or self.max_model_len) - 1
        return min(most, self.config.max_input_tokens or most)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        """A token as UTF-8, on its own: perhaps half a character."""
        spelled = self.vocabulary.bytes_of(token_id)
        if spelled is None:  # SentencePiece writes a space as U+2581
            spelled = (self.tokenizer.backend_tokenizer.id_to_token(token_id) or "").replace("\u2581", " ").encode()
        return spelled

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")

    @cached_property
    def longest_token(self) -> int:
        """Characters in the vocabulary's longest token: no token of a text covers more of it."""
        return max(map(len, self.tokenizer.get_vocab()))

    def fewest_tokens(self, characters: int) -> int:
        """A lower bound on the tokens of a text, without tokenizing it."""
        return -(-characters // self.longest_token)
