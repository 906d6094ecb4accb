"""When a round trip ends: soon enough for clients old and new, and no more often than that.

Where the engine computes on the CPU, a trip takes from it what it takes itself, in this process, the frontend and the
clients: the engine's threads fill all cores and wait for one another. Measured with 64 live requests on two cores, that
is about 2 ms, of which this process has less than half.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# A new request is seen at the next trip. While requests are coming (one in the last COMING_SECONDS), a trip without
# news ends LEAD seconds before the running step will, for what has come meanwhile to join the next step; when none are,
# LAG seconds after it will, as streams have had their news by then and one-shot answers have none; and where one more
# request would have to wait for others, after LONGEST, since it makes no odds.
COMING_SECONDS = 1.0
LEAD, LAG = 0.01, 0.02
SHORTEST, LONGEST = 0.025, 0.2
# With news in hand: seconds between two replies, since each costs the frontend milliseconds; quick steps share one.
MIN_INTERVAL = 0.015
# On a CPU the interval is longer after a reply to many: so much for each of them, up to a length that nobody who reads
# an answer minds. A first token waits for none of this (see inbox.py).
SECONDS_PER_CLIENT = 0.003
LONGEST_INTERVAL = 0.1


class Pace:
    """Of one thread's round trips; times are those of `time.monotonic()`.

    next_opening    an Engine's
    on_cpu          the engine computes on the cores that all else runs on
    min_interval    seconds between two replies with news, at least
    """

    def __init__(
        self, next_opening: Callable[[], float | None], on_cpu: bool, min_interval: float = MIN_INTERVAL
    ) -> None:
        self._next_opening = next_opening
        self._on_cpu = on_cpu
        self._min_interval = min_interval
        self._last_opened = self._last_told = -math.inf
        self._num_told = 0

    def opened(self, now: float) -> None:
        """A new request has come."""
        self._last_opened = now

    def told(self, now: float, num_clients: int) -> None:
        """A reply goes out that says something to so many."""
        self._last_told, self._num_told = now, num_clients

    def patience(self, now: float) -> float:
        """How long to wait for news (seconds)."""
        opening = self._next_opening()
        if opening is None:
            return LONGEST
        are_coming = now < self._last_opened + COMING_SECONDS
        return min(max(SHORTEST, (opening - LEAD if are_coming else opening + LAG) - now), LONGEST)

    def pause(self, now: float) -> float:
        """How long to wait for more news when there is some (seconds)."""
        for_many = min(SECONDS_PER_CLIENT * self._num_told, LONGEST_INTERVAL) if self._on_cpu else 0.0
        return max(0.0, self._last_told + max(self._min_interval, for_many) - now)
