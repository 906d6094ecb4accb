"""The fewest tokens still to compute first: prompt to prefill and answer up to max_tokens. Mean latency is least."""

from __future__ import annotations

from collections.abc import Sequence

from ifb_handler.engine.policies.base import Ordering, aged
from ifb_handler.engine.prefix_cache import PrefixCache
from ifb_handler.engine.request import Request


class ShortestJobFirst(Ordering):
    def in_order(self, waiting: Sequence[Request], cache: PrefixCache | None) -> Sequence[Request]:
        return sorted(waiting, key=lambda r: (not aged(r), 0 if aged(r) else r.max_len, r.arrival))
