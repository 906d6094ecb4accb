"""A streaming chat request to a server, with the times at which its pieces came."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Question:
    """What one client asks, once the first client has had `after` characters of its answer."""

    name: str
    prompt: str
    max_tokens: int
    after: int


@dataclass
class Reply:
    """What came back so far. Times are `time.monotonic()` seconds, one for each piece of text."""

    question: Question
    request_id: str = ""
    text: str = ""
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    closed: bool = False
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the stream was whole: text, a reason to finish, the token counts and the closing event."""
        return bool(self.error is None and self.closed and self.finish_reason and self.text and self.completion_tokens)

    @property
    def time_to_first_token(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces: the inter-token latency as a client sees it."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


async def ask(client: httpx.AsyncClient, model_url: str, reply: Reply) -> None:
    """Send `reply.question` and fill `reply` as the stream comes. A failure goes into `reply.error`."""
    body = {
        "messages": [{"role": "user", "content": reply.question.prompt}],
        "max_tokens": reply.question.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply.sent = time.monotonic()
    try:
        async with client.stream("POST", f"{model_url}/v1/chat/completions", json=body) as response:
            reply.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                reply.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                return
            async for event in _events(response):
                _hear(reply, event)
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event; our server writes each on one line."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _hear(reply: Reply, data: str) -> None:
    if data == "[DONE]":
        reply.closed = True
        return
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        reply.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event["choices"]:
        if piece := choice["delta"].get("content"):
            reply.text += piece
            reply.arrivals.append(time.monotonic())
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
    if usage := event.get("usage"):
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.completion_tokens = usage["completion_tokens"]
