"""The bare path: a prompt as TorchServe's users send one, answered with text, token ids, finish_reason and usage."""

from __future__ import annotations

from typing import Any

from ifb_handler.api.answer import Answer, Asked
from ifb_handler.api.fields import Fields, flag, include_usage, refuse_unserved, sampling_params
from ifb_handler.api.prompts import read_prompt
from ifb_handler.api.served_model import ServedModel


def read(fields: Fields, model: ServedModel) -> Asked:
    """Raises APIError or RequestError naming the field at fault."""
    model.check_name(fields)
    refuse_unserved(fields)
    return Asked(
        prompt=read_prompt(fields.get("prompt")),
        params=sampling_params(fields, model.default_max_tokens),
        stream=flag(fields, "stream"),
        include_usage=include_usage(fields),
    )


class PlainAnswer(Answer):
    """`{"text", "token_ids", "finish_reason", "usage"}`; streamed: text and token ids that are new, then the rest."""

    def _worth_saying(self, text: str, token_ids: list[int]) -> bool:
        return bool(text or token_ids)

    def _delta(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        new = {"text": text, "token_ids": token_ids}
        return self._body(text, token_ids) if self.finish_reason else new

    def _body(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.model_name,
            "text": text,
            "token_ids": token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": self.usage,
        }
