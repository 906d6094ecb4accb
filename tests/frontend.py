"""TorchServe's Java side of a continuousBatching round trip, by its rules, around TorchServe's own Python side.

What ContinuousBatching.java, RestJob.java and ModelResponseDecoder.java do with the bytes of a reply is done here; the
bytes themselves are made and read by the real `ts.service.Service` and its `Context`.
"""

from __future__ import annotations

import json
import struct
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.service import Service

from ifb_handler.handler import IFBHandler

METRICS_YAML = Path(__file__).parents[1] / "config" / "metrics.yaml"


@dataclass
class Client:
    """One request, HTTP or (without headers) gRPC, and what has come back for it. `hang_up` closes its connection."""

    request_id: str
    headers: dict[str, str]
    parameters: list[dict[str, Any]]
    cached: bool = False
    closed: bool = False
    status: int | None = None
    phrase: str = ""
    answer_headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    chunks: list[bytes] = field(default_factory=list)
    done: bool = False
    times_sent: int = 0

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def over_http(self) -> bool:
        return bool(self.headers)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events' bodies, [DONE] as a string."""
        texts = [text.removeprefix("data: ") for text in self.body.decode().split("\n\n") if text]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]

    def hang_up(self) -> None:
        self.closed = True


class Frontend:
    """Holds the live requests and makes round trips with a handler until they are answered."""

    def __init__(self, model_dir: Path, options: dict[str, Any]) -> None:
        config = {"continuousBatching": True, "deviceType": "cpu", "handler": options}
        (model_dir / "model-config.yaml").write_text(yaml.safe_dump(config))
        metrics = MetricsCacheYamlImpl(str(METRICS_YAML))
        metrics.initialize_cache()
        metrics.model_name = "registered"
        self.handler = IFBHandler()
        manifest = {"model": {"configFile": "model-config.yaml"}}
        self.service = Service(
            "registered", str(model_dir), manifest, self.handler.handle, None, 64, metrics_cache=metrics
        )
        self.service.set_cl_socket(None)
        self.handler.initialize(self.service.context)
        self.jobs: dict[str, Client] = {}
        self.trips = 0

    def send(
        self, path: str = "", body: Any = b"", content_type: str = "application/json", http: bool = True
    ) -> Client:
        """A request whose JSON or raw body arrives under the name `body`, at `/predictions/registered/1.0/{path}`."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"url_path": path, "explain": "False", "content-type": content_type} if http else {}
        value: Any = raw
        if content_type == "application/json":
            try:
                value = json.loads(raw)
            except ValueError:
                value = raw
        client = Client(str(uuid.uuid4()), headers, [{"name": "body", "value": value, "contentType": content_type}])
        self.jobs[client.request_id] = client
        return client

    def round_trip(self) -> None:
        """One message to the worker with every live request, and its reply taken apart."""
        self.trips += 1
        batch = []
        for client in self.jobs.values():
            client.times_sent += not client.cached
            headers = [{"name": k.encode(), "value": v.encode()} for k, v in client.headers.items()]
            parameters = [] if client.cached else client.parameters
            batch.append({"requestId": client.request_id.encode(), "headers": headers, "parameters": parameters})
        reply = self.service.predict(batch)
        code, predictions = decode(bytes(reply))
        assert code == 200, "a reply with another code fails every live request"
        for prediction in predictions:
            self._respond(self.jobs[prediction["request_id"]], prediction)

    def _respond(self, client: Client, prediction: dict[str, Any]) -> None:
        assert not client.done
        headers = prediction["headers"]
        stream_next = headers.get("ts_stream_next")
        first = client.status is None
        if client.over_http:
            assert not (stream_next == "false" and first), "a lone last chunk would hang an HTTP client"
            assert not (stream_next is not None and prediction["status"] >= 400), "its body would be lost"
        else:
            assert stream_next == "false", "a chunk drops the call, and StreamPredictions looks for the header"
        assert stream_next is not None or first, "a whole answer after chunks"
        assert first or set(headers) == {"ts_stream_next"}, "they would reach nobody"
        if first:
            client.status, client.phrase = prediction["status"], prediction["phrase"]
            client.answer_headers, client.chunked = headers, stream_next == "true"
        client.chunks.append(prediction["body"])
        if stream_next != "true":
            client.done = True
            del self.jobs[client.request_id]
        elif client.closed:
            del self.jobs[client.request_id]
        else:
            client.cached = True

    def finish(self, *clients: Client) -> None:
        """Round trips until these (all live ones when none is named) are answered."""
        waited_for = clients or tuple(self.jobs.values())
        while not all(client.done for client in waited_for):
            self.round_trip()

    @property
    def engine(self) -> Any:
        return self.handler.round_trip._engine


def decode(reply: bytes) -> tuple[int, list[dict[str, Any]]]:
    """The bytes of `create_predict_response` -> the message's code, and its predictions."""
    at = 0

    def integer() -> int:
        nonlocal at
        at += 4
        return struct.unpack_from("!i", reply, at - 4)[0]

    def raw(length: int) -> bytes:
        nonlocal at
        at += length
        return reply[at - length : at]

    code = integer()
    raw(integer())
    predictions = []
    while (length := integer()) != -1:
        prediction: dict[str, Any] = {"request_id": raw(length).decode()}
        prediction["content_type"] = raw(integer()).decode()
        prediction["status"] = integer()
        prediction["phrase"] = raw(integer()).decode()
        prediction["headers"] = {raw(integer()).decode(): raw(integer()).decode() for _ in range(integer())}
        prediction["body"] = raw(integer())
        predictions.append(prediction)
    assert at == len(reply)
    return code, predictions
