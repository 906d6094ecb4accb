"""Stall-free scheduling (Sarathi-Serve, OSDI 2024; FastGen's SplitFuse): every running answer gets its token.

What is left of the budget goes to running prefills, then to new requests, so a step is never longer than its budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifb_handler.engine.policies.base import PrefillPriority

if TYPE_CHECKING:
    from ifb_handler.engine.scheduler import Schedule, Scheduler


class DecodeFirst(PrefillPriority):
    def fill(self, scheduler: Scheduler, step: Schedule) -> None:
        scheduler.decode(step)
        scheduler.prefill(step)
        scheduler.admit(step)
