"""Paged attention on CPU by the native library (`native_attention.cpp`), reading pages where they lie.

Pages are keys [num_blocks, num_kv_heads, head_dim, block_size] and values [num_blocks, num_kv_heads, block_size,
head_dim]; scales of quantized pages are [num_blocks, num_kv_heads, block_size]. A row's result is the same bits whoever
its neighbours are and however its prompt was cut into chunks.
"""

from __future__ import annotations

import ctypes

import torch

from ifb_kernels.backend import AttentionBackend
from ifb_kernels.kv_quantization import QUANTIZED, stored_dtype
from ifb_kernels.layout import LayerKV, RaggedLayout, heads_together, zero_pages
from ifb_kernels.native import DATA_TYPES, PAGE_TYPES


class CpuBackend(AttentionBackend):
    """The C++ kernel, on `torch.get_num_threads()` threads of the native library (`native_threads.h`)."""

    name = "cpu"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

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
        if device.type != "cpu":
            raise ValueError(f"device: the cpu attention backend keeps its pages in main memory, not on {device}")
        if stored_dtype(dtype) not in PAGE_TYPES:
            allowed = ", ".join(map(str, (*DATA_TYPES, *QUANTIZED)))
            raise ValueError(f"dtype: {dtype} pages are not supported on CPU, only {allowed}")
        keys = (num_blocks, num_kv_heads, head_dim, block_size)
        values = (num_blocks, num_kv_heads, block_size, head_dim)
        return zero_pages(num_layers, keys, values, values[:3], dtype, device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
        num_tokens, num_kv_heads, head_dim = keys.shape
        keys, values = heads_together(keys), heads_together(values)
        self._library.ifb_kv_cache_write(
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            pages.keys.data_ptr(),
            pages.values.data_ptr(),
            _address(pages.key_scales),
            _address(pages.value_scales),
            layout.slot_mapping.data_ptr(),
            num_tokens,
            num_kv_heads,
            head_dim,
            pages.keys.shape[3],
            DATA_TYPES[keys.dtype],
            PAGE_TYPES[pages.keys.dtype],
            torch.get_num_threads(),
        )

    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        queries = heads_together(queries)
        output = queries.new_empty(*queries.shape)
        self._library.ifb_paged_attention(
            output.data_ptr(),
            queries.data_ptr(),
            queries.stride(0),
            pages.keys.data_ptr(),
            pages.values.data_ptr(),
            _address(pages.key_scales),
            _address(pages.value_scales),
            layout.query_starts.data_ptr(),
            layout.context_lens.data_ptr(),
            layout.block_tables.data_ptr(),
            layout.block_tables.stride(0),
            len(layout.context_lens),
            queries.shape[1],
            pages.keys.shape[1],
            queries.shape[2],
            pages.keys.shape[3],
            sliding_window or 0,
            scale,
            DATA_TYPES[queries.dtype],
            PAGE_TYPES[pages.keys.dtype],
            torch.get_num_threads(),
        )
        return output


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
