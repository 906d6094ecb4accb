"""Clients that others wrote, against a real TorchServe with the embedded model: openai, huggingface_hub, KServe."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError
from openai import APIStatusError, AsyncOpenAI, OpenAI
from pydantic import BaseModel
from torchserve_server import NAME, Served, torchserve, wait_until

MODEL = "smollm2-135m"
ONCE = "Once upon a time"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 12
CITIES = ["Paris", "Rome"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with torchserve(tmp_path_factory.mktemp("torchserve"), max_num_seqs=16, num_gpu_blocks_override=400) as served:
        yield served


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    yield running
    wait_until(running.is_idle)
    assert running.worker()["status"] == "READY"


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def hugging_face(served: Served) -> InferenceClient:
    return InferenceClient(base_url=served.url, timeout=120)


def asynchronous(served: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


# openai


def test_the_asynchronous_client_gets_the_same_answers_side_by_side(served: Served, client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0}
    alone = client.chat.completions.create(**asked).choices[0].message.content

    async def streamed(http: AsyncOpenAI) -> str:
        text = ""
        async for chunk in await http.chat.completions.create(**asked, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def everybody() -> list[str | None]:
        async with asynchronous(served) as http:
            whole = http.chat.completions.create(**asked)
            one_shot, *streams = await asyncio.gather(whole, *(streamed(http) for _ in range(6)))
            return [one_shot.choices[0].message.content, *streams]

    assert asyncio.run(everybody()) == [alone] * 7


def test_n_answers_are_choices_of_their_own_streamed_and_not(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": TOKENS, "n": 3, "seed": 7}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = {choice.index: "" for choice in whole.choices}
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        if chunk.usage is not None:
            assert chunk.choices == []
            assert whole.usage is not None
            assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    assert [texts[choice.index] for choice in whole.choices] == [choice.message.content for choice in whole.choices]
    assert len(set(texts.values())) > 1


def test_chat_logprobs_spell_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=TOKENS, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert answer.logprobs is not None
    content = answer.logprobs.content or []
    spelled = b"".join(bytes(token.bytes or []) for token in content).decode()
    assert answer.message.content
    assert spelled.startswith(answer.message.content)
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(max(rival.logprob for rival in token.top_logprobs), abs=1e-5)
        assert sum(math.exp(rival.logprob) for rival in token.top_logprobs) <= 1 + 1e-4


def test_completions_of_several_prompts_with_echo_and_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[ONCE, "The capital of France is"], max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    for choice, prompt in zip(answer.choices, (ONCE, "The capital of France is"), strict=True):
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        assert all(choice.text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
    alone = client.completions.create(model=MODEL, prompt=ONCE, max_tokens=4, temperature=0)
    assert answer.choices[0].text == ONCE + alone.choices[0].text


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_that_must_be_called_is_called(client: OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice}
    asked |= {"max_tokens": 60, "temperature": 0, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    streamed: dict[str, str] = {"name": "", "arguments": ""}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            streamed["name"] += piece.function.name or ""
            streamed["arguments"] += piece.function.arguments or ""
    assert streamed == {"name": "get_weather", "arguments": call.function.arguments}


def test_a_tools_answer_goes_back_to_the_model(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Paris: sunny"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_the_clients_own_parsing_of_a_pydantic_model(client: OpenAI) -> None:
    class Person(BaseModel):
        name: str
        age: int

    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Ada is 36. Answer in JSON."}],
        response_format=Person,
        max_tokens=200,
        temperature=0,
    )
    choice = parsed.choices[0]
    assert choice.finish_reason == "length" or isinstance(choice.message.parsed, Person)


def test_the_clients_own_streaming_helper_understands_the_events(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta"} <= kinds
    assert final.choices[0].message.content == client.chat.completions.create(**asked).choices[0].message.content


def test_an_error_names_its_field_and_a_timeout_is_not_tried_again(served: Served, client: OpenAI) -> None:
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [{"type": "image_url"}]}])  # type: ignore[list-item, misc]
    assert (caught.value.status_code, caught.value.param) == (400, "messages[0].content[0].type")
    with pytest.raises(APIStatusError) as caught:
        client.embeddings.create(model=MODEL, input="a")
    assert caught.value.status_code == 404
    trying = client.with_options(max_retries=2)
    before = httpx.get(f"{str(client.base_url).removesuffix('/v1/')}/engine/stats", trust_env=False).json()
    with pytest.raises(APIStatusError) as caught:
        trying.completions.create(
            model=MODEL, prompt=ONCE, max_tokens=3000, extra_body={"timeout": 0.2, "ignore_eos": True}
        )
    assert caught.value.status_code == 504
    wait_until(served.is_idle)  # the engine ends a request between two steps
    after = httpx.get(f"{str(client.base_url).removesuffix('/v1/')}/engine/stats", trust_env=False).json()
    assert after["request_success"]["abort"] - before["request_success"]["abort"] == 1


def test_a_request_id_of_the_clients_own_is_in_the_answers_id(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=ONCE, max_tokens=2, extra_headers={"x-request-id": "my-request"}
    )
    assert answer.id == "cmpl-my-request"


# huggingface_hub


def test_hugging_faces_client_generates_text_streamed_and_not(hugging_face: InferenceClient, client: OpenAI) -> None:
    expected = client.completions.create(model=MODEL, prompt=ONCE, max_tokens=TOKENS, temperature=0).choices[0].text
    assert hugging_face.text_generation(ONCE, max_new_tokens=TOKENS) == expected
    assert "".join(hugging_face.text_generation(ONCE, max_new_tokens=TOKENS, stream=True)) == expected
    *_, last = hugging_face.text_generation(ONCE, max_new_tokens=TOKENS, stream=True, details=True)
    assert last.generated_text == expected
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", TOKENS)


def test_hugging_faces_client_gets_details(hugging_face: InferenceClient) -> None:
    answer = hugging_face.text_generation(
        ONCE, max_new_tokens=4, details=True, decoder_input_details=True, top_n_tokens=2, return_full_text=True
    )
    assert answer.generated_text.startswith(ONCE)
    assert answer.details is not None
    assert len(answer.details.tokens) == 4
    assert ONCE + "".join(token.text for token in answer.details.tokens) == answer.generated_text
    assert len(answer.details.prefill) == 4
    sampled = hugging_face.text_generation(ONCE, max_new_tokens=8, do_sample=True, temperature=0.9, details=True)
    assert sampled.details is not None
    again = hugging_face.text_generation(
        ONCE, max_new_tokens=8, do_sample=True, temperature=0.9, seed=sampled.details.seed
    )
    assert again == sampled.generated_text


def test_hugging_faces_client_understands_a_refusal(hugging_face: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="typical_p"):
        hugging_face.text_generation(ONCE, typical_p=0.5)


def test_hugging_faces_client_chats(hugging_face: InferenceClient, client: OpenAI) -> None:
    asked: dict[str, Any] = {"messages": QUESTION, "max_tokens": TOKENS, "temperature": 0}
    expected = client.chat.completions.create(model=MODEL, **asked).choices[0].message.content
    assert hugging_face.chat_completion(**asked).choices[0].message.content == expected
    chunks = hugging_face.chat_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    endpoint = InferenceClient(base_url=hugging_face.model, provider="hf-inference").get_endpoint_info()
    assert endpoint["model_id"] == MODEL


def test_hugging_faces_asynchronous_client_streams(served: Served, hugging_face: InferenceClient) -> None:
    async def streamed() -> str:
        text = ""
        async with AsyncInferenceClient(base_url=served.url, timeout=120) as http:
            async for piece in await http.text_generation(ONCE, max_new_tokens=TOKENS, stream=True):
                text += piece
        return text

    assert asyncio.run(streamed()) == hugging_face.text_generation(ONCE, max_new_tokens=TOKENS)


# KServe, by TorchServe's own routes


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    root = served.url.partition("/predictions/")[0]
    return httpx.post(f"{root}/{path}", json=body, timeout=120, trust_env=False)


def test_kserve_v1_predict_answers_each_instance(served: Served, client: OpenAI) -> None:
    greedy = {"max_tokens": TOKENS, "temperature": 0}
    answer = post(served, f"v1/models/{NAME}:predict", {"instances": [{"prompt": ONCE, **greedy}, "Hello"]})
    assert answer.status_code == 200
    first, second = answer.json()["predictions"]
    assert first["text"] == client.completions.create(model=MODEL, prompt=ONCE, **greedy).choices[0].text
    assert second["usage"]["completion_tokens"] > 0
    refused = post(served, f"v1/models/{NAME}:predict", {"instances": [{"prompt": ONCE, "top_p": 5}]})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("instances[0].top_p: ")


def test_kserve_v2_infer_takes_texts_and_token_ids(served: Served, client: OpenAI) -> None:
    greedy = {"max_tokens": TOKENS, "temperature": 0}
    texts = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [ONCE]}
    answer = post(served, f"v2/models/{NAME}/infer", {"id": "mine", "inputs": [texts], "parameters": greedy})
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"] == "mine"
    outputs = {output["name"]: output["data"] for output in body["outputs"]}
    expected = client.completions.create(model=MODEL, prompt=ONCE, **greedy).choices[0].text
    assert outputs == {"text_output": [expected], "finish_reason": ["length"]}
    ids = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [6403, 2401, 253]}
    wanted = {"inputs": [ids], "outputs": [{"name": "token_ids"}], "parameters": {**greedy, "ignore_eos": True}}
    (tokens,) = post(served, f"v2/models/{NAME}/infer", wanted).json()["outputs"]
    assert (tokens["datatype"], tokens["shape"]) == ("INT64", [1, TOKENS])
    refused = post(served, f"v2/models/{NAME}/infer", {"inputs": [texts | {"shape": [2]}]})
    assert refused.status_code == 400
    assert "inputs[0].shape" in refused.json()["error"]
