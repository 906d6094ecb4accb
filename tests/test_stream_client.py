"""The client that `ifb bench peers` measures HTTP with hears every token, however the bytes come."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from ifb_handler.cli.peers.stream_client import StreamClient


def serve(answers: dict[int, list[bytes]]) -> str:
    """A server that reads a request with a body and answers by its `prompt`, in these pieces -> its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):  # a client that has heard enough
            request = b""
            while b"\r\n\r\n" not in request or not request.endswith(b"}"):
                request += connection.recv(1 << 16)
            for piece in answers[json.loads(request.partition(b"\r\n\r\n")[2])["prompt"][0]]:
                connection.sendall(piece)

    def accept() -> None:
        with listening:
            for _ in answers:
                threading.Thread(target=answer, args=listening.accept()[:1]).start()

    threading.Thread(target=accept).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/generate"


def stream(*events: dict[str, Any]) -> bytes:
    """A chunked answer with a chunk an event, as TorchServe writes it."""
    texts = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(text), text) for text in texts) + b"0\r\n\r\n"


def client_of(url: str) -> StreamClient:
    return StreamClient(url, lambda prompt, count: {"prompt": prompt}, lambda event, count: event["ids"])


def collect(client: StreamClient, enough: Callable[[dict[int, list[int]]], bool]) -> dict[int, list[int]]:
    heard: dict[int, list[int]] = {}
    while not enough(heard):
        for index, tokens, _ in client.collect(10.0):
            heard.setdefault(index, []).extend(tokens)
    return heard


def test_every_token_is_heard_whose_it_is_and_in_order() -> None:
    whole = stream({"ids": [1, 2]}, {"ids": []}, {"ids": [3]})
    slow = stream({"ids": [4]}, {"ids": [5, 6, 7]})
    client = client_of(serve({0: [whole], 1: [slow[i : i + 1] for i in range(len(slow))]}))
    client.submit(7, [0], 3)
    client.submit(8, [1], 4)
    assert collect(client, lambda heard: sum(map(len, heard.values())) == 7) == {7: [1, 2, 3], 8: [4, 5, 6, 7]}
    client.close()


def test_an_error_status_is_an_error_that_tells_the_body() -> None:
    client = client_of(serve({0: [b"HTTP/1.1 503 Busy\r\n\r\n", b'{"error": "later"}']}))
    client.submit(0, [0], 3)
    with pytest.raises(RuntimeError, match=r"(?s)job 0: HTTP/1.1 503 Busy.*later"):
        collect(client, lambda heard: False)
    client.close()


@pytest.mark.parametrize("cut", [False, True])
def test_an_answer_that_ends_early_is_an_error(cut: bool) -> None:
    answer = stream({"ids": [1, 2]})
    client = client_of(serve({0: [answer.removesuffix(b"0\r\n\r\n") if cut else answer]}))
    client.submit(0, [0], 3)
    with pytest.raises(RuntimeError, match="job 0: 2 tokens came, not 3"):
        collect(client, lambda heard: False)
    client.close()
