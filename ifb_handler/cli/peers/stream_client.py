"""Streams of server-sent events over HTTP, many at once, as cheaply as Python can: the client shares the machine.

One thread, no event loop's machinery: what each connection has brought is read in one call and taken apart.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

# From an event, and how many tokens came before it, to the new token ids in it.
ReadEvent = Callable[[dict[str, Any], int], list[int]]

_READ_SIZE = 1 << 16
_ERROR_SIZE = 4000
_ERROR_SECONDS = 5.0


@dataclass
class _Stream:
    """A request's answer so far. `rest` is what came after the last whole line."""

    index: int
    num_output_tokens: int
    connection: socket.socket
    count: int = 0
    rest: bytes = b""
    begun: bool = False


class StreamClient:
    """A `peer_protocol.Client` over HTTP. `body(prompt, num_output_tokens)` is what is posted to `url`."""

    def __init__(self, url: str, body: Callable[[list[int], int], dict[str, Any]], read: ReadEvent) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "127.0.0.1", parts.port or 80, parts.path
        self._body = body
        self._read = read
        self._selector = selectors.DefaultSelector()

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        body = json.dumps(self._body(prompt, num_output_tokens)).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((self._host, self._port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        stream = _Stream(index, num_output_tokens, connection)
        self._selector.register(connection, selectors.EVENT_READ, stream)

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        news: list[tuple[int, list[int], float]] = []
        for key, _ in self._selector.select(seconds):
            if tokens := self._take(key.data):
                news.append((key.data.index, tokens, time.monotonic()))
        return news

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        self._selector.close()

    def _take(self, stream: _Stream) -> list[int]:
        """The tokens in what has come."""
        data = stream.connection.recv(_READ_SIZE)
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        if lines and not stream.begun:
            if b" 200 " not in lines[0]:
                raise RuntimeError(f"job {stream.index}: {self._rest_of_error(stream, lines)}")
            stream.begun = True
        tokens: list[int] = []
        # Headers and sizes of chunks are lines too, that do not begin like an event; the size of the last is 0.
        for line in lines:
            if line.startswith(b"data: {"):
                tokens += self._read(json.loads(line[6:]), stream.count + len(tokens))
        stream.count += len(tokens)
        if not data or b"0\r" in lines:
            self._end(stream)
            if stream.count != stream.num_output_tokens:
                raise RuntimeError(f"job {stream.index}: {stream.count} tokens came, not {stream.num_output_tokens}")
        return tokens

    def _rest_of_error(self, stream: _Stream, lines: list[bytes]) -> str:
        told = b"\n".join([*lines, stream.rest])
        stream.connection.settimeout(_ERROR_SECONDS)
        while len(told) < _ERROR_SIZE and (news := stream.connection.recv(_READ_SIZE)):
            told += news
        return told[:_ERROR_SIZE].decode(errors="replace")

    def _end(self, stream: _Stream) -> None:
        self._selector.unregister(stream.connection)
        stream.connection.close()
