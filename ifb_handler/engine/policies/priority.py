"""By `priority`, the lower value first (vLLM's meaning), then by arrival; the least important is preempted first."""

from __future__ import annotations

from collections.abc import Sequence

from ifb_handler.engine.policies.base import Ordering, aged
from ifb_handler.engine.prefix_cache import PrefixCache
from ifb_handler.engine.request import Request


class Priority(Ordering):
    def in_order(self, waiting: Sequence[Request], cache: PrefixCache | None) -> Sequence[Request]:
        return sorted(waiting, key=lambda r: (not aged(r), 0 if aged(r) else r.priority, r.arrival))

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=lambda r: (r.priority, r.arrival))
