"""A real TorchServe called by grpcio, in both of its modes, and the HTTP clients of asyncCommunication."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from greedy_oracle import generate_alone, load_smollm2
from grpc_client import GrpcClient, body, events
from openai import OpenAI
from torchserve_server import Served, read_events, torchserve, wait_until

NUM_PROMPTS, NUM_TOKENS = 6, 10
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
STREAM = {"rpc": b"StreamPredictions"}
MODES = ("continuousBatching", "asyncCommunication")

only_asynchronous = pytest.mark.parametrize("running", MODES[1:], indirect=True)


@dataclass(frozen=True)
class Case:
    """A prompt and transformers' greedy answer to it alone."""

    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    source, model = random.Random(3), load_smollm2()
    prompts = [[source.randrange(100, 40000) for _ in range(source.randint(5, 40))] for _ in range(NUM_PROMPTS)]
    return [Case(prompt, generate_alone(model, prompt, NUM_TOKENS)) for prompt in prompts]


@pytest.fixture(scope="module", params=MODES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cases: list[Case]
) -> Iterator[Served]:
    options = {"max_num_seqs": 16, "max_num_waiting": 16, "num_gpu_blocks_override": 400, "default_max_tokens": 8}
    asynchronous = request.param == "asyncCommunication"
    with torchserve(tmp_path_factory.mktemp("torchserve"), asynchronous, **options) as served:
        yield served


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """After every test the pool is empty and the worker is the one that TorchServe calls ready."""
    worker = running.worker()["pid"]
    yield running
    wait_until(running.is_idle)
    assert (running.worker()["pid"], running.worker()["status"]) == (worker, "READY")


@pytest.fixture
def client(served: Served) -> Iterator[GrpcClient]:
    client = GrpcClient(served)
    yield client
    client.close()


def test_predictions_answers_a_json_body_in_a_part_of_any_usual_name(client: GrpcClient, cases: list[Case]) -> None:
    for name in ("data", "body"):
        answer = client.predict(**{name: body(prompt=cases[0].prompt, **GREEDY)})
        assert answer["token_ids"] == cases[0].answer


def test_predictions_answers_fields_in_parts_of_their_own_and_a_bare_text(client: GrpcClient) -> None:
    by_field = client.predict(prompt=b"Once upon a time", max_tokens=b"8", temperature=b"0")
    assert by_field["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}
    whole = client.predict(data=body(prompt="Once upon a time", max_tokens=8, temperature=0))
    assert whole["token_ids"] == by_field["token_ids"]
    assert client.predict(data=b"Once upon a time")["usage"]["prompt_tokens"] == 4


def test_stream_predictions_without_a_promise_is_one_message(client: GrpcClient, cases: list[Case]) -> None:
    (message,) = client.stream(data=body(prompt=cases[1].prompt, stream=True, **GREEDY))
    assert str(cases[1].answer).replace(" ", "").encode() in message


def test_predictions_with_stream_in_its_body_is_one_message_and_harms_nobody(
    client: GrpcClient, cases: list[Case]
) -> None:
    answer = client.predict(data=body(prompt=cases[2].prompt, stream=True, **GREEDY))
    assert answer["token_ids"] == cases[2].answer


def test_a_part_names_the_route(client: GrpcClient) -> None:
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
    answer = client.predict(data=body(**chat, temperature=0), url_path=b"v1/chat/completions")
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]


def test_16_streams_at_once_are_each_right(client: GrpcClient, cases: list[Case], running: Served) -> None:
    def stream(number: int) -> tuple[list[int], int]:
        case = cases[number % NUM_PROMPTS]
        messages = list(client.stream(data=body(prompt=case.prompt, **GREEDY), **STREAM))
        if len(messages) == 1:  # continuousBatching: the answer's JSON
            return httpx.Response(200, content=messages[0]).json()["token_ids"], 1
        return [token for event in events(messages) for token in event["token_ids"]], len(messages)

    with ThreadPoolExecutor(16) as threads:
        heard = list(threads.map(stream, range(16)))
    for number, (token_ids, _) in enumerate(heard):
        assert token_ids == cases[number % NUM_PROMPTS].answer
    if running.asynchronous:
        assert min(messages for _, messages in heard) > 3


@pytest.mark.parametrize(
    ("parts", "status", "named"),
    [
        ({"data": b'{"prompt": "a", }'}, 400, "line 1 column 17"),
        ({"data": body(prompt="a", top_p=7)}, 400, "top_p"),
        ({"prompt": b"a", "max_tokens": b"-1"}, 400, "max_tokens"),
        ({"data": b"\xff\xfe"}, 400, "UTF-8"),
        ({}, 400, "body"),
        ({"data": body(prompt="a"), "url_path": b"v1/embeddings"}, 404, "v1/completions"),
        ({"data": body(prompt="a"), "rpc": b"StreamPredictions2"}, 400, "rpc"),
    ],
    ids=["malformed", "field", "part", "bytes", "empty", "route", "rpc"],
)
def test_a_bad_request_gets_its_own_error_while_others_go_on(
    client: GrpcClient, cases: list[Case], parts: dict[str, bytes], status: int, named: str
) -> None:
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(client.predict, data=body(prompt=cases[3].prompt, **GREEDY))
        for answer in (client.predict(**parts), httpx.Response(200, content=b"".join(client.stream(**parts))).json()):
            error = answer["error"]
            assert (error["status"] if isinstance(error, dict) else answer["status"]) == status
            assert named in str(error)
        assert other.result()["token_ids"] == cases[3].answer


def test_a_call_can_be_cancelled_by_the_name_that_its_client_gave_it(served: Served, client: GrpcClient) -> None:
    call = client.stub.StreamPredictions(client.request({"data": body(**ENDLESS), "x-request-id": b"mine"}))
    wait_until(lambda: served.stats()["num_requests_running"] == 1)
    answer = client.predict(data=body(request_id="mine"), url_path=b"v1/cancel")
    assert answer == {"request_id": "mine", "cancelled": 1}
    (message,) = call
    error = httpx.Response(200, content=message.prediction).json()["error"]
    assert (error["status"], error["code"]) == (409, "cancelled")
    wait_until(served.is_idle)


def test_a_client_that_has_gone_frees_its_pages_through_the_cancel_route(served: Served, client: GrpcClient) -> None:
    call = client.stub.StreamPredictions(client.request({"data": body(**ENDLESS), "x-request-id": b"gone", **STREAM}))
    wait_until(lambda: served.stats()["num_requests_running"] == 1)
    call.cancel()
    answer = httpx.post(f"{served.url}/v1/cancel", json={"request_id": "gone"}, trust_env=False).json()
    assert answer["cancelled"] == 1
    wait_until(served.is_idle)
    again = httpx.post(f"{served.url}/v1/cancel", json={"request_id": "gone"}, trust_env=False)
    assert (again.status_code, again.json()["cancelled"]) == (200, 0)


def test_a_call_whose_deadline_passes_does_not_hang_the_next(served: Served, client: GrpcClient) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.predict(timeout=0.5, data=body(**ENDLESS, timeout=2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert client.predict(data=body(**GREEDY, prompt="a"))["finish_reason"] == "length"
    wait_until(served.is_idle)  # by its own `timeout`


def test_a_stream_over_http_can_be_cancelled_by_its_id(served: Served) -> None:
    with httpx.stream("POST", served.bare_url, json={**ENDLESS, "stream": True}, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        request_id = stream.headers["x-request-id"]
        answer = httpx.post(f"{served.url}/v1/cancel", json={"request_id": request_id}, trust_env=False)
        assert answer.json() == {"request_id": request_id, "cancelled": 1}
        assert '"cancelled"' in "".join(lines)


@only_asynchronous
def test_http_clients_of_the_asynchronous_mode_have_lengths_statuses_and_streams(
    served: Served, cases: list[Case]
) -> None:
    with httpx.Client(timeout=60, trust_env=False) as http:
        for _ in range(5):  # on one connection
            whole = http.post(served.bare_url, json={"prompt": cases[4].prompt, **GREEDY})
            assert int(whole.headers["content-length"]) == len(whole.content)
            assert whole.json()["token_ids"] == cases[4].answer
        bad = http.post(served.bare_url, json={"prompt": ""})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt")
        asked = {"prompt": cases[4].prompt, **GREEDY, "stream": True}
        with http.stream("POST", served.bare_url, json=asked) as stream:
            heard = list(read_events(stream.iter_lines()))
    assert len(heard) > 3
    assert [token for event in heard for token in event["token_ids"]] == cases[4].answer


@only_asynchronous
def test_the_official_client_works_in_the_asynchronous_mode(served: Served) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 8}
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole = client.chat.completions.create(**asked, temperature=0)
        chunks = list(client.chat.completions.create(**asked, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


@only_asynchronous
def test_a_hang_up_is_not_seen_there_so_that_the_cancel_route_serves_for_it(served: Served) -> None:
    name = {"x-request-id": "left"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.bare_url, json=ENDLESS, headers=name, timeout=1.0, trust_env=False)
    time.sleep(1.0)
    assert served.stats()["num_requests_running"] == 1
    answer = httpx.post(f"{served.url}/v1/cancel", json={"request_id": "left"}, trust_env=False)
    assert answer.json()["cancelled"] == 1
    wait_until(served.is_idle)


@only_asynchronous
def test_more_requests_than_can_run_or_wait_are_503_there(served: Served, client: GrpcClient) -> None:
    named = {"x-request-id": b"many", "data": body(**ENDLESS)}
    calls = [client.stub.Predictions.future(client.request(named)) for _ in range(16)]
    wait_until(lambda: served.stats()["num_requests_running"] == 16)
    calls += [client.stub.Predictions.future(client.request(named)) for _ in range(16)]
    wait_until(lambda: served.stats()["num_requests_waiting"] == 16)
    refused = httpx.post(served.bare_url, json=ENDLESS, timeout=60, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert refused.headers["retry-after"]
    assert client.predict(data=body(request_id="many"), url_path=b"v1/cancel")["cancelled"] == 32
    assert all(b"cancelled" in call.result().prediction for call in calls)


@only_asynchronous
def test_a_description_through_the_management_address_disturbs_nobody(served: Served, client: GrpcClient) -> None:
    described = httpx.get(f"{served.management_url}?customized=true", timeout=60, trust_env=False).json()
    assert "smollm2-135m" in str(described[0]["customizedMetadata"])
    assert client.predict(data=body(prompt="a", **GREEDY))["finish_reason"] == "length"
