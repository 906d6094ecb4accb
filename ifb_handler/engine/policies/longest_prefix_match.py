"""Cache-aware ordering (SGLang): the request that finds most of its prompt in the prefix cache first.

Those with a prefix in common then run together, before their pages are reclaimed. One that waits for a prefix that is
just being computed comes last. With a long queue the look-ups cost more than they give, and it is first come, first
served.
"""

from __future__ import annotations

from collections.abc import Sequence

from ifb_handler.engine.policies.base import Ordering, aged
from ifb_handler.engine.prefix_cache import PrefixCache
from ifb_handler.engine.request import Request

_LONG_QUEUE = 128


class LongestPrefixMatch(Ordering):
    def in_order(self, waiting: Sequence[Request], cache: PrefixCache | None) -> Sequence[Request]:
        if cache is None or len(waiting) > _LONG_QUEUE:
            return waiting
        return sorted(waiting, key=lambda r: (not aged(r), 0 if aged(r) else -_num_known(cache, r), r.arrival))


def _num_known(cache: PrefixCache, request: Request) -> int:
    known = cache.match(request)
    return -1 if known is None else known.depth
