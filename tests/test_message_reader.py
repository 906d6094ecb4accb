"""Reading TorchServe's messages: the same as its own reader, in fewer system calls and no request twice."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ts.protocol import otf_message_handler

from ifb_handler.torchserve import message_reader

OWN_MESSAGES = otf_message_handler._retrieve_inference_msg  # at collection, before any test has installed ours
END = struct.pack("!i", -1)
HEADERS = {"url_path": "v1/completions", "explain": "False", "host": "127.0.0.1:8080", "x-request-id": "é"}
BODIES: list[list[tuple[str, str, bytes]]] = [
    [("body", "application/json", json.dumps({"prompt": "a é", "stream": True}).encode())],
    [("body", "application/json", b"{nope")],
    [("body", "text/plain", "über".encode())],
    [("prompt", "", b"\x00\xff"), ("max_tokens", "", b"7")],
    [("body", "application/octet-stream", bytes(range(256)) * 2000)],
    [],
]


def field(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value


def sent(request_id: str, body: list[tuple[str, str, bytes]], headers: dict[str, str] = HEADERS) -> bytes:
    """ModelRequestEncoder.java's bytes for a request."""
    parts = [field(request_id.encode())]
    parts += [field(name.encode()) + field(value.encode()) for name, value in headers.items()]
    parts.append(END)
    parts += [field(name.encode()) + field(kind.encode()) + field(value) for name, kind, value in body]
    return b"".join([*parts, END])


def message(*requests: bytes) -> bytes:
    return b"I" + b"".join(requests) + END


class Connection:
    """A worker's end of a socket, which counts how often the kernel is asked."""

    def __init__(self) -> None:
        self.other, self._socket = socket.socketpair()
        self.num_calls = 0

    def recv(self, size: int) -> bytes:
        self.num_calls += 1
        return self._socket.recv(size)

    def read(self, data: bytes, piece: int = 1 << 20) -> Any:
        """What the worker makes of a message that comes in pieces."""

        def send() -> None:
            for at in range(0, len(data), piece):
                self.other.sendall(data[at : at + piece])

        sender = threading.Thread(target=send)
        sender.start()
        command, requests = otf_message_handler.retrieve_msg(self)
        sender.join()
        assert command == b"I"
        return requests

    def close(self) -> None:
        self.other.close()
        self._socket.close()


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection()
    yield made
    made.close()


@pytest.fixture
def own_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until `install` is called the worker reads by TorchServe's own functions, and so it does after the test."""
    for name, function in (
        ("_retrieve_buffer", message_reader._READ_BUFFER),
        ("_retrieve_inference_msg", OWN_MESSAGES),
    ):
        monkeypatch.setattr(otf_message_handler, name, function)


@pytest.fixture
def installed(own_reader: None) -> None:
    message_reader.install()


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_a_message_is_read_as_torchserve_reads_it_however_it_comes(
    connection: Connection, own_reader: None, piece: int
) -> None:
    source = random.Random(piece)
    bodies = BODIES if piece > 1 else [body for body in BODIES if sum(len(part[2]) for part in body) < 1000]
    data = message(*(sent(f"id-{i}", body) for i, body in enumerate(source.sample(bodies, len(bodies)))))
    own = connection.read(data)
    message_reader.install()
    assert connection.read(data, piece) == own
    assert len(own) == len(bodies)


def test_a_request_that_is_sent_again_is_its_id_alone(connection: Connection, installed: None) -> None:
    (first,) = connection.read(message(sent("a", BODIES[0])))
    assert first["parameters"][0]["value"] == {"prompt": "a é", "stream": True}
    again = {"requestId": b"a", "headers": [], "parameters": []}
    new, repeated = sent("b", BODIES[2]), sent("a", BODIES[0])
    both = connection.read(message(repeated, new))
    assert both[0] == again
    assert [bytes(header["name"]).decode() for header in both[1]["headers"]] == list(HEADERS)
    # Once it has had a chunk, TorchServe leaves the body out; that is read once more, and then known.
    answered = sent("a", [])
    (seen,) = connection.read(message(answered))
    assert seen["parameters"] == []
    assert connection.read(message(answered)) == [again]
    assert connection.read(message(new))[0]["parameters"][0]["value"] == "über", "it was not in the last message"


def test_a_request_of_the_same_id_and_other_bytes_is_read_anew(connection: Connection, installed: None) -> None:
    connection.read(message(sent("a", BODIES[0])))
    longer = sent("a", BODIES[4])
    assert connection.read(message(longer))[0]["parameters"][0]["value"] == BODIES[4][0][2]
    assert connection.read(message(sent("a", [], {"explain": "True"})))[0]["headers"]
    assert connection.read(message(sent("ab", []), sent("a", [])))[1]["headers"]


def test_a_round_trip_asks_the_kernel_a_few_times_not_for_every_field(connection: Connection, installed: None) -> None:
    live = [sent(f"id-{i}", []) for i in range(128)]
    connection.read(message(*live))
    connection.num_calls = 0
    for _ in range(10):
        assert len(connection.read(message(*live))) == 128
    assert connection.num_calls <= 10 * (1 + len(message(*live)) // 4096)


def test_messages_that_come_together_are_kept_apart(connection: Connection, installed: None) -> None:
    connection.other.sendall(message(sent("a", BODIES[0])) + message(sent("b", BODIES[2])) + message())
    assert [otf_message_handler.retrieve_msg(connection)[1][0]["requestId"] for _ in "ab"] == [b"a", b"b"]
    assert otf_message_handler.retrieve_msg(connection) == (b"I", [])


def test_the_end_of_the_connection_ends_the_worker(connection: Connection, installed: None) -> None:
    connection.read(message(sent("a", [])))
    connection.other.sendall(message(sent("a", []))[:-6])
    connection.other.shutdown(socket.SHUT_WR)
    with pytest.raises(SystemExit):
        otf_message_handler.retrieve_msg(connection)
