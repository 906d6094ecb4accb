"""Where a consumer hears of its requests. The engine thread puts, one consumer thread collects."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ifb_handler.engine.outputs import RequestOutput


class Mailbox:
    """One consumer's outputs, in order. The engine puts one step's outputs at once and never waits."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._outputs: list[RequestOutput] = []

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        with self._arrived:
            self._outputs.extend(outputs)
            self._arrived.notify_all()

    def collect(self, timeout: float | None = None) -> list[RequestOutput]:
        """All that has come since the last call; waits up to `timeout` seconds (None: for ever) for the first."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._outputs, timeout)
            outputs, self._outputs = self._outputs, []
            return outputs
