"""The bridge for asyncCommunication: the same round trips, made here, and what they say written to TorchServe at once.

TorchServe hands over each request when it comes and takes messages at any time, so a thread of ours plays the part that
the frontend has in the other mode: it keeps the live requests, makes a round trip with every step's news, and sends the
replies of all requests as one message. What that mode asks for, and where it is done:

- messages do not interleave, and nothing is said after a request's last: no thread but this one writes, since
  `receive` ends in CancelledError, which keeps the framework from writing a final reply of its own;
- a message whose code is not 200 fails every request in flight, so each reply has its own status and the code is 200;
- only `ts_stream_next: "false"` takes a request off TorchServe's list, but makes no answer for an HTTP client that has
  none yet: an answer in one piece goes out whole, with its length and status, and an empty last chunk behind it;
- hang-ups are not reported, and there is no back-pressure: requests have a timeout and can be cancelled by their id,
  and more than can run or wait are refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ts.context import Context, RequestProcessor
from ts.protocol.otf_message_handler import create_predict_response

from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.torchserve.async_engine import RebuiltEngine
from ifb_handler.torchserve.round_trip import RoundTrip

logger = logging.getLogger(__name__)

# Seconds between two messages. They cost the frontend less than round trips do.
MIN_INTERVAL = 0.005
# Seconds between two looks at an idle engine's health.
IDLE_SECONDS = 1.0
# Bytes of replies from which a message is closed and another begun, below TorchServe's default max_response_size.
MESSAGE_SIZE = 4 << 20

_Request = tuple[str, Mapping[str, Any], Mapping[str, Any]]  # id, parts, headers


class AsyncBridge:
    """on_finished    is told the last output of every request that the engine has finished"""

    def __init__(self, engine: RebuiltEngine, model: ServedModel, on_finished: Callable[[RequestOutput], None]) -> None:
        self._round_trip = RoundTrip(
            engine,
            model,
            on_finished,
            engine.rebuild,
            sees_hang_ups=False,
            min_interval=MIN_INTERVAL,
            max_live=engine.config.max_num_seqs + engine.config.max_num_waiting,
        )
        self._arrived = threading.Condition()
        self._new: list[_Request] = []
        self._socket: Any = None
        threading.Thread(target=self._run, name="ifb-bridge", daemon=True).start()

    async def receive(self, data: Sequence[Mapping[str, Any]], context: Any) -> NoReturn:
        """What a handler awaits: take the requests over. Always raises CancelledError, as the replies are sent here."""
        with self._arrived:
            self._socket = context.cl_socket
            for index, request_id in context.request_ids.items():
                self._new.append((request_id, data[index], context.get_all_request_header(index)))
            self._arrived.notify()
        self._round_trip.nudge()
        raise asyncio.CancelledError

    def _run(self) -> None:
        while True:
            try:
                self._make_trip(self._take_new())
            except OSError as error:
                logger.error("TorchServe's connection has broken (%s): every request is cancelled", error)
                self._round_trip.take_in([], _context([]))
            except Exception:
                logger.exception("a message to TorchServe failed")

    def _take_new(self) -> list[_Request]:
        """What has arrived; waits for it while nothing else is to be done."""
        with self._arrived:
            if not self._round_trip.live:
                self._arrived.wait_for(lambda: self._new, IDLE_SECONDS)
            new, self._new = self._new, []
            return new

    def _make_trip(self, new: list[_Request]) -> None:
        requests: list[_Request] = [(request_id, {}, {}) for request_id in self._round_trip.live]
        requests += new
        context = _context(requests)
        try:
            self._round_trip.take_in([parts for _, parts, _ in requests], context)
            self._round_trip.collect()
            replies = self._round_trip.replies(context)
        except Exception:
            logger.exception("a round trip failed")
            replies = self._round_trip.give_up(context)
        for message in messages(replies, context):
            self._socket.sendall(message)


def messages(replies: list[bytes | None], context: Any) -> list[bytearray]:
    """What TorchServe is to be sent for a round trip's replies; usually one message, none if there is no news."""
    replies = list(replies)
    sent: list[bytearray] = []
    batch: dict[int, str] = {}
    size = 0
    for index, request_id in context.request_ids.items():
        batch[index] = request_id
        size += len(replies[index] or b"")
        if context.stopping_criteria[index](None) is None:
            batch[len(replies)] = request_id
            context.stopping_criteria[len(replies)] = lambda _: True
            context.request_processor.append(RequestProcessor({}))
            replies.append(b"")
        if size >= MESSAGE_SIZE:
            sent.append(create_predict_response(replies, batch, "", 200, context))
            batch, size = {}, 0
    if batch:
        sent.append(create_predict_response(replies, batch, "", 200, context))
    return sent


def _context(requests: list[_Request]) -> Context:
    """As TorchServe makes one for a call with these requests."""
    context = Context("", "", None, len(requests), None, "")
    context.request_ids = {index: request_id for index, (request_id, _, _) in enumerate(requests)}
    context.request_processor = [RequestProcessor(dict(headers)) for _, _, headers in requests]
    return context
