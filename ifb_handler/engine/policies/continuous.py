"""Iteration-level scheduling (Orca, OSDI 2022): a request joins at any step and leaves the moment it ends."""

from __future__ import annotations

from ifb_handler.engine.policies.base import Batching


class Continuous(Batching):
    keeps_ended = False

    def may_admit(self, num_running: int) -> bool:
        return True
