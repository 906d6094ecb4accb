"""Admit while there are pages; whoever runs out of them preempts another (TensorRT-LLM's MAX_UTILIZATION; vLLM)."""

from __future__ import annotations

from collections.abc import Sequence

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.policies.base import Capacity
from ifb_handler.engine.request import Request


class MaxUtilization(Capacity):
    def fits(self, request: Request, missing: int, available: int, running: Sequence[Request], pool: KVPool) -> bool:
        # A page for each running sequence is left: else a full pool would admit a request only to preempt it soon.
        return not running or missing <= available - len(running)
