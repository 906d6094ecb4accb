"""Outputs of the engine, told in the forms that clients know; the official client's own types are the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from ifb_handler.api import openai_models
from ifb_handler.api.answer import Answer, Asked
from ifb_handler.api.errors import APIError
from ifb_handler.api.openai_chat import ChatAnswer
from ifb_handler.api.openai_completions import CompletionAnswer
from ifb_handler.api.plain import PlainAnswer
from ifb_handler.api.prompts import TextPrompt
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.sampling_params import SamplingParams

OUTPUTS = [
    RequestOutput("r", "Hel", [5], num_prompt_tokens=3, num_generated_tokens=1),
    RequestOutput("r", "", [6], num_prompt_tokens=3, num_generated_tokens=2),
    RequestOutput("r", "lo ü", [7], num_prompt_tokens=3, num_generated_tokens=3, finish_reason=FinishReason.LENGTH),
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def streaming(kind: type[Answer], include_usage: bool = False) -> Answer:
    return kind(Asked(TextPrompt("a"), SamplingParams(), True, include_usage), "r", "tiny")


def whole(kind: type[Answer]) -> dict[str, Any]:
    answer = kind(Asked(TextPrompt("a"), SamplingParams()), "r", "tiny")
    for output in OUTPUTS:
        answer.add(output)
    return json.loads(answer.whole())


def events(text: str) -> list[dict[str, Any]]:
    """The events' bodies; the stream must end as OpenAI's does."""
    *bodies, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(body.startswith("data: ") for body in bodies)
    return [json.loads(body.removeprefix("data: ")) for body in bodies]


def streamed(answer: Answer) -> list[dict[str, Any]]:
    return events("".join(answer.stream([output]) for output in OUTPUTS))


def test_a_whole_completion_is_one_that_the_official_client_reads() -> None:
    body = Completion.model_validate(whole(CompletionAnswer), strict=True)
    assert (body.id, body.object, body.model) == ("cmpl-r", "text_completion", "tiny")
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("Hello ü", "length")
    assert body.usage is not None
    assert body.usage.model_dump(exclude_none=True) == USAGE


def test_a_whole_chat_completion_is_one_that_the_official_client_reads() -> None:
    body = ChatCompletion.model_validate(whole(ChatAnswer), strict=True)
    assert (body.id, body.object) == ("chatcmpl-r", "chat.completion")
    assert (body.choices[0].message.role, body.choices[0].message.content) == ("assistant", "Hello ü")
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert body.usage.model_dump(exclude_none=True) == USAGE


def test_a_plain_answer_has_text_ids_reason_and_usage() -> None:
    body = whole(PlainAnswer)
    assert {name: body[name] for name in ("text", "token_ids", "finish_reason", "usage")} == {
        "text": "Hello ü",
        "token_ids": [5, 6, 7],
        "finish_reason": "length",
        "usage": USAGE,
    }


def test_chat_chunks_begin_with_the_role_and_end_with_the_reason() -> None:
    chunks = [ChatCompletionChunk.model_validate(event) for event in streamed(streaming(ChatAnswer))]
    assert {(chunk.id, chunk.object) for chunk in chunks} == {("chatcmpl-r", "chat.completion.chunk")}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello ü"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_chunks_have_the_shape_of_the_whole() -> None:
    chunks = streamed(streaming(CompletionAnswer))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo ü"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert Completion.model_validate(chunks[-1]).choices[0].text == "lo ü"


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_usage_comes_on_one_last_chunk_without_choices_when_asked_for(kind: type[Answer]) -> None:
    *chunks, last = streamed(streaming(kind, include_usage=True))
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert all("usage" not in chunk for chunk in streamed(streaming(kind)))


def test_a_plain_stream_carries_every_token_id_even_without_text() -> None:
    chunks = streamed(streaming(PlainAnswer))
    assert [chunk["token_ids"] for chunk in chunks] == [[5], [6], [7]]
    assert (chunks[-1]["finish_reason"], chunks[-1]["usage"]) == ("length", USAGE)


def test_outputs_that_arrive_together_make_one_event() -> None:
    together = events(streaming(PlainAnswer).stream(OUTPUTS))
    assert [(chunk["text"], chunk["token_ids"]) for chunk in together] == [("Hello ü", [5, 6, 7])]


def test_a_stream_that_ends_without_a_token_still_says_so() -> None:
    only = RequestOutput("r", num_prompt_tokens=3, finish_reason=FinishReason.STOP)
    chunks = events(streaming(ChatAnswer).stream([only]))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
def test_a_request_that_failed_has_no_answer_but_an_error(reason: FinishReason, status: int) -> None:
    lost = RequestOutput("r", "x", [5], finish_reason=reason, error="the step failed")
    for act in (streaming(ChatAnswer).add, lambda output: streaming(PlainAnswer).stream([output])):
        with pytest.raises(APIError) as caught:
            act(lost)
        assert caught.value.status == status


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("top_k: bad", "top_k"), 400, "invalid_request_error"),
        (QueueFullError("full"), 503, "overloaded_error"),
        (EngineStoppedError("stopping"), 503, "overloaded_error"),
        (KeyError("secret"), 500, "server_error"),
    ],
)
def test_every_exception_has_an_openai_error_body(error: Exception, status: int, kind: str) -> None:
    told = APIError.of(error)
    body = json.loads(told.json())["error"]
    assert (told.status, body["type"]) == (status, kind)
    assert set(body) == {"message", "type", "param", "code"}
    assert "secret" not in body["message"]


def test_the_models_list_is_one_that_the_official_client_reads() -> None:
    served = ServedModel("tiny", None, 512, 100, 16, aliases=("registered",))
    (card,) = openai_models.listing(served)["data"]
    assert Model.model_validate(card).id == "tiny"
    assert openai_models.card(served, "registered")["id"] == "registered"
    with pytest.raises(APIError) as caught:
        openai_models.card(served, "gpt-9")
    assert caught.value.status == 404
