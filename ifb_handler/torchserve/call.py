"""What came with a request beside its body: over HTTP in the path and the headers, over gRPC in parts of the input.

TorchServe hands a gRPC call over as its `input` map alone: no method, no metadata. So three names in that map stand in
for what HTTP has elsewhere, and are not part of the body:

    url_path        the route: `v1/chat/completions`; the plain route without it
    x-request-id    the client's own name for the request, by which it can be cancelled
    rpc             `StreamPredictions`: the tokens may come one message after another (asyncCommunication only)

The last one is a promise. What the worker is told of `Predictions` and of `StreamPredictions` is the same, and a second
message to the former ends the worker's connection. So nothing that is usual in a body, `"stream": true` for one, makes
a gRPC call a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ifb_handler.api.errors import APIError, shown
from ifb_handler.torchserve.conversation import GRPC_STREAM, HTTP, HTTP_UNPROBED, ONE_MESSAGE, Line

PATH, NAME, RPC = "url_path", "x-request-id", "rpc"
STREAM_RPC = "StreamPredictions"
# The headers that a gRPC call can have: StreamPredictions2's.
_SEQUENCE = "ts_request_sequence"
# What TorchServe gives every prediction over HTTP, and no description.
_PREDICTED = {PATH, "explain"}


@dataclass(frozen=True)
class Call:
    """line       how it can be answered
    name       the client's own name for it
    headers    as far as they are texts; of a gRPC call, the parts that stand in for them
    parts      the body
    """

    line: Line
    name: str | None
    headers: Mapping[str, str]
    parts: Mapping[str, Any]

    @classmethod
    def of(cls, parts: Mapping[str, Any], headers: Mapping[str, Any], continuous: bool) -> Call:
        """From what a handler is given. `continuous`: TorchServe's mode is continuousBatching."""
        texts = {name.lower(): value for name, value in headers.items() if isinstance(value, str)}
        if any(not name.startswith(_SEQUENCE) for name in texts):
            described = texts.get("describe") == "True" and not texts.keys() & _PREDICTED
            if not described:  # a client's own header of that name means nothing
                texts.pop("describe", None)
            line = ONE_MESSAGE if described else HTTP if continuous else HTTP_UNPROBED
            return cls(line, texts.get(NAME), texts, parts)
        beside = {name: _text(parts[name]) for name in (PATH, NAME, RPC) if name in parts}
        streamed = beside.get(RPC) == STREAM_RPC and not continuous
        body = {name: value for name, value in parts.items() if name not in beside}
        return cls(GRPC_STREAM if streamed else ONE_MESSAGE, beside.get(NAME), beside, body)

    def path(self) -> str:
        """Where it goes. Raises APIError for what is not served under any path."""
        if self.headers.get("explain") == "True":
            raise APIError(501, "a language model has no explanations; use /predictions")
        if self.headers.get("describe") == "True":
            return "v1/models"
        rpc = self.headers.get(RPC) if not self.line.has_status else None
        if rpc not in (None, "Predictions", STREAM_RPC):
            raise APIError(400, f"{RPC}: {shown(rpc)} is not Predictions or {STREAM_RPC}", param=RPC)
        return self.headers.get(PATH) or ""

    def fields(self, read_body: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """The body's fields; those of a gRPC stream say so."""
        fields = read_body(self.parts)
        return fields | {"stream": True} if self.line is GRPC_STREAM else fields


def _text(part: Any) -> str:
    return part.decode(errors="replace") if isinstance(part, (bytes, bytearray)) else str(part)
