"""Outputs of the engine, told in the forms that clients know; the official client's own types are the oracle."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tiny_llama import write_tokenizer

from ifb_handler.api import openai_models, routes
from ifb_handler.api.answer import Answer
from ifb_handler.api.errors import APIError, expired
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError
from ifb_handler.engine.outputs import FinishReason, RequestOutput, TokenLogprobs

COMPLETION, CHAT, PLAIN = "v1/completions", "v1/chat/completions", ""
MESSAGES = [{"role": "user", "content": "the fox"}]
OUTPUTS = [("Hel", [50]), ("", [60]), ("lo ü", [70])]
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return ServedModel("tiny", tokenizer, 512, len(tokenizer), aliases=("registered",))


def answer_to(model: ServedModel, path: str, **body: Any) -> Answer:
    """As the round trip makes one; every prompt comes to the tokens 5, 6, 7."""
    route, _ = routes.find(path)
    assert isinstance(route, routes.Generation)
    fields = ({"messages": MESSAGES} if path == CHAT else {"prompt": "the fox"}) | body
    asked = route.read(fields, model)
    answer = route.answer(asked, "r", model)
    answer.requests([[5, 6, 7] for _ in asked.parts])
    return answer


def outputs(request_id: str = "r", index: int = 0, **last: Any) -> list[RequestOutput]:
    told = [RequestOutput(request_id, text, list(ids), index=index) for text, ids in OUTPUTS]
    told[-1].finish_reason = FinishReason.LENGTH
    for name, value in last.items():
        setattr(told[-1], name, value)
    return told


def whole(answer: Answer, told: list[RequestOutput] | None = None) -> dict[str, Any]:
    for output in told or outputs():
        answer.add(output)
    assert answer.finished
    return json.loads(answer.whole())


def events(text: str) -> list[dict[str, Any]]:
    """The events' bodies; the stream must end as OpenAI's does."""
    *bodies, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(body.startswith("data: ") for body in bodies)
    return [json.loads(body.removeprefix("data: ")) for body in bodies]


def streamed(answer: Answer, told: list[RequestOutput] | None = None) -> list[dict[str, Any]]:
    return events("".join(answer.stream([output]) for output in told or outputs()))


def test_a_whole_completion_is_one_that_the_official_client_reads(model: ServedModel) -> None:
    body = Completion.model_validate(whole(answer_to(model, COMPLETION)), strict=True)
    assert (body.id, body.object, body.model) == ("cmpl-r", "text_completion", "tiny")
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("Hello ü", "length")
    assert body.usage is not None
    assert body.usage.model_dump(exclude_none=True) == USAGE | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_a_whole_chat_completion_is_one_that_the_official_client_reads(model: ServedModel) -> None:
    body = ChatCompletion.model_validate(whole(answer_to(model, CHAT)), strict=True)
    assert (body.id, body.object) == ("chatcmpl-r", "chat.completion")
    assert (body.choices[0].message.role, body.choices[0].message.content) == ("assistant", "Hello ü")
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert body.usage.completion_tokens == 3


def test_a_plain_answer_has_text_ids_reason_and_usage(model: ServedModel) -> None:
    body = whole(answer_to(model, PLAIN))
    assert {name: body[name] for name in ("text", "token_ids", "finish_reason", "usage")} == {
        "text": "Hello ü",
        "token_ids": [50, 60, 70],
        "finish_reason": "length",
        "usage": USAGE,
    }


def test_chat_chunks_begin_with_the_role_and_end_with_the_reason(model: ServedModel) -> None:
    chunks = [ChatCompletionChunk.model_validate(event) for event in streamed(answer_to(model, CHAT, stream=True))]
    assert {(chunk.id, chunk.object) for chunk in chunks} == {("chatcmpl-r", "chat.completion.chunk")}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello ü"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_chunks_have_the_shape_of_the_whole(model: ServedModel) -> None:
    chunks = streamed(answer_to(model, COMPLETION, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo ü"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert Completion.model_validate(chunks[-1]).choices[0].text == "lo ü"


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_usage_comes_on_one_last_chunk_without_choices_and_only_when_asked_for(model: ServedModel, path: str) -> None:
    asking = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = streamed(answer_to(model, path, **asking), outputs(num_cached_tokens=2))
    assert last["choices"] == []
    assert last["usage"] == USAGE | {"prompt_tokens_details": {"cached_tokens": 2}}
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert all("usage" not in chunk for chunk in streamed(answer_to(model, path, stream=True)))


def test_a_plain_stream_carries_every_token_id_even_without_text(model: ServedModel) -> None:
    chunks = streamed(answer_to(model, PLAIN, stream=True))
    assert [chunk["token_ids"] for chunk in chunks] == [[50], [60], [70]]
    assert (chunks[-1]["finish_reason"], chunks[-1]["usage"]) == ("length", USAGE)


def test_outputs_that_arrive_together_make_one_event(model: ServedModel) -> None:
    together = events(answer_to(model, PLAIN, stream=True).stream(outputs()))
    assert [(chunk["text"], chunk["token_ids"]) for chunk in together] == [("Hello ü", [50, 60, 70])]


def test_a_stream_that_ends_without_a_token_still_says_so(model: ServedModel) -> None:
    only = RequestOutput("r", finish_reason=FinishReason.STOP)
    chunks = events(answer_to(model, CHAT, stream=True).stream([only]))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


def test_priority_and_cache_salt_reach_the_engine(model: ServedModel) -> None:
    answer = answer_to(model, COMPLETION, prompt=["the fox", "a dog"], priority=-3, cache_salt="mine")
    told = [(request.priority, request.cache_salt) for request in answer.requests([[5], [6]])]
    assert told == [(-3, "mine")] * 2


# Several prompts, several answers to each


def news_of_four() -> list[RequestOutput]:
    """Two prompts, two answers to each, all mixed."""
    each = [outputs(f"r/{part}", index, text=f"{part}{index}") for part in (0, 1) for index in (0, 1)]
    return [told[i] for i in range(3) for told in reversed(each)]


def test_choices_are_numbered_prompt_by_prompt_and_none_overwrites_another(model: ServedModel) -> None:
    answer = answer_to(model, COMPLETION, prompt=["the fox", [1, 2]], n=2)
    assert answer.engine_ids == ["r/0", "r/1"]
    body = whole(answer, news_of_four())
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "Hel00"),
        (1, "Hel01"),
        (2, "Hel10"),
        (3, "Hel11"),
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 12)


def test_a_stream_of_several_choices_ends_with_the_last_of_them(model: ServedModel) -> None:
    chunks = streamed(answer_to(model, COMPLETION, prompt=["the fox", [1, 2]], n=2, stream=True), news_of_four())
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hel00", 1: "Hel01", 2: "Hel10", 3: "Hel11"}
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 4


def test_each_choice_of_a_chat_begins_with_its_role(model: ServedModel) -> None:
    told = [output for index in (0, 1) for output in outputs(index=index)]
    chunks = streamed(answer_to(model, CHAT, n=2, stream=True), told)
    first = [next(chunk for chunk in chunks if chunk["choices"][0]["index"] == index) for index in (0, 1)]
    assert [chunk["choices"][0]["delta"]["role"] for chunk in first] == ["assistant"] * 2


# Log probabilities


def with_logprobs(told: list[RequestOutput], prompt: bool = False) -> list[RequestOutput]:
    for output in told:
        output.logprobs = [
            TokenLogprobs(token, -0.5, ((token, -0.5), (token + 1, -math.inf))) for token in output.token_ids
        ]
    if prompt:
        told[0].prompt_logprobs = [None, TokenLogprobs(6, -2.0, ((8, -1.0),)), TokenLogprobs(7, -math.inf)]
    return told


def test_chat_logprobs_have_bytes_and_rivals_and_no_infinity(model: ServedModel) -> None:
    told = with_logprobs(outputs())
    body = ChatCompletion.model_validate(whole(answer_to(model, CHAT, logprobs=True, top_logprobs=2), told))
    assert body.choices[0].logprobs is not None
    content = body.choices[0].logprobs.content or []
    assert [entry.bytes for entry in content] == [list(model.bytes_of(token)) for token in (50, 60, 70)]
    assert [[rival.logprob for rival in entry.top_logprobs] for entry in content] == [[-0.5, -9999.0]] * 3


def test_chat_logprobs_are_the_same_streamed_and_not(model: ServedModel) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    one_shot = whole(answer_to(model, CHAT, **asked), with_logprobs(outputs()))["choices"][0]["logprobs"]["content"]
    chunks = streamed(answer_to(model, CHAT, stream=True, **asked), with_logprobs(outputs()))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for logprobs in found if logprobs for entry in logprobs["content"]] == one_shot


def test_completion_logprobs_are_four_lists_of_one_length(model: ServedModel) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer("zwölf lazy dogs", add_special_tokens=False).input_ids
    text = ""
    told = []
    for i, token in enumerate(ids):
        so_far = tokenizer.decode(ids[: i + 1]).rstrip("\ufffd")
        told.append(RequestOutput("r", so_far[len(text) :], [token]))
        text = so_far
    told[-1].finish_reason = FinishReason.STOP
    body = Completion.model_validate(whole(answer_to(model, COMPLETION, logprobs=1), with_logprobs(told)))
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5] * len(ids)
    assert "".join(logprobs.tokens or ()).replace("\ufffd\ufffd", "ö") == text
    assert [
        body.choices[0].text[offset]
        for offset, token in zip(logprobs.text_offset or (), logprobs.tokens or (), strict=True)
        if "\ufffd" not in token
    ] == [token[0] for token in logprobs.tokens or () if "\ufffd" not in token]
    assert all(-9999.0 in rivals.values() for rivals in logprobs.top_logprobs or ())


def test_completion_logprobs_are_the_same_streamed_and_not(model: ServedModel) -> None:
    asked = {"logprobs": 2, "echo": True}
    one_shot = whole(answer_to(model, COMPLETION, **asked), with_logprobs(outputs(), prompt=True))["choices"][0]
    chunks = streamed(answer_to(model, COMPLETION, stream=True, **asked), with_logprobs(outputs(), prompt=True))
    joined: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    assert joined == one_shot["logprobs"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == one_shot["text"]


def test_an_echo_stands_before_each_answer_with_its_log_probabilities(model: ServedModel) -> None:
    (choice,) = whole(answer_to(model, COMPLETION, echo=True, logprobs=1), with_logprobs(outputs(), True))["choices"]
    assert choice["text"] == "the foxHello ü"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -9999.0, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {model.text_of(8): -1.0, model.text_of(6): -2.0}]


def test_a_text_can_be_scored_without_an_answer(model: ServedModel) -> None:
    """As evaluation harnesses do it: echo, no new tokens."""
    answer = answer_to(model, COMPLETION, echo=True, logprobs=1, max_tokens=0)
    assert answer.asked.parts[0].params.max_tokens == 1
    only = with_logprobs([RequestOutput("r", "x", [9], finish_reason=FinishReason.LENGTH)], prompt=True)
    body = whole(answer, only)
    assert body["choices"][0]["text"] == "the fox"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -2.0, -9999.0]
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_prompt_logprobs_have_vllms_form(model: ServedModel, path: str) -> None:
    body = whole(answer_to(model, path, prompt_logprobs=1), with_logprobs(outputs(), prompt=True))
    told = (body["choices"][0] if path == COMPLETION else body)["prompt_logprobs"]
    assert told[0] is None
    assert told[1]["8"] == {"logprob": -1.0, "rank": 1, "decoded_token": model.text_of(8)}
    assert told[1]["6"]["logprob"] == -2.0
    assert told[2]["7"]["logprob"] == -9999.0


# Errors


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 503)])
def test_a_request_that_failed_has_no_answer_but_an_error(
    model: ServedModel, reason: FinishReason, status: int
) -> None:
    lost = RequestOutput("r", "x", [5], finish_reason=reason, error="the step failed")
    for act in (answer_to(model, CHAT).add, lambda output: answer_to(model, PLAIN, stream=True).stream([output])):
        with pytest.raises(APIError) as caught:
            act(lost)
        assert caught.value.status == status


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("top_k: bad", "top_k"), 400, "invalid_request_error"),
        (QueueFullError("full"), 503, "overloaded_error"),
        (EngineStoppedError("stopping"), 503, "overloaded_error"),
        (expired(2), 504, "timeout_error"),
        (KeyError("secret"), 500, "server_error"),
    ],
)
def test_every_exception_has_an_openai_error_body(error: Exception, status: int, kind: str) -> None:
    told = APIError.of(error)
    body = told.body()["error"]
    assert (told.status, body["type"]) == (status, kind)
    assert {"message", "type", "param", "code"} <= set(body)
    assert body.get("retry_after") == (1 if status == 503 else None)
    assert "secret" not in body["message"]


def test_a_message_that_quotes_megabytes_is_cut() -> None:
    told = APIError.of(RequestError("stop: " + "x" * 3_000_000, "stop"))
    assert len(told.body()["error"]["message"]) <= 1000


def test_the_models_list_is_one_that_the_official_client_reads(model: ServedModel) -> None:
    (card,) = openai_models.listing(model)["data"]
    assert Model.model_validate(card).id == "tiny"
    assert openai_models.card(model, "registered")["id"] == "registered"
    with pytest.raises(APIError) as caught:
        openai_models.card(model, "gpt-9")
    assert caught.value.status == 404
