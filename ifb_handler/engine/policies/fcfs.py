"""First come, first served; the latest arrival is preempted first."""

from __future__ import annotations

from collections.abc import Sequence

from ifb_handler.engine.policies.base import Ordering
from ifb_handler.engine.prefix_cache import PrefixCache
from ifb_handler.engine.request import Request


class FirstComeFirstServed(Ordering):
    def in_order(self, waiting: Sequence[Request], cache: PrefixCache | None) -> Sequence[Request]:
        return waiting
