"""What clients ask for, through the real round trip and engine on a tiny model; `frontend.py` plays TorchServe."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from frontend import Client, Frontend
from tiny_llama import write_tiny_llama

from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.torchserve import conversation

OPTIONS = {
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 400,
    "max_num_waiting": 20,
    "default_max_tokens": 8,
    "max_input_tokens": 600,
    "max_total_tokens": 900,
    "max_n": 8,
}
GREEDY = {"temperature": 0, "ignore_eos": True}
FOREVER = {"prompt": "the fox", "max_tokens": 450, **GREEDY}
MESSAGES = [{"role": "user", "content": "hello fox"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama", max_model_len=1024)
    frontend = Frontend(tmp_path_factory.mktemp("archive"), {"model_path": str(checkpoint), **OPTIONS})
    yield frontend
    frontend.engine.shutdown()


@pytest.fixture
def frontend(served: Frontend) -> Iterator[Frontend]:
    """Whatever a test does, nothing stays behind."""
    yield served
    for client in list(served.jobs.values()):
        client.hang_up()
    while served.jobs:
        served.round_trip()
    wait_until(lambda: idle(served))
    served.engine.check()


def idle(frontend: Frontend) -> bool:
    stats = frontend.engine.stats()
    return (stats.num_requests_running, stats.num_requests_waiting, stats.used_blocks) == (0, 0, 0)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def answered(frontend: Frontend, path: str, body: dict[str, Any], status: int = 200) -> Any:
    client = frontend.send(path, body)
    frontend.finish(client)
    assert client.status == status, client.body
    return client.json


def by_torchserves_own_path(frontend: Frontend, body: dict[str, Any]) -> Client:
    """As TorchServe hands over `/v1/models/m:predict` and `/v2/models/m/infer`: without the path."""
    client = frontend.send("", body)
    del client.headers["url_path"]
    frontend.finish(client)
    return client


def test_each_prompt_of_a_request_is_answered_as_if_it_were_alone(frontend: Frontend) -> None:
    prompts = ["the fox", [60, 70, 80], "once upon a time"]
    alone = [answered(frontend, "v1/completions", {"prompt": p, "max_tokens": 9, **GREEDY}) for p in prompts]
    together = answered(frontend, "v1/completions", {"prompt": prompts, "max_tokens": 9, **GREEDY})
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [body["choices"][0]["text"] for body in alone]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    used = [body["usage"]["prompt_tokens"] for body in alone]
    assert together["usage"]["prompt_tokens"] == sum(used)
    assert together["usage"]["completion_tokens"] == 27


def test_a_seeded_request_gives_its_n_answers_again(frontend: Frontend) -> None:
    body = {"prompt": ["the fox", "a dog"], "n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    first, second = (answered(frontend, "v1/completions", body)["choices"] for _ in range(2))
    assert first == second
    assert [choice["index"] for choice in first] == [0, 1, 2, 3, 4, 5]
    assert len({choice["text"] for choice in first[:3]}) > 1


def test_beams_are_told_best_first_and_streamed_as_one_event_each(frontend: Frontend) -> None:
    beams = {"use_beam_search": True, "max_tokens": 6, "ignore_eos": True, "length_penalty": 0.5}
    body = {"prompt": ["the fox", [60, 70, 80]], "n": 2, "best_of": 4, "early_stopping": "never", **beams}
    whole = answered(frontend, "v1/completions", body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) == 4
    assert whole["usage"]["completion_tokens"] == 24
    (best,) = frontend.engine.generate(
        [[60, 70, 80]],
        SamplingParams(
            use_beam_search=True, best_of=4, max_tokens=6, ignore_eos=True, length_penalty=0.5, early_stopping="never"
        ),
    )
    assert whole["choices"][2]["text"] == best.text
    client = frontend.send("v1/completions", {**body, "stream": True})
    frontend.finish(client)
    told = [event["choices"][0] for event in client.events[:-1]]
    assert sorted((c["index"], c["text"]) for c in told) == [(c["index"], c["text"]) for c in whole["choices"]]
    chat = {"messages": MESSAGES, "n": 3, **beams}
    texts = [c["message"]["content"] for c in answered(frontend, "v1/chat/completions", chat)["choices"]]
    assert len(set(texts)) == 3
    client = frontend.send("v1/chat/completions", {**chat, "stream": True})
    frontend.finish(client)
    streamed = [event["choices"][0] for event in client.events[:-1] if event["choices"][0]["delta"].get("content")]
    assert sorted((c["index"], c["delta"]["content"]) for c in streamed) == list(enumerate(texts))
    plain = answered(frontend, "", {"prompt": [60, 70, 80], "best_of": 4, "early_stopping": "never", **beams})
    assert plain["text"] == best.text


def test_n_answers_stream_side_by_side(frontend: Frontend) -> None:
    body = {"messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    whole = answered(frontend, "v1/chat/completions", body)
    client = frontend.send("v1/chat/completions", {**body, "stream": True})
    frontend.finish(client)
    texts = ["", "", ""]
    for event in client.events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert sum(event["choices"][0]["finish_reason"] is not None for event in client.events[:-1]) == 3


def test_a_client_that_hangs_up_frees_all_its_prompts_and_answers(frontend: Frontend) -> None:
    client = frontend.send("v1/completions", {**FOREVER, "prompt": ["the fox", "a dog"], "n": 2, "stream": True})
    stays = frontend.send("v1/completions", {**FOREVER, "stream": True})
    while not (client.body and stays.body):
        frontend.round_trip()
    client.hang_up()
    while client.request_id in frontend.jobs:
        frontend.round_trip()
    frontend.round_trip()  # its id is missing in this one
    wait_until(lambda: frontend.engine.stats().num_requests_running == 1)
    assert not stays.done


def test_one_bad_prompt_refuses_the_request_and_frees_the_others(frontend: Frontend) -> None:
    body = {**FOREVER, "prompt": ["the fox", "a dog", [399, 10**6]]}
    error = answered(frontend, "v1/completions", body, status=400)["error"]
    assert error["param"] == "prompt[2]"
    wait_until(lambda: idle(frontend))


def test_logprobs_are_the_same_streamed_and_not(frontend: Frontend) -> None:
    body = {"prompt": "the quick brown fox", "max_tokens": 12, "logprobs": 3, "echo": True, **GREEDY}
    whole = answered(frontend, "v1/completions", body)["choices"][0]
    client = frontend.send("v1/completions", {**body, "stream": True})
    frontend.finish(client)
    joined: dict[str, list[Any]] = {}
    for event in client.events[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined["tokens"] == whole["logprobs"]["tokens"]
    assert joined["text_offset"] == whole["logprobs"]["text_offset"]
    assert joined["token_logprobs"][0] is None
    # Prompts are cut into chunks differently each time, which may change the last bit.
    assert joined["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_a_clients_own_name_for_a_request_is_in_its_answers_id(frontend: Frontend) -> None:
    clients = [frontend.send("v1/completions", {**FOREVER, "max_tokens": 4}) for _ in range(2)]
    for client in clients:
        client.headers["x-request-id"] = "mine"
    frontend.finish()
    assert [client.json["id"] for client in clients] == ["cmpl-mine"] * 2, "the same name twice breaks nothing"


def test_cached_tokens_are_counted(frontend: Frontend) -> None:
    body = {"prompt": "once upon a time there was a paged cache, and every page went back", "max_tokens": 2, **GREEDY}
    answered(frontend, "v1/completions", body)
    usage = answered(frontend, "v1/completions", body)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


# Limits


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [5] * 601}, "prompt"),
        ({"prompt": [5] * 500, "max_tokens": 401}, "max_tokens"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "a", "best_of": 9}, "best_of"),
        ({"prompt": "a", "best_of": 8, "use_beam_search": True}, "best_of"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 7, "n": 3}, "n"),
    ],
)
def test_more_than_the_server_allows_is_a_400(frontend: Frontend, body: dict[str, Any], param: str) -> None:
    error = answered(frontend, "v1/completions", body, status=400)["error"]
    assert error["param"] == param
    assert "max_" in error["message"]


def test_without_max_tokens_an_answer_ends_at_max_total_tokens(frontend: Frontend) -> None:
    usage = answered(frontend, "v1/chat/completions", {"messages": MESSAGES, **GREEDY})["usage"]
    assert usage["total_tokens"] == 900


def test_a_full_queue_tells_in_the_body_when_to_come_again(frontend: Frontend) -> None:
    clients = [frontend.send(path, body) for _ in range(20) for path, body in (
        ("v1/completions", FOREVER),
        ("generate", {"inputs": "the fox", "parameters": {"max_new_tokens": 400}}),
    )]  # fmt: skip
    frontend.round_trip()
    refused = [client for client in clients if client.done and client.status != 200]
    assert {client.status for client in refused} == {503, 429}
    for client in refused:
        assert client.answer_headers["retry-after"] == "1"
        error = client.json if client.status == 429 else client.json["error"]
        assert error["retry_after"] == 1


# Timeouts


@pytest.fixture
def slow(served: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine, an answer of hundreds of tokens takes longer than these requests have."""
    execute = served.engine._core.executor.execute

    def slowly(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(0.005)
        return execute(*arguments, **keywords)

    monkeypatch.setattr(served.engine._core.executor, "execute", slowly)


@pytest.mark.usefixtures("slow")
def test_an_expired_request_is_ended_with_its_own_error_also_while_it_waits(frontend: Frontend) -> None:
    running = [frontend.send("", {**FOREVER, "stream": True}) for _ in range(4)]
    while not all(client.body for client in running):
        frontend.round_trip()
    waiting = frontend.send("v1/completions", {**FOREVER, "timeout": 0.05})
    frontend.finish(waiting)
    assert waiting.status == 504
    assert waiting.json["error"]["type"] == "timeout_error"
    assert waiting.json["error"]["code"] == "request_timeout"
    wait_until(lambda: frontend.engine.stats().num_requests_waiting == 0)
    assert not any(client.done for client in running)


@pytest.mark.usefixtures("slow")
def test_an_expired_stream_ends_with_an_error_event_and_frees_its_pages(frontend: Frontend) -> None:
    client = frontend.send("v1/completions", {**FOREVER, "stream": True, "timeout": 0.3})
    frontend.finish(client)
    assert client.status == 200
    assert client.events[-1]["error"]["code"] == "request_timeout"
    assert "choices" in client.events[0]
    wait_until(lambda: idle(frontend))


@pytest.mark.usefixtures("slow")
def test_the_servers_timeout_holds_for_requests_that_name_none_and_for_those_that_name_more(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frontend.handler.round_trip._model
    monkeypatch.setitem(vars(model), "config", dataclasses.replace(model.config, request_timeout=0.2))
    clients = [frontend.send("generate", {"inputs": "the fox", "parameters": {"max_new_tokens": 400}})]
    clients += [frontend.send("v1/completions", FOREVER), frontend.send("v1/completions", {**FOREVER, "timeout": 60})]
    frontend.finish()
    assert [client.status for client in clients] == [504] * 3
    assert clients[0].json["error_type"] == "timeout"


# TGI and KServe


def test_tgi_answers_by_its_routes_and_on_the_bare_path_streamed_and_not(frontend: Frontend) -> None:
    body = {"inputs": "the fox", "parameters": {"max_new_tokens": 6, "details": True, "top_n_tokens": 2}}
    whole = answered(frontend, "generate", body)
    assert answered(frontend, "", body) == whole
    assert len(whole["details"]["tokens"]) == whole["details"]["generated_tokens"]
    assert "".join(token["text"] for token in whole["details"]["tokens"]) == whole["generated_text"]
    for path in ("generate_stream", ""):
        client = frontend.send(path, {**body, "stream": True})
        frontend.finish(client)
        assert [event["token"]["id"] for event in client.events] == [t["id"] for t in whole["details"]["tokens"]]
        assert client.events[-1]["generated_text"] == whole["generated_text"]
        assert client.events[-1]["details"]["finish_reason"] == whole["details"]["finish_reason"]


def test_tgis_stop_string_is_part_of_the_answer(frontend: Frontend) -> None:
    body = {"inputs": "the fox", "parameters": {"max_new_tokens": 12}}
    text = answered(frontend, "generate", body)["generated_text"]
    stop = text[3:6]
    stopped = answered(frontend, "generate", {**body, "parameters": {"max_new_tokens": 12, "stop": [stop]}})
    assert stopped["generated_text"] == text[: text.index(stop) + len(stop)]


def test_a_bad_tgi_body_has_tgis_status_and_error(frontend: Frontend) -> None:
    error = answered(frontend, "generate", {"inputs": "a", "parameters": {"top_p": 7}}, status=422)
    assert error["error_type"] == "validation"
    assert answered(frontend, "", {"inputs": 5}, status=422)["error_type"] == "validation"


def test_info_is_tgis(frontend: Frontend) -> None:
    info = answered(frontend, "info", {})
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (600, 900)


def test_kserve_v1_comes_by_torchserves_own_path(frontend: Frontend) -> None:
    common = {"max_tokens": 5, **GREEDY}
    client = by_torchserves_own_path(frontend, {"instances": ["the fox", {"prompt": "a dog", **common}]})
    assert client.status == 200
    assert len(client.json["predictions"]) == 2
    alone = answered(frontend, "", {"prompt": "a dog", **common})
    assert client.json["predictions"][1]["token_ids"] == alone["token_ids"]
    refused = by_torchserves_own_path(frontend, {"instances": [5]})
    assert (refused.status, list(refused.json)) == (400, ["error"])


def test_kserve_v2_comes_by_torchserves_own_path(frontend: Frontend) -> None:
    tensor = {"name": "input_ids", "shape": [2, 3], "datatype": "INT64", "data": [60, 70, 80, 90, 100, 110]}
    parameters = {"max_tokens": 5, **GREEDY}
    body = {"id": "mine", "inputs": [tensor], "parameters": parameters, "outputs": [{"name": "token_ids"}]}
    client = by_torchserves_own_path(frontend, body)
    assert (client.status, client.json["id"]) == (200, "mine")
    (output,) = client.json["outputs"]
    alone = [answered(frontend, "", {"prompt": ids, **parameters}) for ids in ([60, 70, 80], [90, 100, 110])]
    assert output["shape"] == [2, 5]
    assert output["data"] == [token for body in alone for token in body["token_ids"]]


# Answers of a certain form

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("choice", "name"), [("required", None), ({"type": "function", "function": {"name": "weather"}}, "weather")]
)
def test_a_call_that_must_be_made_is_made_whatever_the_model_knows(
    frontend: Frontend, choice: Any, name: str | None
) -> None:
    """Streamed and not the same calls, with arguments of the right form, though the model is a random one."""
    body = {
        "messages": MESSAGES,
        "tools": [WEATHER] if name else [WEATHER, TIME],
        "tool_choice": choice,
        "max_tokens": 200,
        "n": 6,
        "seed": 3,
    }
    whole = answered(frontend, "v1/chat/completions", body)
    client = frontend.send("v1/chat/completions", {**body, "stream": True})
    frontend.finish(client)
    streamed: dict[tuple[int, int], dict[str, str]] = {}
    for event in client.events[:-1]:
        (told,) = event["choices"]
        assert not told["delta"].get("content")
        for call in told["delta"].get("tool_calls", ()):
            into = streamed.setdefault((told["index"], call["index"]), {"name": "", "arguments": ""})
            for part, text in call["function"].items():
                into[part] += text
    calls = []
    for told in whole["choices"]:
        if told["finish_reason"] == "length":
            continue
        assert told["finish_reason"] == "tool_calls"
        for i, call in enumerate(told["message"]["tool_calls"]):
            calls.append(call)
            assert call["function"] == streamed[told["index"], i]
            if call["function"]["name"] == "weather":
                jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
            assert call["function"]["name"] in ((name,) if name else ("weather", "time"))
    assert calls


def test_a_form_is_held_to_and_a_bad_one_is_a_400_the_first_time_and_the_second(frontend: Frontend) -> None:
    chosen = answered(frontend, "v1/completions", {"prompt": "the fox", "guided_choice": ["yes", "no"], "seed": 1})
    assert chosen["choices"][0]["text"] in ("yes", "no")
    for _ in range(2):
        error = answered(frontend, "v1/completions", {"prompt": "a", "guided_regex": "("}, status=400)["error"]
        assert error["param"] == "guided_regex"
    grammar = {"type": "regex", "value": "[0-9]{3}"}
    told = answered(frontend, "generate", {"inputs": "the fox", "parameters": {"grammar": grammar}})
    assert told["generated_text"].isdigit()


def test_limits_that_leave_no_token_are_the_clients_fault(frontend: Frontend) -> None:
    body = {"prompt": "a", "guided_regex": "z+", "allowed_token_ids": [60]}
    assert answered(frontend, "v1/completions", body, status=400)["error"]["param"] == "guided_regex"


# Faults that other servers' users met


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("v1/completions", {"prompt": ""}, 400),
        ("v1/completions", {"prompt": []}, 400),
        ("v1/chat/completions", {"messages": []}, 400),
        ("v1/completions", {"prompt": "a", "top_k": 1.5}, 400),
        ("v1/completions", {"prompt": "a", "temperature": float("nan")}, 400),
        ("v1/completions", {"prompt": "a", "logit_bias": {"100000000": 5}}, 400),
        ("v1/completions", {"prompt": "a", "logit_bias": {"-1": 5}}, 400),
        ("v1/completions", {"prompt": "a", "allowed_token_ids": [10**9]}, 400),
        ("v1/completions", {"prompt": [5] * 10_000}, 400),
        ("v1/completions", {"prompt": "a", "max_tokens": 10**30}, 400),
        ("v1/completions", {"prompt": "a", "seed": 2**64}, 400),
    ],
    ids=[
        "empty prompt", "no tokens", "no messages", "float top_k", "NaN", "bias beyond the vocabulary", "negative bias",
        "token beyond the vocabulary", "prompt beyond the pool", "max_tokens beyond an integer", "seed beyond 64 bits",
    ],
)  # fmt: skip
def test_what_killed_other_engines_is_a_400_here_and_the_next_request_is_served(
    frontend: Frontend, path: str, body: dict[str, Any], status: int
) -> None:
    assert answered(frontend, path, body, status)["error"]["message"]
    assert answered(frontend, "v1/completions", {"prompt": "the fox", "max_tokens": 3, **GREEDY})


def test_a_tiny_temperature_is_greedy_and_gives_text(frontend: Frontend) -> None:
    body = {"prompt": "the fox", "max_tokens": 8, "ignore_eos": True}
    tiny = answered(frontend, "v1/completions", {**body, "temperature": 1e-4})
    assert (
        tiny["choices"][0]["text"]
        == answered(frontend, "v1/completions", {**body, "temperature": 0})["choices"][0]["text"]
    )


def test_embeddings_are_a_404_that_says_why(frontend: Frontend) -> None:
    error = answered(frontend, "v1/embeddings", {"input": "a"}, status=404)["error"]
    assert "no embeddings" in error["message"]


def test_a_failure_before_the_first_token_is_never_only_done(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has had an empty chunk, so that the status is gone: the error must be an event."""
    monkeypatch.setattr(conversation, "FIRST_PROBE_SECONDS", 0.0)
    executor = frontend.engine._core.executor
    probed = threading.Event()

    def fail(*arguments: Any, **keywords: Any) -> Any:
        assert probed.wait(60)
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(executor, "execute", fail)
        client = frontend.send("v1/completions", {**FOREVER, "stream": True})
        while not client.chunks:
            frontend.round_trip()
        probed.set()
        frontend.finish(client)
    assert client.chunks[0] == b""
    (event,) = client.events
    assert event["error"]["type"] == "server_error"
