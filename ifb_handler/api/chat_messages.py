"""A chat's messages, checked, and laid out by the model's own template."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ifb_handler.api.errors import APIError, bad_field, shown
from ifb_handler.api.prompts import Prompt, tokenize
from ifb_handler.api.served_model import ServedModel
from ifb_handler.api.tools import Tools, template_of

# Templates know the older name only.
_ROLES = {"developer": "system"}
# Kinds of content parts that are texts, each with the key that holds it.
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
# Characters that a template writes around a message, at the least: marks of its begin and its end.
_AROUND_MESSAGE = 8


@dataclass(frozen=True)
class ChatPrompt(Prompt):
    """Messages, to be laid out by the model's chat template. The template writes the special tokens, BOS too.

    template_options    what the template is given beside messages and tools
    """

    messages: list[dict[str, Any]]
    tools: Tools | None = None
    template_options: dict[str, Any] = field(default_factory=lambda: {"add_generation_prompt": True})
    param: str = "messages"

    @cached_property
    def characters(self) -> int:  # type: ignore[override]
        """Of all that a template may write out: what lies beside the contents can be as long as they are."""
        given: list[Any] = [self.tools.definitions] if self.tools else []
        given += [option for option in self.template_options.values() if not isinstance(option, bool)]
        return sum(map(_length, self.messages)) + sum(map(_written_length, given))

    def token_ids(self, model: ServedModel) -> list[int]:
        template = template_of(model, self.tools)
        if not template:
            raise APIError(
                400,
                f"the model {model.name!r} has no chat template: use v1/completions, or a tokenizer that has one",
                param=self.param,
                code="no_chat_template",
            )
        messages, tools = self.messages, self.tools and self.tools.definitions
        if self.tools and "tools" not in template:
            messages, tools = self.tools.told(messages), None
        try:
            text = model.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **self.template_options)
        except Exception as error:  # a template refuses in its own words: roles out of order, for instance
            raise bad_field(self.param, f"the model's chat template refuses them: {error}") from error
        return tokenize(model, text, self.param, add_special_tokens=False)


def _length(message: dict[str, Any]) -> int:
    own = (len(value) if isinstance(value, str) else _written_length(value) for value in message.values())
    return _AROUND_MESSAGE + sum(own)


def _written_length(value: Any) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise bad_field("messages", "they, or their tools, are nested too deeply") from None


def read_messages(value: object) -> list[dict[str, Any]]:
    """Raises a 400 APIError naming the message and the part of it that is at fault."""
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
    if message.get("function_call"):
        raise bad_field(f"{where}.function_call", "is not supported; use tool_calls")
    told: dict[str, Any] = {"role": _ROLES.get(role, role)}
    calls = message.get("tool_calls")
    if calls:
        told["tool_calls"] = _tool_calls(f"{where}.tool_calls", calls)
    if calls and message.get("content") is None:
        told["content"] = ""
    else:
        told["content"] = _content(f"{where}.content", message.get("content"))
    return told | {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    """An earlier answer's calls. The API has arguments as text, templates write them out of an object."""
    if not isinstance(calls, list):
        raise bad_field(where, f"{shown(calls)} is not a list of tool calls")
    told = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(f"{where}[{i}]", f"{shown(call)} is not an object with function.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise bad_field(f"{where}[{i}].function.arguments", f"{shown(arguments)} is not JSON") from None
        told.append({**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return told


def _content(where: str, content: object) -> str:
    """A text, or a list of text parts, which are joined as they stand."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, f"{shown(content)} is not a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise bad_field(f"{where}[{i}].type", f"{shown(kind)} is not supported; this model reads text parts")
        if not isinstance(part.get(key), str):
            raise bad_field(f"{where}[{i}].{key}", f"{shown(part.get(key))} is not a text")
        texts.append(part[key])
    return "".join(texts)
