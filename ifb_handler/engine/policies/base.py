"""What each kind of policy decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.request import Request

if TYPE_CHECKING:
    from ifb_handler.engine.prefix_cache import PrefixCache
    from ifb_handler.engine.scheduler import Schedule, Scheduler


class Batching(ABC):
    """When a request may join the batch, and when one that has ended leaves it."""

    keeps_ended: bool
    """Whether the row of a request that has ended stays until all have, computing padding, its pages held."""

    @abstractmethod
    def may_admit(self, num_running: int) -> bool: ...


class Ordering(ABC):
    """Who is admitted first, and who is preempted first."""

    @abstractmethod
    def in_order(self, waiting: Sequence[Request], cache: PrefixCache | None) -> Sequence[Request]:
        """The queue, given in the order of arrival, in the order of admission."""

    def victim(self, running: Sequence[Request]) -> Request:
        """Who gives up its pages for another."""
        return max(running, key=lambda request: request.arrival)


class PrefillPriority(ABC):
    """What a step's token budget is spent on first."""

    @abstractmethod
    def fill(self, scheduler: Scheduler, step: Schedule) -> None: ...


class Capacity(ABC):
    """Whether a request may come in beside those that run, as far as pages are concerned."""

    @abstractmethod
    def fits(self, request: Request, missing: int, available: int, running: Sequence[Request], pool: KVPool) -> bool:
        """`missing`: pages to take for it now; `available`: pages that can be taken, those it will share put aside.

        With nothing running any request fits: the engine refuses those that never could.
        """


class KVReservation(ABC):
    """How many tokens a request is given pages for when it comes in."""

    @abstractmethod
    def num_tokens(self, request: Request) -> int: ...


# How often later arrivals may be admitted before a request until it goes before all that have not waited so long.
MOST_PASSED_OVER = 64


def aged(request: Request) -> bool:
    """Whether a request has been passed over so often that it is its turn: with this no ordering starves anyone."""
    return request.num_passed_over >= MOST_PASSED_OVER
