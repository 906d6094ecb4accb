"""Pages as they are needed (PagedAttention, SOSP 2023): one more every block_size steps."""

from __future__ import annotations

from ifb_handler.engine.policies.base import KVReservation
from ifb_handler.engine.request import Request


class OnDemand(KVReservation):
    def num_tokens(self, request: Request) -> int:
        return len(request.tokens)
