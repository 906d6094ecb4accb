"""One client's request from its first round trip to its last: what is to be said next, and in which form.

A streamed answer is chunks of server-sent events; a one-shot answer is one JSON body with Content-Length. TorchServe
notices a hang-up only when it writes a chunk, so whoever has waited for PROBE_SECONDS is sent an empty one, which
starts a one-shot answer as a stream, too: its body is then the last chunk. Nobody is probed before the engine has the
whole request: what is found wrong with it until then has a status of its own.

How a client can be answered (`Line`) depends on how it came. TorchServe drops a gRPC call at its first chunk in the
continuous mode, does not say whether a call is `Predictions` or `StreamPredictions`, and fails the worker when a lone
message to the latter does not call itself the last; nor has a gRPC answer a status of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from ifb_handler.api import sse
from ifb_handler.api.answer import Answer, Asked
from ifb_handler.api.errors import APIError
from ifb_handler.api.plain import PlainAnswer
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.torchserve.inbox import Urgency

JSON = "application/json"

# Seconds of silence before a client is probed: short enough that, with ABSENCE_SECONDS of round_trip.py on top, a
# hang-up frees its pages within a second; long enough that quick one-shot answers keep their Content-Length.
PROBE_SECONDS = 0.2
FIRST_PROBE_SECONDS = 0.4
# Who is being told tokens will be told more when the step ends, before which no page could be freed. In the engine's
# queue a request holds no pages, and there may be a thousand of them.
STREAMING_PROBE_SECONDS = 0.5
QUEUED_PROBE_SECONDS = 1.0
# Most bytes in one reply, well under TorchServe's default max_response_size (6,553,500): more goes out in pieces.
MAX_PIECE = 1 << 20


@dataclass(frozen=True)
class Reply:
    """What one round trip says to one client.

    last      True: the stream's last chunk; False: a chunk with more to come; None: the whole answer, no stream
    content_type, headers    only a first reply's reach the client
    """

    body: bytes
    last: bool | None
    status: int = 200
    phrase: str = "OK"
    content_type: str | None = JSON
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_probe(self) -> bool:
        return not self.body and self.last is False


@dataclass(frozen=True)
class Line:
    """can_stream    a client can be sent more than one message
    probed        an empty chunk finds out whether the client is still there
    lone          what `Reply.last` says of an answer in one message
    has_status    the client sees an answer's status; if not, it stands in the error's body
    """

    can_stream: bool
    probed: bool
    lone: bool | None
    has_status: bool


HTTP = Line(can_stream=True, probed=True, lone=None, has_status=True)
HTTP_UNPROBED = Line(can_stream=True, probed=False, lone=None, has_status=True)
ONE_MESSAGE = Line(can_stream=False, probed=False, lone=True, has_status=False)
GRPC_STREAM = Line(can_stream=True, probed=False, lone=True, has_status=False)


class Conversation:
    """name      what the client itself calls the request (header x-request-id)
    answer    None until the request's body has been understood
    form      the kind of answer, known before its body: it says what an error looks like
    """

    def __init__(self, request_id: str, now: float, line: Line = HTTP, name: str | None = None) -> None:
        self.request_id = request_id
        self.name = name
        self.answer: Answer | None = None
        self.form: type[Answer] = PlainAnswer
        self._line = line
        self._opened_at = now
        self._probe_at = math.inf
        self._outputs: list[RequestOutput] = []
        self._has_heard = False
        self._body: str | None = None  # an answer that is complete
        self._error: APIError | None = None
        self._unsent = b""
        self._closing = False  # nothing comes after `_unsent`
        self._started = False  # the status line has gone out, as a stream's
        self.over = False  # the last reply has been given out

    def begin(self, asked: Asked, model: ServedModel) -> None:
        """The body has been understood."""
        self.answer = self.form(asked, self.request_id, model, self.name)

    @property
    def engine_ids(self) -> list[str]:
        """The ids of the engine's requests that this one has, or will have."""
        return self.answer.engine_ids if self.answer is not None else []

    def has_expired(self, now: float) -> bool:
        """Whether its time is up and nothing has ended it yet."""
        if self.answer is None or self.answer.asked.timeout is None or self._closing:
            return False
        return now >= self._opened_at + self.answer.asked.timeout and self._body is None and self._error is None

    @property
    def wants_events(self) -> bool:
        """Whether the client hears each token as it comes."""
        return self._line.can_stream and self.answer is not None and self.answer.asked.stream

    @property
    def urgency(self) -> Urgency:
        """Of the next token."""
        if not self.wants_events:
            return Urgency.NONE
        return Urgency.SOON if self._has_heard else Urgency.NOW

    @property
    def has_news(self) -> bool:
        """Whether the next reply will say something, a probe aside."""
        return bool(self._body is not None or self._error or self._outputs or self._unsent)

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def submitted(self, now: float, large: bool) -> None:
        """The engine has all of it: from now on its client may be probed.

        large    at once: once it has a chunk, TorchServe no longer sends its large body again
        """
        self._probe_at = now if large else now + FIRST_PROBE_SECONDS

    def probed_in_queue(self, now: float) -> None:
        """It holds nothing yet that others could use: the next probe has time."""
        self._probe_at = now + QUEUED_PROBE_SECONDS

    def hear(self, output: RequestOutput) -> None:
        """The engine's news. Raises APIError as `Answer.add` does."""
        assert self.answer is not None
        if self.wants_events:
            self._has_heard = True
            self._outputs.append(output)
            return
        self.answer.add(output)
        if self.answer.finished:
            self._body = self.answer.whole()

    def is_called(self, name: str) -> bool:
        """Whether this is the request of that id: TorchServe's, the answer's, or the client's own."""
        return name in (self.request_id, self.name, self.answer and self.answer.id)

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
        if self._closing and not self._started and (len(self._unsent) <= MAX_PIECE or not self._line.can_stream):
            return self._reply_whole()
        silent = not self._unsent and not self._closing
        if silent and (not self._line.probed or now < self._probe_at):
            return None
        self._probe_at = now + (PROBE_SECONDS if silent else STREAMING_PROBE_SECONDS)
        return self._reply_chunk()

    def _compose(self) -> None:
        """Add to `_unsent` what there is to say."""
        if self._error is not None:
            as_event = self._started and self.wants_events
            self._unsent += _encoded(sse.event(self._error_body()) if as_event else sse.compact(self._error_body()))
            self._closing = True
        elif self._body is not None:
            self._unsent += _encoded(self._body)
            self._closing = True
        elif self._outputs:
            outputs, self._outputs = self._outputs, []
            self._unsent += _encoded(self.answer.stream(outputs))
            self._closing = self.answer.finished

    def _error_body(self) -> dict[str, Any]:
        body = self.form.error_body(self._error)
        if not self._line.has_status:
            (body["error"] if isinstance(body["error"], dict) else body)["status"] = self.form.status_of(self._error)
        return body

    def _reply_whole(self) -> Reply:
        self.over = True
        if self._error is None:
            return Reply(self._unsent, self._line.lone, content_type=self._content_type)
        status = self.form.status_of(self._error)
        return Reply(self._unsent, self._line.lone, status, HTTPStatus(status).phrase, JSON, self._error.headers)

    def _reply_chunk(self) -> Reply:
        piece, self._unsent = self._unsent[:MAX_PIECE], self._unsent[MAX_PIECE:]
        content_type = None if self._started else self._content_type
        self._started = True
        self.over = self._closing and not self._unsent
        return Reply(piece, self.over, content_type=content_type)

    @property
    def _content_type(self) -> str:
        return sse.CONTENT_TYPE if self.wants_events else JSON


def _encoded(text: str) -> bytes:
    """JSON as UTF-8. Half a surrogate pair has no bytes there; its backslash form is JSON's own way of writing it."""
    return text.encode(errors="backslashreplace")
