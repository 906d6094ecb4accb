"""TorchServe, really running: the embedded model served to many clients, good, bad and gone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from greedy_oracle import generate_alone, load_smollm2
from openai import APIStatusError, OpenAI
from torchserve_server import Served, read_events, torchserve, wait_until

from ifb_handler.cli.errors import CliError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ONCE = "Once upon a time"
NUM_PROMPTS, MOST_TOKENS = 8, 12
ENDLESS = {"prompt": ONCE, "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


class Oracle:
    """Greedy answers of transformers' `generate`, each prompt alone."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        from ifb_handler.models.source import resolve

        path = resolve("smollm2-135m").path
        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = load_smollm2()
        source = random.Random(0)
        self.prompts = [
            [source.randrange(100, 40000) for _ in range(source.randint(5, 80))] for _ in range(NUM_PROMPTS)
        ]
        self.answers = [generate_alone(model, prompt, MOST_TOKENS) for prompt in self.prompts]
        self.once = generate_alone(model, self.tokenizer(ONCE).input_ids, MOST_TOKENS)
        chat = self.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        self.chat = generate_alone(model, chat, MOST_TOKENS)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Iterator[Served]:
    options = {"max_num_seqs": 24, "num_gpu_blocks_override": 400, "default_max_tokens": 8}
    with torchserve(tmp_path_factory.mktemp("torchserve"), **options) as served:
        yield served


@pytest.fixture
def served(running: Served) -> Iterator[Served]:
    """After every test the pool is empty and the worker is the one that TorchServe calls ready."""
    yield running
    wait_until(running.is_idle)
    assert running.worker()["status"] == "READY"


@pytest.fixture
def openai_client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_64_clients_of_which_16_hang_up_all_get_right_answers(served: Served, oracle: Oracle) -> None:
    source = random.Random(1)
    leaving = set(source.sample(range(64), 16))

    async def client(http: httpx.AsyncClient, number: int) -> None:
        which = number % NUM_PROMPTS
        tokens = 2000 if number in leaving else source.randint(2, MOST_TOKENS)
        body = {"prompt": oracle.prompts[which], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        heard: list[int] = []
        async with http.stream("POST", served.bare_url, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    heard += json.loads(line.removeprefix("data: "))["token_ids"]
                if number in leaving and len(heard) >= 3:
                    break
            else:
                assert line == ""
        if number in leaving:
            assert heard[:MOST_TOKENS] == oracle.answers[which][: len(heard)]
        else:
            assert heard == oracle.answers[which][:tokens]

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=300, trust_env=False) as http:
            await asyncio.gather(*(client(http, number) for number in range(64)))

    before = served.stats()["request_success"]
    asyncio.run(everybody())
    wait_until(served.is_idle)
    after = served.stats()["request_success"]
    assert after["length"] - before["length"] == 48
    assert after["abort"] - before["abort"] == 16
    assert httpx.get(served.ping_url, trust_env=False).json() == {"status": "Healthy"}


@pytest.mark.parametrize(
    ("path", "content", "status", "named"),
    [
        ("v1/completions", b'{"prompt": "a", }', 400, "line 1 column 17"),
        ("v1/embeddings", b'{"input": "a"}', 404, "v1/completions"),
        ("v1/completions", b'{"prompt": ""}', 400, "prompt"),
        ("v1/completions", json.dumps({"prompt": "hello " * 500_000}).encode(), 400, "prompt"),
        ("v1/completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("v1/completions", b'{"prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
        ("v1/completions", json.dumps({"prompt": "hello " * 20_000}).encode(), 400, "prompt"),
    ],
    ids=["malformed", "unknown route", "empty prompt", "3 MB", "NaN", "negative", "tokenized and too long"],
)
def test_a_bad_request_is_a_json_error_and_a_stream_beside_it_is_not_disturbed(
    served: Served, oracle: Oracle, path: str, content: bytes, status: int, named: str
) -> None:
    body = {"prompt": oracle.prompts[0], "max_tokens": MOST_TOKENS, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", served.bare_url, json={**body, "stream": True}, timeout=60, trust_env=False) as stream:
        events = read_events(stream.iter_lines())
        heard = list(next(events)["token_ids"])
        headers = {"content-type": "application/json"}
        bad = httpx.post(f"{served.url}/{path}", content=content, headers=headers, timeout=60, trust_env=False)
        heard += [token for event in events for token in event["token_ids"]]
    assert bad.status_code == status
    assert bad.headers["content-type"] == "application/json"
    assert named in bad.json()["error"]["message"]
    assert heard == oracle.answers[0]


def test_a_one_shot_client_that_hangs_up_frees_its_pages_within_a_second(served: Served) -> None:
    before = served.stats()["request_success"]["abort"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.bare_url, json=ENDLESS, timeout=1.5, trust_env=False)
    hung_up = time.monotonic()
    # Nobody calls meanwhile: a request would bring about the round trip that tells the worker who has gone.
    time.sleep(2.0)
    assert served.is_idle()
    assert served.stats()["request_success"]["abort"] == before + 1
    last = served.get("engine/steps")["steps"][-1]
    assert last["started"] - hung_up < 1.0, "the clock is the same in both processes"


def test_a_new_request_is_queued_while_a_step_is_still_running(served: Served, oracle: Oracle) -> None:
    with ThreadPoolExecutor(2) as threads:
        # Each of its chunks is a step of most of a second: a request that waited for one would be seen a step later.
        busy = threads.submit(_answer, served, {"prompt": (oracle.prompts[1] * 200)[:3000], "max_tokens": 1})
        wait_until(lambda: served.stats()["num_requests_running"] == 1)
        before = served.stats()
        late = threads.submit(_answer, served, {"prompt": oracle.prompts[0], "max_tokens": 2})
        seen = before
        while seen["num_requests_waiting"] + seen["num_requests_running"] < 2:
            seen = served.stats()
        assert seen["num_steps"] - before["num_steps"] <= 1
        assert busy.result()["finish_reason"] == late.result()["finish_reason"] == "length"


def _answer(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    body = {"temperature": 0, "ignore_eos": True, **body}
    return httpx.post(served.bare_url, json=body, timeout=120, trust_env=False).json()


def test_the_official_client_completes_a_text_streaming_and_not(openai_client: OpenAI, oracle: Oracle) -> None:
    asked: dict[str, Any] = {"model": "smollm2-135m", "prompt": ONCE, "max_tokens": MOST_TOKENS, "temperature": 0}
    whole = openai_client.completions.create(**asked)
    assert whole.choices[0].text == oracle.text(oracle.once)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == MOST_TOKENS
    chunks = list(openai_client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_the_official_client_chats_streaming_and_not(openai_client: OpenAI, oracle: Oracle) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": QUESTION, "max_tokens": MOST_TOKENS, "temperature": 0}
    whole = openai_client.chat.completions.create(**asked)
    answer, _, _ = oracle.text(oracle.chat).partition("<|im_end|>")
    assert whole.choices[0].message.content
    assert answer.startswith(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(openai_client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_official_client_lists_models_and_understands_errors(openai_client: OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["smollm2-135m"]
    assert openai_client.models.retrieve("m").id == "m"
    with pytest.raises(APIStatusError) as caught:
        openai_client.completions.create(model="m", prompt="a", top_p=2.0)
    assert (caught.value.status_code, caught.value.param) == (400, "top_p")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-d", '{"prompt": "Once upon a time", "max_tokens": 5}', "-H", "content-type: application/json"],
        ["-d", "prompt=Once upon a time", "-d", "max_tokens=5"],
        ["-F", "prompt=Once upon a time", "-F", "max_tokens=5"],
        ["-F", "prompt=<PROMPT", "-F", "max_tokens=5"],
        ["-T", "PROMPT"],
        ["--data-binary", "@PROMPT", "-H", "content-type: text/plain"],
    ],
    ids=["json", "form", "multipart", "multipart from a file", "upload", "text"],
)
def test_curl_may_send_a_prompt_in_any_of_its_ways(served: Served, tmp_path: Path, arguments: list[str]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(ONCE)
    arguments = [argument.replace("PROMPT", str(prompt)) for argument in arguments]
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", *arguments, served.bare_url]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert answer["text"]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["finish_reason"] in ("length", "stop")


def test_curl_that_sends_json_as_a_form_is_told_how_to(served: Served) -> None:
    command = ["curl", "--silent", "--noproxy", "*", "-d", '{"prompt": "Once upon a time"}', served.bare_url]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert "Content-Type: application/json" in answer["error"]["message"]


def test_a_quick_answer_has_a_length_and_a_request_id(served: Served) -> None:
    answer = httpx.get(f"{served.url}/health", trust_env=False)
    assert answer.json()["status"] == "ok"
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.headers["x-request-id"]


def test_the_metrics_port_tells_what_has_been_served_and_comes_to_rest(served: Served) -> None:
    _answer(served, {"prompt": ONCE, "max_tokens": 5})
    stats = served.stats()
    counters = {f"ifb_{name}": stats[name] for name in ("prompt_tokens", "generation_tokens", "num_preemptions")}
    for reason, count in stats["request_success"].items():
        counters[f'ifb_request_success[finished_reason="{reason}"]'] = count
    gauges = dict.fromkeys(("ifb_num_requests_running", "ifb_num_requests_waiting", "ifb_kv_cache_usage_perc"), 0)
    wait_until(lambda: served.metrics().items() >= (counters | gauges).items())
    observed = served.metrics()
    assert observed["ifb_e2e_request_latency_seconds_count"] == sum(stats["request_success"].values())
    assert observed['ifb_time_to_first_token_seconds_bucket[le="+Inf"]'] > 0


def test_a_killed_worker_ends_its_clients_at_once_and_the_next_request_works(served: Served, oracle: Oracle) -> None:
    worker = served.worker()["pid"]
    with httpx.stream("POST", served.bare_url, json={**ENDLESS, "stream": True}, timeout=60, trust_env=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    answer = _answer(served, {"prompt": oracle.prompts[0], "max_tokens": MOST_TOKENS})
    assert answer["token_ids"] == oracle.answers[0]
    assert served.worker()["pid"] != worker
    assert served.stats()["request_success"]["length"] == 1


def test_an_option_that_cannot_be_used_ends_the_load_with_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="max_num_seqs: 0"), torchserve(tmp_path, max_num_seqs=0):
        pass
