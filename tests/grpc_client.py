"""A gRPC client of TorchServe's inference API, generated from the .proto files inside TorchServe's own jar."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import grpc
import ts
from torchserve_server import NAME, Served, read_events

JAR = Path(ts.__file__).parent / "frontend" / "model-server.jar"
_PROTOS = ("inference.proto", "google/rpc/status.proto")


@cache
def generated() -> tuple[ModuleType, ModuleType]:
    """The modules `inference_pb2` and `inference_pb2_grpc`."""
    from grpc_tools import protoc

    folder = mkdtemp(prefix="ifb-protos-")
    with zipfile.ZipFile(JAR) as jar:
        jar.extractall(folder, _PROTOS)
    common = resources.files("grpc_tools") / "_proto"
    failed = protoc.main(
        ["protoc", f"-I{folder}", f"-I{common}", f"--python_out={folder}", f"--grpc_python_out={folder}", *_PROTOS]
    )
    assert not failed
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("inference_pb2"), importlib.import_module("inference_pb2_grpc")
    finally:
        sys.path.remove(folder)


class GrpcClient:
    """A channel to a server, and its two calls. `parts` are the request's input map."""

    def __init__(self, served: Served) -> None:
        self._messages, services = generated()
        self.channel = grpc.insecure_channel(served.grpc_address)
        self.stub = services.InferenceAPIsServiceStub(self.channel)

    def request(self, parts: dict[str, bytes]) -> Any:
        return self._messages.PredictionsRequest(model_name=NAME, input=parts)

    def predict(self, timeout: float = 60, **parts: bytes) -> Any:
        """`Predictions`: the answer's JSON."""
        return json.loads(self.stub.Predictions(self.request(parts), timeout=timeout).prediction)

    def stream(self, timeout: float = 60, **parts: bytes) -> Iterator[bytes]:
        """`StreamPredictions`: each message's body, as it comes."""
        for message in self.stub.StreamPredictions(self.request(parts), timeout=timeout):
            yield message.prediction

    def close(self) -> None:
        self.channel.close()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def events(messages: list[bytes]) -> list[Any]:
    """The server-sent events in a stream's messages."""
    return list(read_events(iter(b"".join(messages).decode().splitlines())))
