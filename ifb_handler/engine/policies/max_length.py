"""Pages for the longest answer at once (Orca, OSDI 2022): nobody is preempted, and most of the pages are never used."""

from __future__ import annotations

from ifb_handler.engine.policies.base import KVReservation
from ifb_handler.engine.request import Request


class MaxLength(KVReservation):
    def num_tokens(self, request: Request) -> int:
        return request.max_len
