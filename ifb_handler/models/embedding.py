"""The embedding table, kept as the checkpoint stores it and widened row by row as tokens are looked up."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Embedding:
    """token ids, int64 [T] -> [T, hidden_size] in `dtype`.

    A table may stay in the checkpoint's narrower form (bfloat16, or the bytes of a quantized GGUF tensor): each row
    that is looked up is widened exactly as the whole table would have been. On a CPU the output projection keeps its
    own packed copy of a tied table, so the table for lookups is an extra that should be small: for SmolLM2's Q8_0 table
    30 MB where float32 takes 113 MB.
    """

    def __init__(
        self, table: torch.Tensor, dtype: torch.dtype, widen: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """`table` [vocab, ...]. `widen` turns rows of it [T, ...] into float32 [T, hidden_size]; None: they are so."""
        self.table = table
        self.dtype = dtype
        self._widen = widen

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self.table[token_ids]
        if self._widen is not None:
            rows = self._widen(rows)
        return rows.to(self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.table.numel() * self.table.element_size()
