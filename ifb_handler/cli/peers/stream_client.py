"""Streams of server-sent events over HTTP, many at once, as cheaply as Python can: the client shares the machine."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

# From an event, and how many tokens came before it, to the new token ids in it.
ReadEvent = Callable[[dict[str, Any], int], list[int]]


class StreamClient:
    """A `peer_protocol.Client` over HTTP. `body(prompt, num_output_tokens)` is what is posted to `url`."""

    def __init__(self, url: str, body: Callable[[list[int], int], dict[str, Any]], read: ReadEvent) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "127.0.0.1", parts.port or 80, parts.path
        self._body = body
        self._read = read
        self._news: queue.Queue[tuple[int, list[int], float] | Exception] = queue.Queue()
        # The event loop alone does not keep a stream that waits from being collected as garbage.
        self._streams: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        body = json.dumps(self._body(prompt, num_output_tokens)).encode()
        stream = asyncio.run_coroutine_threadsafe(self._stream(index, body, num_output_tokens), self._loop)
        self._streams = {other for other in self._streams if not other.done()} | {stream}

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        try:
            news = [self._news.get(timeout=seconds or 1e-6)]
        except queue.Empty:
            return []
        while not self._news.empty():
            news.append(self._news.get())
        for one in news:
            if isinstance(one, Exception):
                raise one
        return [one for one in news if not isinstance(one, Exception)]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _stream(self, index: int, body: bytes, num_output_tokens: int) -> None:
        try:
            count = 0
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
            head = (
                f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            )
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            await writer.drain()
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"job {index}: {status.decode()} {(await reader.read(4000)).decode()}")
            # Headers and sizes of chunks are lines too, that do not begin like an event; the size of the last is 0.
            while (line := await reader.readline()) not in (b"", b"0\r\n"):
                if not line.startswith(b"data: {"):
                    continue
                tokens = self._read(json.loads(line[6:]), count)
                if tokens:
                    count += len(tokens)
                    self._news.put((index, tokens, time.monotonic()))
            writer.close()
            if count != num_output_tokens:
                raise RuntimeError(f"job {index}: {count} tokens came, not {num_output_tokens}")
        except Exception as error:
            self._news.put(error)
