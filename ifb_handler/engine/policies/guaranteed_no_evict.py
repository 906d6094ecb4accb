"""Admit only what can run to its end beside all that run: none is ever preempted (TensorRT-LLM's policy of that name).

Unlike `max_length` reservation it only counts: pages are taken as they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.policies.base import Capacity
from ifb_handler.engine.request import Request


class GuaranteedNoEvict(Capacity):
    def fits(self, request: Request, missing: int, available: int, running: Sequence[Request], pool: KVPool) -> bool:
        needed = sum(r.num_pages(r.max_len, pool) for r in (*running, request))
        return needed <= pool.num_blocks
