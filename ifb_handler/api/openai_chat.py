"""OpenAI's `POST v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from ifb_handler.api.answer import Answer, Asked
from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import Fields, flag, include_usage, refuse_unserved, sampling_params
from ifb_handler.api.prompts import ChatPrompt
from ifb_handler.api.served_model import ServedModel


def read(fields: Fields, model: ServedModel) -> Asked:
    """Raises APIError or RequestError naming the field at fault. Without max_tokens the model's length is the limit."""
    model.check_name(fields)
    refuse_unserved(fields)
    newer = fields.get("max_completion_tokens") is not None
    return Asked(
        prompt=ChatPrompt(_messages(fields.get("messages"))),
        params=sampling_params(fields, None, "max_completion_tokens" if newer else "max_tokens"),
        stream=flag(fields, "stream"),
        include_usage=include_usage(fields),
    )


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        what = "is missing" if value is None else f"{shown(value)} is not a list of messages"
        raise bad_field("messages", "is empty" if value == [] else what)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_field(where, f"{shown(message)} is not an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_field(f"{where}.role", f"{shown(role)} is not a role such as user, assistant or system")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise bad_field(f"{where}.{name}", "is not supported yet")
    named = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    return {"role": role, "content": _content(f"{where}.content", message.get("content")), **named}


def _content(where: str, content: object) -> str:
    """A text, or a list of text parts, which are joined as they stand."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, f"{shown(content)} is not a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_field(f"{where}[{i}].type", f"{shown(kind)} is not supported; this model reads text parts")
        if not isinstance(part.get("text"), str):
            raise bad_field(f"{where}[{i}].text", f"{shown(part.get('text'))} is not a text")
        texts.append(part["text"])
    return "".join(texts)


class ChatAnswer(Answer):
    """Object `chat.completion`, or chunks of it: the first carries the role, the following the text."""

    id_prefix = "chatcmpl-"

    def _opening(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def _delta(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        return self._chunk({"content": text} if text else {}, self.finish_reason)

    def _closing(self) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", []) | {"usage": self.usage}

    def _body(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._envelope("chat.completion", [self._choice("message", message, self.finish_reason)]) | {
            "usage": self.usage
        }

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk", [self._choice("delta", delta, finish_reason)])
        return chunk | ({"usage": None} if self.asked.include_usage else {})

    def _choice(self, name: str, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, name: said, "logprobs": None, "finish_reason": finish_reason}
        return choice | ({"stop_reason": self.stop_reason} if finish_reason else {})

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
        }
