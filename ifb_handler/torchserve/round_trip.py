"""TorchServe's continuousBatching round trip: new requests and hang-ups for news. It never waits for a step.

The frontend calls with the ids of all live requests, those it has not been answered yet with their bodies; the reply
is built from `context.request_ids` as the call leaves it. What the rules are, and who checks them in TorchServe:

- an index deleted from `context.request_ids` is left out of the reply and stays live;
- `context.stopping_criteria[index]` says what a reply is: True the last chunk, False a chunk, None the whole answer;
- an exception, or a list of another length, fails every live request: so nothing may be raised here;
- a live request whose client has hung up is dropped when a chunk for it is written: its id is then missing from the
  next call, and when it was the only one there is no next call (`_Absence`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ifb_handler.api import cancel, routes, sse
from ifb_handler.api.answer import Asked, owner
from ifb_handler.api.body import read_fields
from ifb_handler.api.errors import APIError, expired
from ifb_handler.api.served_model import ServedModel
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import QueueFullError
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.torchserve.absence import Absence
from ifb_handler.torchserve.call import Call
from ifb_handler.torchserve.conversation import Conversation, Reply
from ifb_handler.torchserve.inbox import Inbox, Urgency
from ifb_handler.torchserve.pace import MIN_INTERVAL, Pace

logger = logging.getLogger(__name__)

# Characters of new prompts that one round trip tokenizes itself (about 6 ms); the others go to a thread of their own.
INLINE_CHARACTERS = 8192
# Grammars that are compiled at the same time; each takes milliseconds, one that is refused up to seconds.
MAX_COMPILING = 2
# Prompt tokens from which a request is sent a chunk at once, so that TorchServe stops sending its body again.
LARGE_PROMPT_TOKENS = 4096


class RoundTrip:
    """The bridge between TorchServe's calls, on one thread, and the engine's outputs.

    on_finished       is told the last output of every request that the engine has finished
    on_engine_dead    is called when the engine has died and every client of its has been told so
    sees_hang_ups     TorchServe drops a request whose client it finds gone; if not, no client is probed
    min_interval      seconds between two replies that say something, at least
    max_live          one more request is refused at once (503); None: TorchServe sees to that
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        on_finished: Callable[[RequestOutput], None],
        on_engine_dead: Callable[[], None],
        *,
        sees_hang_ups: bool = True,
        min_interval: float = MIN_INTERVAL,
        max_live: int | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._on_finished = on_finished
        self._on_engine_dead = on_engine_dead
        self._pace = Pace(engine.next_opening, engine.device_type == "cpu", min_interval)
        self._max_live = max_live
        self._live: dict[str, Conversation] = {}
        self._inbox = Inbox(self._urgency)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="ifb-tokenize")
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="ifb-compile")
        self._num_requests = 0  # of the call that is being answered
        self._inline_characters = 0
        self._absence = Absence(self._abandon) if sees_hang_ups else None

    def call(self) -> AbstractContextManager[None]:
        """Around one call of TorchServe's: `take_in`, `collect` and `replies`, or else `give_up`."""
        return self._absence.present() if self._absence else nullcontext()

    def close(self) -> None:
        """Let go of the helper threads; the engine is its owner's to stop."""
        if self._absence:
            self._absence.close()
        for helpers in (self._tokenizing, self._compiling):
            helpers.shutdown(wait=False, cancel_futures=True)

    @property
    def live(self) -> list[str]:
        """The ids of the requests that have not had their last reply."""
        return list(self._live)

    def nudge(self) -> None:
        """End the wait of `collect`, for a new request. From any thread."""
        self._inbox.nudge()

    # In

    def take_in(self, data: Sequence[Mapping[str, Any]], context: Any) -> None:
        """Open the requests that are new and cancel those that are missing; `data` as a handler is given it."""
        self._num_requests = len(data)
        ids: dict[int, str] = context.request_ids
        for request_id in self._live.keys() - set(ids.values()):
            self._stop(self._live.pop(request_id))
        self._inline_characters = INLINE_CHARACTERS
        for index, request_id in ids.items():
            if request_id not in self._live:
                self._open(request_id, data[index], context.get_all_request_header(index))

    def _open(self, request_id: str, parts: Mapping[str, Any], headers: Mapping[str, Any]) -> None:
        call = Call.of(parts, headers, self._absence is not None)
        now = time.monotonic()
        self._pace.opened(now)
        conversation = Conversation(request_id, now, call.line, call.name)
        self._live[request_id] = conversation
        try:
            self._understand(conversation, call)
        except Exception as error:
            self._fail(conversation, error)

    def _understand(self, conversation: Conversation, call: Call) -> None:
        route, rest = routes.find(call.path())
        if isinstance(route, routes.Information):
            conversation.tell(sse.compact(routes.inform(route, rest, call.parts, self._engine, self._model)))
            return
        if isinstance(route, routes.Cancellation):
            named = cancel.read(read_fields(call.parts))
            conversation.tell(sse.compact(cancel.report(named, self._cancel(named))))
            return
        if self._max_live is not None and len(self._live) > self._max_live:
            raise QueueFullError(f"{self._max_live} requests are being served; send it again later")
        conversation.form = route.answer
        fields = call.fields(route.read_body)
        route = routes.by_body(route, fields)
        conversation.form = route.answer
        asked = route.read(fields, self._model)
        asked.check_sizes(self._model)
        conversation.begin(asked, self._model)
        self._prepare(conversation, asked)

    def _cancel(self, named: str) -> int:
        """End the live requests of that id -> how many there were."""
        meant = [conversation for conversation in self._live.values() if conversation.is_called(named)]
        for conversation in meant:
            self._fail(conversation, cancel.cancelled())
        return len(meant)

    def _prepare(self, conversation: Conversation, asked: Asked) -> None:
        """Tokenize and compile, here and now if that is quick."""
        self._inline_characters -= asked.characters
        if self._inline_characters >= 0 and not asked.grammars:
            self._submit(conversation, asked.token_ids(self._model))
            return
        request_id = conversation.request_id
        helpers = self._compiling if asked.grammars else self._tokenizing
        tokens = helpers.submit(self._prepared, asked)
        tokens.add_done_callback(lambda done: self._inbox.put_tokenized(request_id, done))

    def _prepared(self, asked: Asked) -> list[list[int]]:
        for params in asked.grammars:
            self._engine.prepare(params)
        return asked.token_ids(self._model)

    def _submit(self, conversation: Conversation, tokens: list[list[int]]) -> None:
        if conversation.has_failed:  # cancelled while it was tokenized
            return
        for request in conversation.answer.requests(tokens):
            self._engine.submit(request, self._inbox)
        conversation.submitted(time.monotonic(), sum(map(len, tokens)) >= LARGE_PROMPT_TOKENS)

    # Between

    def _urgency(self, request_id: str) -> Urgency:
        conversation = self._live.get(owner(request_id))
        return Urgency.NONE if conversation is None else conversation.urgency

    def collect(self) -> None:
        """Wait for news, unless there is some already, and hand it to the conversations."""
        if not any(conversation.has_news for conversation in self._live.values()):
            self._inbox.wait(self._pace.patience(time.monotonic()))
            if pause := self._pace.pause(time.monotonic()):
                self._inbox.wait(pause, Urgency.NOW)
        outputs, tokenized = self._inbox.take()
        for request_id, tokens in tokenized:
            self._about(request_id, self._submit_tokenized, tokens)
        for output in outputs:
            if output.finished:
                self._on_finished(output)
            self._about(owner(output.request_id), Conversation.hear, output)

    def _submit_tokenized(self, conversation: Conversation, tokens: Future[list[list[int]]]) -> None:
        self._submit(conversation, tokens.result())

    def _about(self, request_id: str, act: Callable[[Conversation, Any], None], news: Any) -> None:
        """News of a request: of no interest once its client has gone, and its failure is that request's alone."""
        conversation = self._live.get(request_id)
        if conversation is None:
            return
        try:
            act(conversation, news)
        except Exception as error:
            self._fail(conversation, error)

    def _fail(self, conversation: Conversation, error: Exception) -> None:
        told = APIError.of(error)
        if told.status == 500 and told is not error:
            logger.exception("request %s failed", conversation.request_id, exc_info=error)
        conversation.fail(told)
        self._stop(conversation)

    def _stop(self, conversation: Conversation) -> None:
        """Give back what its requests hold of the engine, if they hold anything."""
        for engine_id in conversation.engine_ids:
            self._engine.cancel(engine_id)

    def _abandon(self) -> None:
        """No call has come although every client was just written to: all have hung up (called by `Absence`)."""
        for conversation in self._live.values():
            conversation.fail(APIError(503, "TorchServe has not asked for this answer for too long; send it again"))
            self._stop(conversation)

    # Out

    def replies(self, context: Any) -> list[bytes | None]:
        """What a handler returns; `context` is left saying how each reply is meant."""
        now = time.monotonic()
        ids: dict[int, str] = context.request_ids
        replies: list[bytes | None] = [None] * self._num_requests
        context.stopping_criteria = {}
        for index, request_id in list(ids.items()):
            conversation = self._live[request_id]
            reply = self._next_reply(conversation, now)
            if reply is None:
                del ids[index]
                continue
            replies[index] = reply.body
            _set_reply(context, index, reply)
            if conversation.over:
                del self._live[request_id]
        if num_told := sum(map(bool, replies)):
            self._pace.told(now, num_told)
        if self._absence and self._live and self._live.keys() <= set(ids.values()):
            self._absence.arm()
        if not self._live and not self._engine.is_healthy:
            self._on_engine_dead()
        return replies

    def give_up(self, context: Any) -> list[bytes | None]:
        """End every live request with an error: after a failure that is no single request's."""
        for index, request_id in context.request_ids.items():
            line = Call.of({}, context.get_all_request_header(index), self._absence is not None).line
            conversation = self._live.setdefault(request_id, Conversation(request_id, time.monotonic(), line))
            conversation.fail(APIError(500, "internal error in the round trip; the server's log has the details"))
            self._stop(conversation)
        return self.replies(context)

    def _next_reply(self, conversation: Conversation, now: float) -> Reply | None:
        try:
            if conversation.has_expired(now):
                raise expired(conversation.answer.asked.timeout)
            reply = conversation.next_reply(now)
            if reply is not None and reply.is_probe and all(map(self._engine.is_waiting, conversation.engine_ids)):
                conversation.probed_in_queue(now)
            return reply
        except Exception as error:
            self._fail(conversation, error)
            return conversation.next_reply(now)


def _set_reply(context: Any, index: int, reply: Reply) -> None:
    context.stopping_criteria[index] = lambda _: reply.last
    if reply.content_type is not None:
        context.set_response_content_type(index, reply.content_type)
    for name, value in reply.headers.items():
        context.set_response_header(index, name, value)
    context.set_response_status(reply.status, reply.phrase, index)
