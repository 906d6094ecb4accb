"""Prompts before answers (early vLLM, TGI): the best time to first token, and answers that stall while prompts come in.

Where prompts are not cut into chunks, a step is either prefill or decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ifb_handler.engine.policies.base import PrefillPriority

if TYPE_CHECKING:
    from ifb_handler.engine.scheduler import Schedule, Scheduler


class PrefillFirst(PrefillPriority):
    def fill(self, scheduler: Scheduler, step: Schedule) -> None:
        scheduler.prefill(step)
        scheduler.admit(step)
        if scheduler.policies.enable_chunked_prefill or not step.num_tokens:
            scheduler.decode(step)
