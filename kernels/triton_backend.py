"""Paged attention on a GPU by the Triton kernels; on CPU only inside Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import torch

from ifb_kernels.backend import AttentionBackend
from ifb_kernels.layout import LayerKV, RaggedLayout, heads_together, zero_pages
from ifb_kernels.triton_kv_cache_write import kv_cache_write
from ifb_kernels.triton_paged_attention import paged_attention


class TritonBackend(AttentionBackend):
    """Pages are [num_blocks, num_kv_heads, block_size, head_dim], keys and values alike; scales lack the last axis."""

    name = "triton"

    def allocate(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[LayerKV]:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return zero_pages(num_layers, shape, shape, shape[:3], dtype, device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
        kv_cache_write(heads_together(keys), heads_together(values), pages, layout)

    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        return paged_attention(heads_together(queries), pages, layout, scale, sliding_window)
