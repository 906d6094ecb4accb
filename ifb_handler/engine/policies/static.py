"""Request-level batching, as Hugging Face `generate` or TorchServe's own batchSize do it: kept for comparison.

A batch is formed when nothing runs, and none joins until all of it have ended. A row that has ended goes on as padding.
"""

from __future__ import annotations

from ifb_handler.engine.policies.base import Batching


class Static(Batching):
    keeps_ended = True

    def may_admit(self, num_running: int) -> bool:
        return num_running == 0
