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
    """Calls `on_absence`, on its own thread and never during a call, when TorchServe has stopped calling.

    While calls come nobody wakes that thread: it looks at them by itself, every TICK_SECONDS.
    """

    def __init__(self, on_absence: Callable[[], None]) -> None:
        self._on_absence = on_absence
        self._call = threading.Lock()  # held during a call, and by whoever changes what follows
        self._num_calls = 0
        self._armed = False
        self._watching = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="ifb-absence", daemon=True).start()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Around a call."""
        with self._call:
            self._num_calls += 1
            self._armed = False
            if not self._watching.is_set():
                self._watching.set()
            yield

    def arm(self) -> None:
        """At the end of a call whose reply holds a chunk for every request that is still live."""
        self._armed = True

    def close(self) -> None:
        self._closed.set()
        self._watching.set()

    def _watch(self) -> None:
        while self._watching.wait() and not self._closed.is_set():
            num_calls = self._wait_for_silence()
            with self._call:
                if self._num_calls == num_calls and not self._closed.is_set():
                    self._watching.clear()
                    if self._armed:
                        self._armed = False
                        self._on_absence()

    def _wait_for_silence(self) -> int:
        """Until there has been no call for ABSENCE_TICKS, or it is closed -> how many calls there were before."""
        num_calls, silent_ticks = -1, 0
        while silent_ticks < ABSENCE_TICKS and not self._closed.wait(TICK_SECONDS):
            silent_ticks = silent_ticks + 1 if self._num_calls == num_calls and not self._call.locked() else 0
            num_calls = self._num_calls
        return num_calls
