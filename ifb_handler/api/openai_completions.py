"""OpenAI's `POST v1/completions`."""

from __future__ import annotations

from typing import Any

from ifb_handler.api.answer import Answer, Asked
from ifb_handler.api.fields import Fields, flag, include_usage, refuse_unserved, sampling_params
from ifb_handler.api.prompts import read_prompt
from ifb_handler.api.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16


def read(fields: Fields, model: ServedModel) -> Asked:
    """Raises APIError or RequestError naming the field at fault."""
    model.check_name(fields)
    refuse_unserved(fields)
    return Asked(
        prompt=read_prompt(fields.get("prompt")),
        params=sampling_params(fields, DEFAULT_MAX_TOKENS),
        stream=flag(fields, "stream"),
        include_usage=include_usage(fields),
    )


class CompletionAnswer(Answer):
    """Objects `text_completion`; chunks and the whole have the same shape."""

    id_prefix = "cmpl-"

    def _delta(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        return self._envelope([self._choice(text)]) | ({"usage": None} if self.asked.include_usage else {})

    def _closing(self) -> dict[str, Any]:
        return self._envelope([]) | {"usage": self.usage}

    def _body(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        return self._envelope([self._choice(text)]) | {"usage": self.usage}

    def _choice(self, text: str) -> dict[str, Any]:
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
        }
