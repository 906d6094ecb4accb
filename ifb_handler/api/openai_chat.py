"""OpenAI's `POST v1/chat/completions`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ifb_handler.api import structured_output, tools
from ifb_handler.api.answer import Answer, Asked, Choice, Part, together
from ifb_handler.api.chat_messages import ChatPrompt, read_messages
from ifb_handler.api.errors import bad_field, shown
from ifb_handler.api.fields import (
    Fields,
    best_of,
    flag,
    include_usage,
    integer,
    refuse_unserved,
    sampling_params,
    section,
)
from ifb_handler.api.limits import check_sampling, handling
from ifb_handler.api.logprobs import chat_logprobs, prompt_logprobs
from ifb_handler.api.prompts import truncated
from ifb_handler.api.served_model import ServedModel
from ifb_handler.api.tool_calls import CallDelta, NamedCallReader, ToolCallReader
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from ifb_handler.engine.sampling_params import MAX_LOGPROBS

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True)
class ChatAsked(Asked):
    """tools          what may be called; None: nothing
    template       the model's chat template, which tells the form of its calls
    show_prompt    vLLM's `prompt_logprobs` were asked for
    """

    tools: tools.Tools | None = None
    template: str = ""
    show_prompt: bool = False


def read(fields: Fields, model: ServedModel) -> ChatAsked:
    """Raises APIError or RequestError naming the field at fault. Without max_tokens the model's length is the limit."""
    model.check_name(fields)
    refuse_unserved(fields)
    stream = flag(fields, "stream")
    offered = tools.read(fields)
    template = tools.template_of(model, offered)
    prompt = ChatPrompt(read_messages(fields.get("messages")), offered, _template_options(fields, model))
    newer = fields.get("max_completion_tokens") is not None
    prompt_entries = integer(fields, "prompt_logprobs", 0)
    if prompt_entries is not None and stream:
        raise bad_field("prompt_logprobs", 'is not given with "stream": true')
    by_route: dict[str, Any] = {
        "n": fields.get("n"),
        "best_of": best_of(fields, stream),
        "logprobs": _logprobs(fields, model),
        "prompt_logprobs": prompt_entries,
        "structured": _structure(fields, offered),
    }
    if offered and _calls_are_special(model):
        by_route["skip_special_tokens"] = False
    params = sampling_params(fields, None, "max_completion_tokens" if newer else "max_tokens", **by_route)
    check_sampling(params, model.config)
    return ChatAsked(
        parts=[Part(truncated(fields, prompt, model), params)],
        stream=stream,
        include_usage=include_usage(fields),
        **handling(fields, model.config),
        tools=offered,
        template=template,
        show_prompt=prompt_entries is not None,
    )


def _logprobs(fields: Fields, model: ServedModel) -> int | None:
    """`logprobs` says whether, `top_logprobs` how many rivals of each token."""
    top = integer(fields, "top_logprobs", 0)
    if not flag(fields, "logprobs"):
        if top:
            raise bad_field("top_logprobs", 'is given only with "logprobs": true')
        return None
    most = min(MAX_LOGPROBS, model.config.max_logprobs)
    if top is not None and top > most:
        raise bad_field("top_logprobs", f"{top} is above this server's max_logprobs, {most}")
    return top or 0


def _structure(fields: Fields, offered: tools.Tools | None) -> Any | None:
    asked = structured_output.read(fields)
    held = offered.structure() if offered else None
    if asked and held:
        raise bad_field("tool_choice", "a call that must be made and response_format exclude each other")
    return held or asked


def _calls_are_special(model: ServedModel) -> bool:
    """Some tokenizers count the mark of a tool call among the special tokens, which are left out of the text."""
    marks = model.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return any(token.special and token.content == "<tool_call>" for token in marks)


def _template_options(fields: Fields, model: ServedModel) -> dict[str, Any]:
    """vLLM's fields for the template: an answer that is begun, a message that is continued, a model's own switches."""
    continues = flag(fields, "continue_final_message")
    begins = flag(fields, "add_generation_prompt", default=not continues)
    if continues and begins:
        raise bad_field("continue_final_message", "and add_generation_prompt exclude each other")
    own = section(fields, "chat_template_kwargs")
    taken = inspect.signature(model.tokenizer.apply_chat_template).parameters
    for name in own:
        if name in taken:
            raise bad_field("chat_template_kwargs", f"{shown(name)} is not the template's to take")
    return {**own, "add_generation_prompt": begins, "continue_final_message": continues}


class ChatAnswer(Answer):
    """Object `chat.completion`, or chunks of it: the first carries the role, the following the text."""

    id_prefix = "chatcmpl-"
    asked: ChatAsked

    def __init__(self, asked: ChatAsked, request_id: str, model: ServedModel, public_id: str | None = None) -> None:
        super().__init__(asked, request_id, model, public_id)
        self._readers = [self._reader() for _ in self.choices]

    def _reader(self) -> ToolCallReader | NamedCallReader | None:
        return self.asked.tools.reader(self.asked.template) if self.asked.tools else None

    @property
    def usage(self) -> dict[str, Any]:
        return super().usage | {"prompt_tokens_details": {"cached_tokens": self.num_cached_tokens}}

    def _opening(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"role": "assistant", "content": ""}, None, None)]

    def _events(self, choice: Choice, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        news = together(outputs)
        delta: dict[str, Any] = {}
        text, reader = news.text, self._readers[choice.index]
        if reader is not None:
            text, calls = reader.push(text)
            if news.finished:
                last_text, last_calls = reader.flush()
                text, calls = text + last_text, calls + last_calls
            if calls:
                delta["tool_calls"] = [{"index": call.index} | _told(call) for call in calls]
        if text:
            delta["content"] = text
        if not (delta or news.logprobs or news.finished):
            return []
        return [self._chunk(choice, delta, news.logprobs, self._reason(choice, reader) if news.finished else None)]

    def _closing(self) -> list[dict[str, Any]]:
        return [self._envelope("chat.completion.chunk", []) | {"usage": self.usage}]

    def _body(self) -> dict[str, Any]:
        body = self._envelope("chat.completion", list(map(self._whole_choice, self.choices))) | {"usage": self.usage}
        if self.asked.show_prompt:
            body["prompt_logprobs"] = prompt_logprobs(self.model, self.prompt_logprobs[0] or [])
        return body

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reader = self._readers[choice.index]
        if reader is not None:
            text, calls = reader.push(text)
            last_text, last_calls = reader.flush()
            whole = _added_up(calls + last_calls)
            message["content"] = text + last_text or (None if whole else "")
            if whole:
                message["tool_calls"] = [_told(call) for call in whole]
        return self._choice(choice, "message", message, choice.logprobs, self._reason(choice, reader))

    def _reason(self, choice: Choice, reader: ToolCallReader | NamedCallReader | None) -> str:
        if reader is not None and reader.complete and choice.finish_reason is FinishReason.STOP:
            return TOOL_CALLS
        return str(choice.finish_reason)

    def _chunk(
        self, choice: Choice, delta: dict[str, Any], logprobs: list[TokenLogprobs] | None, reason: str | None
    ) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk", [self._choice(choice, "delta", delta, logprobs, reason)])
        return chunk | ({"usage": None} if self.asked.include_usage else {})

    def _choice(
        self,
        choice: Choice,
        name: str,
        said: dict[str, Any],
        logprobs: list[TokenLogprobs] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        told = {
            "index": choice.index,
            name: said,
            "logprobs": chat_logprobs(self.model, logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        return told | ({"stop_reason": choice.stop_reason} if reason else {})

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }


def _told(call: CallDelta) -> dict[str, Any]:
    """As OpenAI has it: id, type and name only with the first piece."""
    if call.call_id is None:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _added_up(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Each call whole."""
    calls: list[CallDelta] = []
    for delta in deltas:
        if delta.call_id is not None:
            calls.append(delta)
        else:
            calls[-1].arguments += delta.arguments
    return calls
