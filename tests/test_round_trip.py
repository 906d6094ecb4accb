"""The bridge to TorchServe: the real handler, engine and `ts` service; `frontend.py` plays the Java side."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend import Client, Frontend
from tiny_llama import write_tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from ifb_handler.api.errors import APIError
from ifb_handler.api.plain import PlainAnswer
from ifb_handler.torchserve import conversation
from ifb_handler.torchserve.conversation import Conversation

OPTIONS = {"max_num_seqs": 4, "num_gpu_blocks_override": 96, "max_num_waiting": 10, "default_max_tokens": 8}
FOREVER = {"prompt": "the fox", "max_tokens": 450, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an answer is plain or a stream does not depend on the machine's speed; some tests ask for probes."""
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 600.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    frontend = Frontend(tmp_path_factory.mktemp("archive"), {"model_path": str(checkpoint), **OPTIONS})
    yield frontend
    frontend.engine.shutdown()


@pytest.fixture
def frontend(served: Frontend) -> Iterator[Frontend]:
    """The one handler of this module; whatever a test does, nothing stays behind."""
    yield served
    for client in list(served.jobs.values()):
        client.hang_up()
    while served.jobs:
        served.round_trip()
    wait_until(lambda: idle(served))
    served.engine.check()


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> Callable[[str, int], list[int]]:
    """transformers' own continuation of a text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)

    model.generation_config.eos_token_id = None  # as with ignore_eos

    def generate(text: str, tokens: int) -> list[int]:
        prompt = tokenizer(text, return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=tokens)
        return output[0, prompt.input_ids.shape[1] :].tolist()

    return generate


def idle(frontend: Frontend) -> bool:
    stats = frontend.engine.stats()
    return (stats.num_requests_running, stats.num_requests_waiting, stats.used_blocks) == (0, 0, 0)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def plain(text: str, tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def streamed_ids(client: Client) -> list[int]:
    assert client.events[-1] == "[DONE]"
    return [token for event in client.events[:-1] for token in event["token_ids"]]


def test_a_quick_one_shot_answer_is_one_json_body(frontend: Frontend, greedy: Callable[[str, int], list[int]]) -> None:
    client = frontend.send("", plain("the fox"))
    frontend.finish(client)
    assert (client.status, client.chunked) == (200, False)
    assert client.answer_headers["content-type"] == "application/json"
    assert client.json["token_ids"] == greedy("the fox", 8)
    assert client.json["finish_reason"] == "length"
    assert client.json["usage"]["completion_tokens"] == 8


def test_a_streamed_answer_is_chunks_of_events(frontend: Frontend, greedy: Callable[[str, int], list[int]]) -> None:
    client = frontend.send("", plain("hello fox", 40, stream=True))
    frontend.finish(client)
    assert (client.status, client.chunked) == (200, True)
    assert client.answer_headers["content-type"].startswith("text/event-stream")
    assert streamed_ids(client) == greedy("hello fox", 40)
    assert len(client.chunks) > 1


def test_more_clients_than_the_batch_holds_all_get_their_own_answers(
    frontend: Frontend, greedy: Callable[[str, int], list[int]]
) -> None:
    lengths = [3, 30, 11, 5, 24, 17, 8, 40, 12]
    clients = {length: frontend.send("", plain(f"once {length}", length, stream=length % 2 == 0)) for length in lengths}
    frontend.finish()
    for length, client in clients.items():
        ids = streamed_ids(client) if length % 2 == 0 else client.json["token_ids"]
        assert ids == greedy(f"once {length}", length)


def test_a_request_that_joins_later_does_not_wait_for_the_others(frontend: Frontend) -> None:
    long = frontend.send("", {**FOREVER, "stream": True})
    while not long.chunks:
        frontend.round_trip()
    short = frontend.send("", plain("the dog", 3))
    frontend.finish(short)
    assert not long.done


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", b'{"prompt": nope}', 400, None),
        ("v1/completions", b"", 400, None),
        ("v1/completions", {"prompt": ""}, 400, "prompt"),
        ("v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ("v1/completions", {"prompt": "a", "temperature": float("nan")}, 400, "temperature"),
        ("v1/completions", {"prompt": "a " * 5000}, 400, "prompt"),
        ("v1/completions", {"prompt": "a " * 1_500_000}, 400, "prompt"),
        ("v1/completions", {"prompt": [399, 400]}, 400, "prompt"),
        ("v1/completions", {"prompt": "a", "stop_token_ids": [10**9]}, 400, "stop_token_ids"),
        ("v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("v1/chat/completions", {"messages": []}, 400, "messages"),
        ("v1/embeddings", {"input": "a"}, 404, None),
        ("v1/models/gpt-9", b"", 404, None),
        ("engine/steps/first", b"", 400, "after"),
    ],
)
def test_a_bad_request_gets_its_own_error_and_a_stream_beside_it_goes_on(
    frontend: Frontend, path: str, body: Any, status: int, param: str | None
) -> None:
    stream = frontend.send("", {**FOREVER, "max_tokens": 60, "stream": True})
    bad = frontend.send(path, body)
    frontend.finish(bad)
    assert (bad.status, bad.chunked) == (status, False)
    assert bad.answer_headers["content-type"] == "application/json"
    assert bad.json["error"]["param"] == param
    assert bad.json["error"]["message"]
    frontend.finish(stream)
    assert len(streamed_ids(stream)) == 60


def test_a_full_waiting_queue_is_a_503_for_the_request_too_many(frontend: Frontend) -> None:
    clients = [frontend.send("", FOREVER) for _ in range(20)]
    frontend.round_trip()
    refused = [client for client in clients if client.done]
    assert refused
    assert {client.status for client in refused} == {503}
    assert all(client.json["error"]["code"] == "queue_full" for client in refused)
    assert all(client.answer_headers["retry-after"] == "1" for client in refused)


def test_a_body_that_is_sent_again_is_not_parsed_again(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    understand = frontend.handler.round_trip._understand
    monkeypatch.setattr(frontend.handler.round_trip, "_understand", lambda *a: (parsed.append(a), understand(*a)))
    client = frontend.send("", {**FOREVER, "max_tokens": 200})
    frontend.finish(client)
    assert client.times_sent > 1
    assert len(parsed) == 1


def test_a_stream_that_hangs_up_gives_its_pages_back(frontend: Frontend) -> None:
    client = frontend.send("", {**FOREVER, "stream": True})
    stays = frontend.send("", {**FOREVER, "stream": True})
    while not (client.chunks and stays.chunks):
        frontend.round_trip()
    client.hang_up()
    while client.request_id in frontend.jobs:
        frontend.round_trip()
    frontend.round_trip()  # its id is missing in this one
    wait_until(lambda: frontend.engine.stats().num_requests_running == 1)
    assert not stays.done


def test_a_slow_one_shot_answer_becomes_a_stream_whose_last_chunk_is_the_body(
    frontend: Frontend, greedy: Callable[[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    client = frontend.send("v1/completions", plain("the fox", 120))
    frontend.finish(client)
    assert (client.status, client.chunked) == (200, True)
    assert client.chunks[0] == b""
    assert client.json["usage"]["completion_tokens"] == 120
    assert client.chunks[-1] == client.body
    assert client.times_sent == 1


def test_a_one_shot_client_that_hangs_up_gives_its_pages_back(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    client = frontend.send("", FOREVER)
    client.hang_up()
    while frontend.jobs:
        frontend.round_trip()
    # TorchServe has nothing left to call for: the worker must find out by itself.
    wait_until(lambda: idle(frontend))
    assert frontend.engine.stats().request_success["abort"] > 0


def test_a_waiting_stream_is_probed_too(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    running = [frontend.send("", {**FOREVER, "stream": True}) for _ in range(4)]
    while not all(client.body for client in running):
        frontend.round_trip()
    waiting = frontend.send("", {**FOREVER, "stream": True})
    waiting.hang_up()
    while waiting.request_id in frontend.jobs:
        frontend.round_trip()
    assert waiting.chunks == [b""]
    assert not any(client.done for client in running)


def test_clients_in_the_queue_are_probed_seldom_and_those_that_hold_pages_often(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(conversation, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(conversation, "QUEUED_PROBE_SECONDS", 600.0)
    executor = frontend.engine._core.executor
    execute = executor.execute
    monkeypatch.setattr(executor, "execute", lambda batch: (time.sleep(0.05), execute(batch))[1])
    running = [frontend.send("", FOREVER) for _ in range(4)]
    while frontend.engine.stats().num_requests_running < 4:
        frontend.round_trip()
    queued = [frontend.send("", {**FOREVER, "stream": stream}) for stream in (False, True)]
    while not all(frontend.engine.is_waiting(client.request_id) for client in queued):
        frontend.round_trip()
    frontend.round_trip()
    before = [len(client.chunks) for client in (*running, *queued)]
    for _ in range(3):
        frontend.round_trip()
    after = [len(client.chunks) for client in (*running, *queued)]
    assert [now - then for then, now in zip(before, after, strict=True)] == [3] * 4 + [0] * 2
    for client in queued:
        frontend.engine.cancel(client.request_id)


def test_an_answer_larger_than_a_reply_may_be_goes_out_in_pieces(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, greedy: Callable[[str, int], list[int]]
) -> None:
    monkeypatch.setattr(conversation, "MAX_PIECE", 50)
    one_shot = frontend.send("", plain("the fox", 30))
    stream = frontend.send("", plain("the fox", 30, stream=True))
    frontend.finish()
    assert one_shot.json["token_ids"] == streamed_ids(stream) == greedy("the fox", 30)
    assert max(len(chunk) for chunk in one_shot.chunks + stream.chunks) <= 50


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_rendered_is_a_500_and_the_others_go_on(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    other = frontend.send("v1/completions", {**FOREVER, "max_tokens": 60, "stream": True})
    frontend.round_trip()
    monkeypatch.setattr(PlainAnswer, "_body", lambda *a: 1 / 0)
    monkeypatch.setattr(PlainAnswer, "_events", lambda *a: 1 / 0)
    client = frontend.send("", plain("the fox", stream=stream))
    frontend.finish(client)
    assert (client.status, client.chunked) == (500, False)
    assert client.json["error"]["type"] == "server_error"
    frontend.finish(other)
    assert other.events[-1] == "[DONE]"


def test_an_engine_failure_after_the_first_chunk_is_an_event_and_the_end(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [frontend.send("v1/completions", {**FOREVER, "stream": True}) for _ in range(2)]
    while not all(client.chunks for client in streams):
        frontend.round_trip()
    fail_next_step(frontend, monkeypatch)
    frontend.finish()
    for client in streams:
        assert client.status == 200
        assert client.events[-1]["error"]["type"] == "server_error"
    after = frontend.send("", plain("the fox"))
    frontend.finish(after)
    assert after.status == 200


def test_an_engine_failure_before_the_first_chunk_is_a_500(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (False, True):
        fail_next_step(frontend, monkeypatch)
        client = frontend.send("", plain("the fox", stream=stream))
        frontend.finish(client)
        assert client.status == 500
        assert "error" in client.json


def fail_next_step(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = frontend.engine._core.executor
    execute = executor.execute

    def fail(*arguments: Any, **keywords: Any) -> Any:
        monkeypatch.setattr(executor, "execute", execute)
        raise RuntimeError("injected")

    monkeypatch.setattr(executor, "execute", fail)


def test_a_failure_of_the_round_trip_itself_ends_every_request_with_an_error(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = frontend.send("v1/completions", {**FOREVER, "stream": True})
    while not stream.chunks:
        frontend.round_trip()
    one_shot = frontend.send("", FOREVER)
    monkeypatch.setattr(frontend.handler, "inference", lambda: 1 / 0)
    frontend.round_trip()
    assert stream.done
    assert "error" in stream.events[-1]
    assert (one_shot.status, one_shot.chunked) == (500, False)


def test_a_large_prompt_is_tokenized_beside_the_round_trips(frontend: Frontend) -> None:
    large = frontend.send("v1/completions", {"prompt": "hello " * 2000})  # fits by the cheap bound, not in truth
    frontend.finish(large)
    assert large.json["error"]["param"] == "prompt"
    fits = frontend.send("", plain("." * 9000, 4))  # more than is tokenized in a round trip
    frontend.finish(fits)
    assert fits.status in (200, 400)


def test_information_needs_no_body_and_is_answered_at_once(frontend: Frontend) -> None:
    stream = frontend.send("", {**FOREVER, "stream": True})
    while not stream.chunks:
        frontend.round_trip()
    paths = ("health", "v1/models", "v1/models/registered", "engine/stats", "engine/steps", "engine/steps/3")
    clients = {path: frontend.send(path) for path in paths}
    frontend.finish(*clients.values())
    assert all(client.status == 200 for client in clients.values())
    assert not stream.done
    assert clients["health"].json["status"] == "ok"
    assert clients["health"].json["num_requests_running"] == 1
    assert clients["v1/models"].json["data"][0]["id"] == "tiny-llama"
    assert clients["engine/stats"].json["total_blocks"] == 96
    assert min(step["step"] for step in clients["engine/steps/3"].json["steps"]) > 3
    prefilled = [request_id for step in clients["engine/steps"].json["steps"] for request_id, _ in step["prefill"]]
    assert stream.request_id in prefilled


def test_a_chat_is_answered_in_chunks_that_begin_with_the_role(frontend: Frontend) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0, "stream": True}
    client = frontend.send("v1/chat/completions", body)
    frontend.finish(client)
    assert client.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert client.events[-2]["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_grpc_request_gets_a_single_message(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    client = frontend.send("", plain("the fox", 60, stream=True), http=False)
    frontend.finish(client)
    assert not client.chunked
    assert len(client.chunks) == 1
    assert client.json["usage"]["completion_tokens"] == 60


def test_an_empty_reply_keeps_the_clients_waiting(frontend: Frontend) -> None:
    client = frontend.send("", {**FOREVER, "max_tokens": 300})
    frontend.round_trip()
    assert (client.status, client.done) == (None, False)
    frontend.finish(client)
    assert client.status == 200


def test_a_round_trip_does_not_wait_for_a_step_and_queues_what_is_new(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = frontend.engine._core.executor
    execute, goes_on, entered = executor.execute, threading.Event(), threading.Event()

    def stall(*arguments: Any, **keywords: Any) -> Any:
        entered.set()
        assert goes_on.wait(60)
        return execute(*arguments, **keywords)

    monkeypatch.setattr(executor, "execute", stall)
    first = frontend.send("", plain("the fox"))
    frontend.round_trip()
    assert entered.wait(60)
    late = frontend.send("", plain("the dog"))
    frontend.round_trip()
    assert frontend.engine.stats().num_requests_waiting == 1
    goes_on.set()
    frontend.finish(first, late)
    assert (first.status, late.status) == (200, 200)


def test_a_dead_engine_ends_the_worker_once_its_clients_know(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[int] = []
    monkeypatch.setattr("os._exit", exits.append)
    monkeypatch.setattr("ifb_handler.handler.EXIT_DELAY_SECONDS", 0.0)
    frontend = Frontend(tmp_path, {"model_path": str(checkpoint), **OPTIONS})
    stream = frontend.send("v1/completions", {**FOREVER, "stream": True})
    while not stream.chunks:
        frontend.round_trip()
    monkeypatch.setattr(frontend.engine._core, "run", lambda schedule: 1 / 0)
    frontend.finish(stream)
    assert "error" in stream.events[-1]
    health = frontend.send("health")
    frontend.finish(health)
    assert health.status == 503
    wait_until(lambda: 1 in exits)


def test_a_grammar_that_is_refused_after_a_long_while_has_its_own_status(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    goes_on = threading.Event()
    prepare = frontend.engine.prepare
    monkeypatch.setattr(frontend.engine, "prepare", lambda params: (goes_on.wait(60), prepare(params)))
    client = frontend.send("", plain("the fox", guided_regex="(a"))
    for _ in range(5):
        frontend.round_trip()
    assert client.status is None
    goes_on.set()
    frontend.finish(client)
    assert (client.status, client.chunked) == (400, False)
    assert client.json["error"]["param"] == "guided_regex"


@pytest.mark.parametrize("named", ["\ud800", "", 5, None])
def test_an_id_that_cannot_be_one_is_a_400_of_v1_cancel(frontend: Frontend, named: object) -> None:
    client = frontend.send("v1/cancel", {"request_id": named})
    frontend.finish(client)
    assert (client.status, client.json["error"]["param"]) == (400, "request_id")


def test_half_a_surrogate_pair_in_an_answer_is_sent_as_json_escapes_it() -> None:
    for end in (Conversation.tell, lambda talk, text: talk.fail(APIError(400, text))):
        talk = Conversation("r", 0.0)
        end(talk, '{"said":"\ud800"}')
        reply = talk.next_reply(0.0)
        assert reply is not None
        assert b"\\ud800" in reply.body
        json.loads(reply.body)


@pytest.mark.parametrize("name", ["describe", "Describe"])
def test_a_clients_own_describe_header_changes_nothing(frontend: Frontend, name: str) -> None:
    client = frontend.send("", plain("the fox"))
    client.headers[name] = "True"
    frontend.finish(client)
    assert (client.status, len(client.json["token_ids"])) == (200, 8)
