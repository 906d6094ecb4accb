"""What the engine asks of whatever computes the next tokens: a model, or a cost model in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from ifb_handler.engine.batch import Batch


class Executor(ABC):
    """Runs one batch at a time.

    num_blocks              pages in the pool
    max_model_len           most tokens of a sequence, prompt and answer together
    vocab_size              width of the logits
    max_num_batched_tokens  the step's token budget that suits it, where the configuration names none
    eos_token_ids           token ids that end an answer
    sliding_window          how many positions back any layer sees, itself included; None where one sees all
    max_shared_prompt_len   the keys and values of longer prompts depend on the prompt's length, so that only those of
                            one length can share pages; None: they never do
    weight_bytes            memory of the weights
    pool_bytes              memory of the pool's pages
    device_type             `cpu`: it computes on the cores that all else runs on, too; or `cuda`
    dtype                   of the hidden states: float32, bfloat16 or float16
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None
    max_shared_prompt_len: int | None = None
    weight_bytes: int = 0
    pool_bytes: int = 0
    device_type: str = "cpu"
    dtype: str = "float32"

    @abstractmethod
    def execute(self, batch: Batch) -> torch.Tensor:
        """Write the batch's keys and values to their pages -> logits, float32 [S, V], of the rows that sample."""

    @abstractmethod
    def logits_at(self, places: np.ndarray) -> torch.Tensor:
        """Logits, float32 [N, V], after tokens of the batch last executed: int64 [N], of its `logit_tokens`."""

    def execute_draft(self, batch: Batch) -> torch.Tensor | None:
        """As `execute`, on the draft model, whose pages have the same numbers; None if no row samples."""
        raise RuntimeError(f"{type(self).__name__} has no draft model")

    def allocate_swap_space(self, num_bytes: int) -> int:
        """Set memory of the host aside for pages -> how many it holds; 0 where swapping is not supported."""
        return 0

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages of keys and values from the pool to host pages, (from, to), all layers."""
        raise RuntimeError(f"{type(self).__name__} has no swap space")

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy host pages back to the pool, (from, to)."""
        raise RuntimeError(f"{type(self).__name__} has no swap space")

    @abstractmethod
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages of keys and values, (from, to), all layers. Every page is read before any is written."""

    def is_usable(self) -> bool:
        """Asked after a step has failed: whether another may succeed."""
        return True

    def take_seconds(self) -> dict[str, float]:
        """Seconds by section since the last call (`gemm`, `attention`); empty where nothing is measured."""
        return {}
