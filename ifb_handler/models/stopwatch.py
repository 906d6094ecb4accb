"""Where a step's time goes: seconds by section, added up by whoever runs the section."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Accumulates seconds under names such as `gemm` and `attention`. Sections do not nest. Not thread-safe.

    On an asynchronous device a section measures the launch, not the work.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last `take`, by name; the watch starts again from nothing."""
        taken, self.seconds = self.seconds, {}
        return taken
