"""How the worker learns that its last clients have hung up.

TorchServe drops a request when it writes a chunk to a closed connection, and tells the worker by leaving the id out
of the next call. When no request is left there is no next call: it blocks until a new one comes. While it holds a live
request, though, it calls again within milliseconds. So: if every live request was just written to, and no call comes
for ABSENCE_SECONDS, then all of them are gone. (If one was left out of the reply, TorchServe still holds it.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Counted in short waits, so that a machine that stood still as a whole is no absence.
TICK_SECONDS = 0.05
ABSENCE_TICKS = 10


class Absence:
    """Calls `on_absence`, on its own thread and never during a call, when TorchServe has stopped calling."""

    def __init__(self, on_absence: Callable[[], None]) -> None:
        self._on_absence = on_absence
        self._call = threading.Lock()  # held during a call
        self._changed = threading.Condition()
        self._armed = False
        self._arms = 0
        self._closed = False
        threading.Thread(target=self._watch, name="ifb-absence", daemon=True).start()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Around a call."""
        with self._call:
            self._armed = False
            yield

    def arm(self) -> None:
        """At the end of a call whose reply holds a chunk for every request that is still live."""
        with self._changed:
            self._armed = True
            self._arms += 1
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._armed or self._closed)
                if self._closed:
                    return
                arms = self._arms
            if self._still_armed(arms):
                with self._call:
                    if self._armed and self._arms == arms:
                        self._armed = False
                        self._on_absence()

    def _still_armed(self, arms: int) -> bool:
        pause = threading.Event()
        for _ in range(ABSENCE_TICKS):
            pause.wait(TICK_SECONDS)
            if self._closed or not self._armed or self._arms != arms:
                return False
        return True
