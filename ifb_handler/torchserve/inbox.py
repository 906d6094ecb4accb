"""Where the engine's thread and the tokenizing thread leave news for the round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ifb_handler.engine.mailbox import Mailbox
from ifb_handler.engine.outputs import RequestOutput

Tokenized = tuple[str, "Future[list[list[int]]]"]


class Inbox(Mailbox):
    """A mailbox that wakes its reader only for news that some client is waiting for.

    is_streaming    tells, of a request's id, whether its client hears every token; called on the engine's thread
    """

    def __init__(self, is_streaming: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_streaming = is_streaming
        self._tokenized: list[Tokenized] = []
        self._urgent = False

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        urgent = any(output.finished or self._is_streaming(output.request_id) for output in outputs)
        with self._arrived:
            self._outputs.extend(outputs)
            if urgent:
                self._wake()

    def put_tokenized(self, request_id: str, tokens: Future[list[list[int]]]) -> None:
        with self._arrived:
            self._tokenized.append((request_id, tokens))
            self._wake()

    def nudge(self) -> None:
        """Wake the reader for something that is not in here."""
        with self._arrived:
            self._wake()

    def _wake(self) -> None:
        self._urgent = True
        self._arrived.notify_all()

    def wait(self, timeout: float) -> None:
        """Until there is urgent news, or for `timeout` seconds."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._urgent, timeout)

    def take(self) -> tuple[list[RequestOutput], list[Tokenized]]:
        """All that has come, urgent or not."""
        with self._arrived:
            outputs, self._outputs = self._outputs, []
            tokenized, self._tokenized = self._tokenized, []
            self._urgent = False
            return outputs, tokenized
