"""TorchServe's messages to the worker, read with few system calls and no request twice.

Its own reader asks the kernel for every field, four bytes at a time, and a round trip's message repeats the headers of
all live requests, and the bodies of those that have no answer yet: with 64 of them some 2,000 calls, which took more of
a core than all the rest of the round trip. Here what has come is read at once, and of a request that is sent again in
the same bytes there is no more than its id. All else is still read by TorchServe's own functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ts.protocol import otf_message_handler

_READ_SIZE = 1 << 16
_LENGTH = struct.Struct("!i")
_READ_BUFFER, _READ_REQUEST = otf_message_handler._retrieve_buffer, otf_message_handler._retrieve_request

Request = dict[str, Any]


class MessageReader:
    """What one connection has brought and nobody has taken yet.

    connection         its `recv` waits for data, and gives none at the end
    read_request       reads one request by `take`: a dict, or None at the end of the message
    on_disconnected    called when the connection has ended; it does not return
    """

    def __init__(
        self, connection: Any, read_request: Callable[[], Request | None], on_disconnected: Callable[[], None]
    ) -> None:
        self.connection = connection
        self._read_request = read_request
        self._on_disconnected = on_disconnected
        self._data = bytearray()
        self._at = 0
        self._known: dict[bytes, bytes] = {}  # the bytes of the last message's requests, by their ids

    def take(self, length: int) -> bytearray:
        """The next `length` bytes; waits for them."""
        end = self._at + length
        while len(self._data) < end:
            news = self.connection.recv(_READ_SIZE)
            if not news:
                self._on_disconnected()
            self._data += news
        start, self._at = self._at, end
        return self._data[start:end]

    def requests(self) -> list[Request]:
        """The requests of the message whose command has just been taken, as TorchServe's reader gives them.

        One that was in the message before, with the same headers and the same body or none, is its id alone.
        """
        known, self._known = self._known, {}
        message: list[Request] = []
        while True:
            start = self._at
            request = self._again(known)
            if request is None:
                request = self._read_request()
                if request is None:
                    break
                self._known[bytes(request["requestId"])] = bytes(self._data[start : self._at])
            message.append(request)
        del self._data[: self._at]
        self._at = 0
        return message

    def _again(self, known: dict[bytes, bytes]) -> Request | None:
        """The next request, if it is one of the last message's and all of its bytes have come."""
        start = self._at + _LENGTH.size
        if len(self._data) < start:
            return None
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        request_id = bytes(self._data[start : start + max(0, length)])
        seen = known.get(request_id)
        if seen is None or not self._data.startswith(seen, self._at):
            return None
        self._known[request_id] = seen
        self._at += len(seen)
        return {"requestId": request_id, "headers": [], "parameters": []}


def install() -> None:
    """Let this process's worker read by a MessageReader from its next message on. It ends with its one connection."""
    current: MessageReader | None = None

    def reader(connection: Any) -> MessageReader:
        nonlocal current
        if current is None or current.connection is not connection:
            # The end of the connection is TorchServe's own reader's to meet: it says so, and ends the process.
            current = MessageReader(connection, lambda: _READ_REQUEST(connection), lambda: _READ_BUFFER(connection, 1))
        return current

    otf_message_handler._retrieve_buffer = lambda connection, length: reader(connection).take(length)
    otf_message_handler._retrieve_inference_msg = lambda connection: reader(connection).requests()
