"""Where the engine's thread and the tokenizing thread leave news for the round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum

from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import RequestOutput

Tokenized = tuple[str, "Future[list[list[int]]]"]


class Urgency(IntEnum):
    """Of a piece of news: who waits for it.

    NONE    nobody, until there is more
    SOON    a client, who can wait for a reply to others
    NOW     a client who has heard nothing yet
    """

    NONE = 0
    SOON = 1
    NOW = 2


class Inbox(Mailbox):
    """A mailbox that wakes its reader only for news that some client is waiting for.

    urgency    of news that are not a request's last, by its id; called on the engine's thread
    """

    def __init__(self, urgency: Callable[[str], Urgency]) -> None:
        super().__init__()
        self._urgency_of = urgency
        self._tokenized: list[Tokenized] = []
        self._urgency = Urgency.NONE

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        urgency = max((self._of(output) for output in outputs), default=Urgency.NONE)
        with self._arrived:
            self._outputs.extend(outputs)
            self._raise(urgency)

    def _of(self, output: RequestOutput) -> Urgency:
        urgency = self._urgency_of(output.request_id)
        return max(urgency, Urgency.SOON) if output.finished else urgency

    def put_tokenized(self, request_id: str, tokens: Future[list[list[int]]]) -> None:
        with self._arrived:
            self._tokenized.append((request_id, tokens))
            self._raise(Urgency.SOON)

    def nudge(self) -> None:
        """Wake the reader for something that is not in here."""
        with self._arrived:
            self._raise(Urgency.SOON)

    def _raise(self, urgency: Urgency) -> None:
        if urgency > self._urgency:
            self._urgency = urgency
            self._arrived.notify_all()

    def wait(self, timeout: float, urgency: Urgency = Urgency.SOON) -> None:
        """Until there is news of that urgency, or for `timeout` seconds."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._urgency >= urgency, timeout)

    def take(self) -> tuple[list[RequestOutput], list[Tokenized]]:
        """All that has come, urgent or not."""
        with self._arrived:
            outputs, self._outputs = self._outputs, []
            tokenized, self._tokenized = self._tokenized, []
            self._urgency = Urgency.NONE
            return outputs, tokenized
