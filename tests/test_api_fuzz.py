"""Thousands of random bodies on every route that generates: each gets an answer or a 4xx, and nobody else notices."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from frontend import Client, Frontend
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import write_tiny_llama

BODIES, EXAMPLES = 100, 20  # a route: 2,000 bodies
OPTIONS = {"max_num_seqs": 32, "num_gpu_blocks_override": 512, "max_num_waiting": 4000, "default_max_tokens": 8}
NEIGHBOUR = {"prompt": [60, 70, 80], "max_tokens": 29, "temperature": 0, "ignore_eos": True, "stream": True}

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, math.nan, math.inf, -math.inf, 1e308, 10**30, -(10**30), 2**63, 2**64,
    "", "a", "\ud800", "\x00", "é" * 10, "1", "null", "x" * 3000, [], [None], [1], ["a", 1], [[]], [[1], "a"], {},
    {"a": 1}, {"": None}, {"type": "function"}, [[[[[[]]]]]], [{}], {"a": {"b": {"c": []}}}, [math.nan], [""],
]  # fmt: skip
TEXTS = ["the fox", "a", "zwölf Boxkämpfer", "日本", "{", "\n", "once upon a time " * 3, " ", "</s>", "\ufffd"]
TOKENS = [[5, 6, 7], [399], [0, 1], [60] * 20, [60] * 60, [400], [-1]]
SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 5, 8, 100],
    "min_tokens": [0, 1, 3],
    "temperature": [0, 0.5, 1, 2, 1e-4, 3],
    "top_p": [0.1, 0.9, 1, 0],
    "top_k": [-1, 0, 1, 5, 10**6],
    "min_p": [0, 0.1, 1],
    "presence_penalty": [-2, 0, 1.5],
    "frequency_penalty": [-2, 0, 1.5],
    "repetition_penalty": [0.5, 1, 2],
    "seed": [0, 7, 2**64 - 1],
    "stop": ["e", ["the", "x"], [], ["a"] * 20, "y" * 300],
    "stop_token_ids": [[60], [], [10**6]],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "logit_bias": [{"60": 5}, {"61": -100}, {"999999": 1}],
    "allowed_token_ids": [[60, 61, 62], [399], [400]],
    "bad_words": [["fox"], ["e", "a"]],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "guided_choice": [["yes", "no"], []],
    "guided_regex": ["[a-z]+", "(", "(a|b)*c{5}"],
    "guided_json": [{"type": "object"}, {"type": "nonsense"}, "{"],
    "guided_grammar": ['root ::= "a"', "start: /a+/", "("],
}
OPENAI = SAMPLING | {
    "model": ["tiny-llama", "registered", "dummy", "gpt-9"],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"include_usage": "yes"}],
    "n": [1, 2, 3, 100],
    "best_of": [1, 3],
    "use_beam_search": [True, False],
    "length_penalty": [1, 0.5],
    "early_stopping": [False, "never"],
    "prompt_logprobs": [0, 2],
    "timeout": [60, "soon", -1],
    "priority": [0, -5],
    "cache_salt": ["mine"],
    "truncate_prompt_tokens": [-1, 1, 5],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True],
}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [[{"type": "function", "function": WEATHER}], [{"type": "function", "function": {"name": "time"}}]]
MESSAGES = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}, {"role": "assistant", "content": "z"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
]
TGI = {
    "max_new_tokens": [1, 5, 8, 100],
    "do_sample": [True, False],
    "temperature": [0.5, 1, 2],
    "top_k": [1, 5],
    "top_p": [0.5, 0.9],
    "typical_p": [1.0, 0.5],
    "repetition_penalty": [1.1, 0.9],
    "frequency_penalty": [0.5],
    "seed": [0, 5],
    "stop": [["e"], ["the", "x"]],
    "return_full_text": [True, False],
    "details": [True, False],
    "decoder_input_details": [True, False],
    "top_n_tokens": [0, 3, 50],
    "best_of": [1, 2],
    "truncate": [1, 5],
    "watermark": [True, False],
    "grammar": [{"type": "regex", "value": "[a-z]+"}, {"type": "json", "value": {"type": "object"}}, {"type": "x"}],
}
TENSORS = [
    {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["the fox"]},
    {"name": "input_ids", "shape": [2, 2], "datatype": "INT64", "data": [5, 6, 7, 8]},
    {"name": "input_ids", "shape": [2, 2], "datatype": "INT64", "data": [[5, 6], [7]]},
    {"name": "input_ids", "shape": [1], "datatype": "FP32", "data": [0.5]},
]

Make = Callable[[random.Random], Any]


def some(source: random.Random, fields: dict[str, list[Any]], share: float) -> dict[str, Any]:
    """Some of the fields, each with a value of its kind or, now and then, with anything."""
    chosen = [name for name in fields if source.random() < share]
    return {name: source.choice(NASTY if source.random() < 0.08 else fields[name]) for name in chosen}


def needed(source: random.Random, name: str, values: list[Any]) -> dict[str, Any]:
    return {} if source.random() < 0.03 else some(source, {name: values}, 1.0)


def completion(source: random.Random) -> Any:
    prompts = [*TEXTS, *TOKENS, source.sample(TEXTS, 3), TOKENS[:2], ["a", [5]]]
    more = some(source, OPENAI | {"echo": [True, False], "suffix": [None, "x"], "logprobs": [0, 3, 99]}, 0.12)
    return needed(source, "prompt", prompts) | more


def chat(source: random.Random) -> Any:
    own = {
        "logprobs": [True, False],
        "top_logprobs": [0, 3],
        "max_completion_tokens": [3],
        "tools": TOOLS,
        "tool_choice": ["none", "auto", "required", {"type": "function", "function": {"name": "weather"}}],
        "parallel_tool_calls": [True, False],
        "add_generation_prompt": [True, False],
        "continue_final_message": [True, False],
        "chat_template_kwargs": [{"enable_thinking": False}, {"tokenize": True}],
    }
    length = needed(source, "max_tokens", [1, 5, 8])
    return needed(source, "messages", MESSAGES) | length | some(source, OPENAI | own, 0.12)


def plain(source: random.Random) -> Any:
    if source.random() < 0.1:
        return source.choice(TEXTS).encode()
    return needed(source, "prompt", [*TEXTS, *TOKENS]) | some(source, OPENAI, 0.12)


def tgi(source: random.Random) -> Any:
    parameters = some(source, TGI, 0.2) | needed(source, "max_new_tokens", [1, 5, 8])
    if source.random() < 0.05:
        parameters = source.choice(NASTY)
    return needed(source, "inputs", TEXTS) | {"parameters": parameters} | some(source, {"stream": [True, False]}, 0.5)


def plain_or_tgi(source: random.Random) -> Any:
    return source.choice([plain, tgi])(source)


def kserve_v1(source: random.Random) -> Any:
    instances = [source.choice([source.choice(TEXTS), plain(source)]) for _ in range(source.randint(0, 3))]
    instances = [each.decode() if isinstance(each, bytes) else each for each in instances]
    return needed(source, "instances", [instances]) | some(source, {"parameters": [some(source, SAMPLING, 0.1)]}, 0.5)


def kserve_v2(source: random.Random) -> Any:
    tensor = source.choice(TENSORS) | some(source, {name: [1, "a", [1], [2, 2]] for name in ("name", "shape")}, 0.05)
    own = {
        "id": ["mine"],
        "parameters": [some(source, SAMPLING, 0.1)],
        "outputs": [[{"name": "token_ids"}], [{"name": "x"}]],
    }
    return needed(source, "inputs", [[tensor], [tensor, tensor]]) | some(source, own, 0.5)


def spoiled(source: random.Random, body: Any) -> Any:
    """Now and then no JSON, or JSON that is no object."""
    if source.random() < 0.02:
        return source.choice(NASTY)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if source.random() < 0.03:
        at = source.randrange(len(raw) + 1)
        return raw[:at] + source.choice([b"", b"}", b'"', b"\xff", b"[", b"\x00"]) + raw[at + source.randint(0, 3) :]
    return body


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    checkpoint = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")
    frontend = Frontend(tmp_path_factory.mktemp("archive"), {"model_path": str(checkpoint), **OPTIONS})
    yield frontend
    frontend.engine.shutdown()


def heard_by(neighbour: Client) -> list[int]:
    assert neighbour.events[-1] == "[DONE]"
    return [token for event in neighbour.events[:-1] for token in event["token_ids"]]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check(client: Client) -> None:
    """An answer that is JSON, or events that are; or a 4xx that says what is wrong."""
    sent = client.parameters[0]["value"]
    assert client.status is not None
    assert client.status < 500, (sent, client.body)
    text = client.body.decode()
    if client.answer_headers["content-type"].startswith("text/event-stream"):
        *events, rest = text.split("\n\n")
        assert rest == ""
        bodies = [event.removeprefix("data: ") for event in events]
        assert all(
            "error" not in json.loads(body, parse_constant=refuse_constant) for body in bodies if body != "[DONE]"
        )
        return
    body = json.loads(text, parse_constant=refuse_constant)
    if client.status >= 400:
        assert body["error"], sent


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("v1/completions", completion),
        ("v1/chat/completions", chat),
        ("", plain_or_tgi),
        ("generate", tgi),
        ("generate_stream", tgi),
        ("", kserve_v1),
        ("", kserve_v2),
    ],
)
def test_any_body_gets_an_answer_or_a_4xx_and_its_neighbour_is_not_disturbed(
    served: Frontend, path: str, make: Make
) -> None:
    alone = served.send("", NEIGHBOUR)
    served.finish(alone)
    statuses: dict[int | None, int] = {}

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(st.integers(0, 2**32))
    def fuzz(seed: int) -> None:
        source = random.Random(seed)
        neighbour = served.send("", NEIGHBOUR)
        clients = [served.send(path, spoiled(source, make(source))) for _ in range(BODIES)]
        served.finish()
        for client in clients:
            check(client)
            statuses[client.status] = statuses.get(client.status, 0) + 1
        assert heard_by(neighbour) == heard_by(alone)

    fuzz()
    assert statuses[200] > sum(statuses.values()) // 10, "many of the bodies are good ones"
    deadline = time.monotonic() + 20
    while served.engine.stats().used_blocks:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.engine.check()
