"""The asyncCommunication bridge: real handler, engine and `ts` service; the test plays AsyncBatchAggregator.java."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import types
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from frontend import METRICS_YAML, decode
from tiny_llama import write_tiny_llama
from torchserve_server import wait_until
from ts.async_service import predict
from ts.context import Context
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.service import Service

from ifb_handler.engine.errors import ConfigError
from ifb_handler.handler import IFBHandler
from ifb_handler.torchserve.archive import render_model_config
from ifb_handler.torchserve.options import ASYNC_REQUEST_TIMEOUT, read_options

OPTIONS = {"max_num_seqs": 4, "num_gpu_blocks_override": 600, "max_num_waiting": 4}
FOREVER = {"prompt": "the fox", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
PATIENCE = 60.0


@dataclass
class Job:
    """One request and what has come back for it, by the rules of RestJob.java and GRPCJob.java."""

    http: bool
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = False
    done: bool = False

    def respond(self, prediction: dict[str, Any]) -> None:
        stream_next = prediction["headers"].get("ts_stream_next")
        first = self.status is None
        if first:
            self.status, self.headers = prediction["status"], prediction["headers"]
        if self.whole:
            assert (stream_next, prediction["body"]) == ("false", b""), "an answer with a length has been sent"
        elif self.http:
            assert not (first and stream_next == "false"), "it would hang the client"
            assert not (stream_next and prediction["status"] >= 400), "its body would be lost"
            self.whole = stream_next is None
        else:
            assert stream_next in ("true", "false"), "StreamPredictions looks for the header"
        if prediction["body"] or self.whole is False:
            self.chunks.append(prediction["body"])
        self.done = stream_next == "false"

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.chunks))


class Frontend:
    """Sends requests to the service, and reads its messages from the other end of its socket."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        config = {"asyncCommunication": True, "deviceType": "cpu", "handler": options}
        (folder / "model-config.yaml").write_text(yaml.safe_dump(config))
        metrics = MetricsCacheYamlImpl(str(METRICS_YAML))
        metrics.initialize_cache()
        metrics.model_name = "m"
        self.handler = IFBHandler()
        manifest = {"model": {"configFile": "model-config.yaml"}}
        self.service = Service("m", str(folder), manifest, self.handler.handle, None, 1, metrics_cache=metrics)
        self.service.predict = types.MethodType(predict, self.service)
        self.handler.initialize(self.service.context)
        self.socket, workers = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self.service.set_cl_socket(workers)
        self.jobs: dict[str, Job] = {}
        self.sizes: list[int] = []  # predictions in each message
        self._received = b""

    def send(self, body: Any, path: str = "", http: bool = True, **parts: bytes) -> Job:
        if http:
            given = [{"name": "body", "value": body, "contentType": "application/json"}]
            return self.deliver([(Job(True), {"url_path": path, "explain": "False"}, given)])[0]
        parts["data"] = json.dumps(body).encode()
        return self.deliver([(Job(False), {}, [{"name": n, "value": v, "contentType": ""} for n, v in parts.items()])])[
            0
        ]

    def deliver(self, requests: list[tuple[Job, dict[str, str], list[dict[str, Any]]]]) -> list[Job]:
        """Hand the service one message with these requests: job, headers, parameters."""
        batch = []
        for job, headers, parameters in requests:
            request_id = str(uuid.uuid4())
            self.jobs[request_id] = job
            encoded = [{"name": name.encode(), "value": value.encode()} for name, value in headers.items()]
            batch.append({"requestId": request_id.encode(), "headers": encoded, "parameters": parameters})
        with pytest.raises(asyncio.CancelledError):  # or else the framework would send a final reply of its own
            asyncio.run(self.service.predict(batch))
        return [job for job, _, _ in requests]

    def id_of(self, job: Job) -> str:
        return next(request_id for request_id, each in self.jobs.items() if each is job)

    def receive(self) -> None:
        """One message, each of its predictions given to its job."""
        code, predictions = self._message()
        assert code == 200, "another code fails every request in flight"
        self.sizes.append(len(predictions))
        for prediction in predictions:
            request_id = prediction["request_id"]
            assert request_id in self.jobs, "anything for an id after its last message ends the connection"
            self.jobs[request_id].respond(prediction)
            if self.jobs[request_id].done:
                del self.jobs[request_id]

    def _message(self) -> tuple[int, list[dict[str, Any]]]:
        while True:
            try:
                code, predictions, length = _decode_prefix(self._received)
            except struct.error:
                news = self.socket.recv(1 << 16)
                assert news
                self._received += news
                continue
            self._received = self._received[length:]
            return code, predictions

    def finish(self, *jobs: Job) -> None:
        while not all(job.done for job in jobs):
            self.receive()

    @property
    def engine(self) -> Any:
        return self.handler.async_bridge._round_trip._engine


def _decode_prefix(received: bytes) -> tuple[int, list[dict[str, Any]], int]:
    """The first whole message in `received` and its length; struct.error if there is none."""
    at = 0

    def skip(count: int) -> int:
        nonlocal at
        (value,) = struct.unpack_from("!i", received, at)
        at += 4
        if count and value > 0:
            at += value
        return value

    skip(0)
    skip(1)
    while True:
        if skip(1) == -1:
            break
        skip(1)
        skip(0)
        skip(1)
        for _ in range(2 * skip(0)):
            skip(1)
        skip(1)
    if at > len(received):
        raise struct.error
    return *decode(received[:at]), at


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama", max_model_len=8192)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    frontend = Frontend(tmp_path_factory.mktemp("archive"), {"model_path": str(checkpoint), **OPTIONS})
    yield frontend
    frontend.engine.shutdown()


@pytest.fixture
def frontend(served: Frontend) -> Iterator[Frontend]:
    """The one handler of this module; whatever a test does, nothing stays behind."""
    yield served
    for request_id in list(served.jobs):
        served.finish(served.send({"request_id": request_id}, "v1/cancel"))
    served.finish(*served.jobs.values())
    wait_until(lambda: served.engine.stats().num_requests_running == 0)
    served.engine.check()


def test_an_answer_in_one_piece_goes_out_whole_and_is_then_taken_off_the_list(frontend: Frontend) -> None:
    good, bad = frontend.send({**FOREVER, "max_tokens": 5}), frontend.send({"prompt": "a", "top_p": 7})
    frontend.finish(good, bad)
    assert (good.status, good.whole, len(good.json["token_ids"])) == (200, True, 5)
    assert (bad.status, bad.whole, bad.json["error"]["param"]) == (400, True, "top_p")


def test_the_tokens_of_a_step_come_in_one_message(frontend: Frontend) -> None:
    body = [{"name": "body", "value": {**FOREVER, "stream": True, "max_tokens": 50}, "contentType": ""}]
    frontend.sizes.clear()
    streams = frontend.deliver([(Job(True), {"url_path": ""}, body) for _ in range(4)])
    frontend.finish(*streams)
    # Some may join steps later than others, and so end later.
    assert sum(frontend.sizes) > 2 * len(frontend.sizes)
    endings = [b"".join(job.chunks)[-300:] for job in streams]
    assert all(ending.endswith(b"data: [DONE]\n\n") for ending in endings), endings


def test_a_grpc_call_is_a_stream_only_if_it_says_that_it_can_be(frontend: Frontend) -> None:
    usual = frontend.send({**FOREVER, "max_tokens": 40, "stream": True}, http=False)
    promised = frontend.send({**FOREVER, "max_tokens": 40}, http=False, rpc=b"StreamPredictions")
    frontend.finish(usual, promised)
    assert len(usual.chunks) == 1
    assert len(usual.json["token_ids"]) == 40
    assert len(promised.chunks) > 1


def test_a_description_is_answered_once_since_each_reply_would_be_an_http_response(frontend: Frontend) -> None:
    # RestJob.java answers at every reply to a DESCRIBE
    (described,) = frontend.deliver([(Job(http=False), {"describe": "True"}, [])])
    frontend.finish(described)
    assert described.json["object"] == "list"
    assert len(described.chunks) == 1


def test_more_than_can_run_or_wait_are_refused_and_may_still_be_cancelled(frontend: Frontend) -> None:
    streams = []
    for _ in range(8):
        streams.append(frontend.send({**FOREVER, "stream": True}))
        wait_until(lambda: frontend.engine.stats().num_requests_running == min(4, len(streams)))
    refused = frontend.send(FOREVER)
    frontend.finish(refused)
    assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
    assert refused.headers["retry-after"]
    ids = [frontend.id_of(job) for job in streams]
    cancelled = [frontend.send({"request_id": request_id}, "v1/cancel") for request_id in ids]
    frontend.finish(*cancelled, *streams)
    assert [job.json["cancelled"] for job in cancelled] == [1] * 8
    assert all(b'"cancelled"' in job.chunks[-1] for job in streams)


def test_a_request_ends_at_its_timeout(frontend: Frontend) -> None:
    late = frontend.send({**FOREVER, "timeout": 0.05})
    frontend.finish(late)
    assert (late.status, late.json["error"]["code"]) == (504, "request_timeout")


def test_a_dead_engine_is_replaced_in_the_same_process(frontend: Frontend) -> None:
    before = frontend.send({**FOREVER, "max_tokens": 10})
    frontend.finish(before)
    stream = frontend.send({**FOREVER, "stream": True})
    frontend.receive()
    dying = frontend.engine._engine

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    dying._core.schedule = fail
    frontend.finish(stream)
    assert b"injected" in stream.chunks[-1]
    assert not dying.is_healthy
    while True:
        again = frontend.send({**FOREVER, "max_tokens": 10})
        frontend.finish(again)
        if again.status == 200:
            break
        assert (again.status, again.json["error"]["code"]) == (503, "engine_stopped")
    assert again.json["token_ids"] == before.json["token_ids"]
    assert frontend.engine._engine is not dying


def test_a_broken_connection_cancels_every_request(checkpoint: Path, tmp_path: Path) -> None:
    frontend = Frontend(tmp_path, {"model_path": str(checkpoint), **OPTIONS})
    frontend.send({**FOREVER, "stream": True})
    frontend.receive()
    frontend.socket.close()
    wait_until(lambda: frontend.engine.stats().request_success["abort"] == 1)
    frontend.engine.check()
    frontend.engine.shutdown()


def test_each_request_has_a_timeout_unless_the_options_say_otherwise() -> None:
    assert read_options(_context()).request_timeout == ASYNC_REQUEST_TIMEOUT
    assert read_options(_context({"request_timeout": None})).request_timeout is None
    assert read_options(_context({"request_timeout": 5})).request_timeout == 5


@pytest.mark.parametrize(
    ("top", "named"),
    [
        ({"continuousBatching": True}, "continuousBatching: True, asyncCommunication: True: one of them"),
        ({"asyncCommunication": "yes"}, "asyncCommunication: 'yes': one of them must be true"),
        ({"asyncCommunication": False}, "asyncCommunication: False: one of them must be true"),
    ],
)
def test_a_model_has_one_mode(top: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options(_context(**top))


def test_the_archive_for_this_mode_says_so() -> None:
    config = yaml.safe_load(render_model_config({"max_num_seqs": 512}, asynchronous=True))
    assert "continuousBatching" not in config
    top = {key: value for key, value in config.items() if key != "handler"}
    options = read_options(_context(config["handler"], config["batchSize"], **top))
    assert (options.max_num_seqs, options.request_timeout) == (512, ASYNC_REQUEST_TIMEOUT)


def test_a_batch_size_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batchSize: 8"):
        read_options(_context(batch_size=8))


def _context(handler: dict[str, Any] | None = None, batch_size: int = 1, **top: Any) -> Context:
    config = {"asyncCommunication": True, "handler": handler, **top}
    return Context("m", "/models", None, batch_size, None, "0.12.0", model_yaml_config=config)
