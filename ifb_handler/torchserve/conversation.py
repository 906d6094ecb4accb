"""One client's request from its first round trip to its last: what is to be said next, and in which form.

A streamed answer is chunks of server-sent events; a one-shot answer is one JSON body with Content-Length. TorchServe
notices a hang-up only when it writes a chunk, so whoever has waited for PROBE_SECONDS is sent an empty one, which
starts a one-shot answer as a stream, too: its body is then the last chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ifb_handler.api import sse
from ifb_handler.api.answer import Answer
from ifb_handler.api.errors import APIError
from ifb_handler.engine.outputs import RequestOutput

JSON = "application/json"

# Seconds of silence before a client is probed: short enough that, with ABSENCE_SECONDS of round_trip.py on top, a
# hang-up frees its pages within a second; long enough that quick one-shot answers keep their Content-Length.
PROBE_SECONDS = 0.2
FIRST_PROBE_SECONDS = 0.4
# Most bytes in one reply, well under TorchServe's default max_response_size (6,553,500): more goes out in pieces.
MAX_PIECE = 1 << 20


@dataclass(frozen=True)
class Reply:
    """What one round trip says to one client.

    last      True: the stream's last chunk; False: a chunk with more to come; None: the whole answer, no stream
    headers   only a first reply's reach the client
    """

    body: bytes
    last: bool | None
    status: int = 200
    phrase: str = "OK"
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


class Conversation:
    """can_stream    False for a client that can be sent a single message only (gRPC)
    answer        None until the request's body has been understood
    """

    def __init__(self, request_id: str, now: float, can_stream: bool = True) -> None:
        self.request_id = request_id
        self.answer: Answer | None = None
        self._can_stream = can_stream
        self._probe_at = now + FIRST_PROBE_SECONDS
        self._outputs: list[RequestOutput] = []
        self._body: str | None = None  # an answer that is complete
        self._error: APIError | None = None
        self._unsent = b""
        self._closing = False  # nothing comes after `_unsent`
        self._started = False  # the status line has gone out, as a stream's
        self.over = False  # the last reply has been given out

    @property
    def wants_events(self) -> bool:
        """Whether the client hears each token as it comes."""
        return self._can_stream and self.answer is not None and self.answer.asked.stream

    @property
    def has_news(self) -> bool:
        """Whether the next reply will say something, a probe aside."""
        return bool(self._body is not None or self._error or self._outputs or self._unsent)

    def probe_soon(self) -> None:
        """For a request whose body is large: once it has a chunk, TorchServe no longer sends its body again."""
        self._probe_at = 0.0

    def hear(self, output: RequestOutput) -> None:
        """The engine's news. Raises APIError as `Answer.add` does."""
        assert self.answer is not None
        if self.wants_events:
            self._outputs.append(output)
            return
        self.answer.add(output)
        if output.finished:
            self._body = self.answer.whole()

    def tell(self, body: str) -> None:
        """The whole answer, at once."""
        self._body = body

    def fail(self, error: APIError) -> None:
        """End with an error, in the form that is still open: a status of its own, or the last event of a stream.

        The first one counts: what comes after it are its consequences.
        """
        self._error = self._error or error

    def next_reply(self, now: float) -> Reply | None:
        """What to say in this round trip; None leaves the client waiting. Raises when the answer cannot be rendered."""
        if not self._closing:
            self._compose()
        if self._closing and not self._started and (len(self._unsent) <= MAX_PIECE or not self._can_stream):
            return self._reply_whole()
        silent = not self._unsent and not self._closing
        if silent and (not self._can_stream or now < self._probe_at):
            return None
        self._probe_at = now + PROBE_SECONDS
        return self._reply_chunk()

    def _compose(self) -> None:
        """Add to `_unsent` what there is to say."""
        if self._error is not None:
            self._closing = True
            as_event = self._started and self.wants_events
            self._unsent += (sse.event(self._error.body()) if as_event else self._error.json()).encode()
        elif self._body is not None:
            self._closing = True
            self._unsent += self._body.encode()
        elif self._outputs:
            outputs, self._outputs = self._outputs, []
            self._unsent += self.answer.stream(outputs).encode()
            self._closing = outputs[-1].finished

    def _reply_whole(self) -> Reply:
        self.over = True
        if self._error is None:
            return Reply(self._unsent, None, content_type=self._content_type)
        return Reply(self._unsent, None, self._error.status, self._error.phrase, JSON, self._error.headers)

    def _reply_chunk(self) -> Reply:
        piece, self._unsent = self._unsent[:MAX_PIECE], self._unsent[MAX_PIECE:]
        self._started = True
        self.over = self._closing and not self._unsent
        return Reply(piece, self.over, content_type=self._content_type)

    @property
    def _content_type(self) -> str:
        return sse.CONTENT_TYPE if self.wants_events else JSON
