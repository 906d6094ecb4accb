"""Ways to do paged attention on a CPU that were not chosen, for `bench_alternatives.py` to time beside ours.

They do what the benchmark asks for: float32, no sliding window.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ifb_kernels.backend import AttentionBackend
from ifb_kernels.cpu_backend import CpuBackend
from ifb_kernels.layout import LayerKV, RaggedLayout, zero_pages

_QUERY_BLOCK = 128


class NumbaBackend(CpuBackend):
    """A kernel in Python for numba, over the native kernel's pages: each token and key head is a piece of work."""

    name = "numba"

    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        output = torch.empty_like(queries)
        rows = torch.arange(len(layout.context_lens)).repeat_interleave(layout.query_starts.diff())
        ends = layout.context_lens[rows] - layout.query_starts[rows + 1] + torch.arange(1, len(queries) + 1)
        tensors = (output, queries, pages.keys, pages.values, layout.block_tables, rows, ends)
        _numba_kernel()(*(tensor.numpy() for tensor in tensors), scale)
        return output


@functools.cache
def _numba_kernel() -> Callable[..., None]:
    import numba
    import numpy as np

    numba.set_num_threads(torch.get_num_threads())

    def attend(
        output: np.ndarray,
        queries: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        tables: np.ndarray,
        rows: np.ndarray,
        ends: np.ndarray,
        scale: float,
    ) -> None:
        """`rows` [T]: each token's row of `tables`; `ends` [T]: how many keys it sees."""
        num_kv_heads, head_dim, block_size = keys.shape[1:]
        group = queries.shape[1] // num_kv_heads
        for work in numba.prange(len(queries) * num_kv_heads):
            token, kv_head = work // num_kv_heads, work % num_kv_heads
            table, end = tables[rows[token]], ends[token]
            num_pages = -(-end // block_size)
            scores = np.zeros((group, num_pages * block_size), np.float32)
            for page in range(num_pages):
                block = keys[table[page], kv_head]
                for member in range(group):
                    part = scores[member, page * block_size : (page + 1) * block_size]
                    query = queries[token, kv_head * group + member]
                    for channel in range(head_dim):
                        factor = query[channel] * np.float32(scale)
                        for offset in range(block_size):
                            part[offset] += factor * block[channel, offset]
            result = output[token, kv_head * group : (kv_head + 1) * group]
            result[:] = 0
            sums = np.zeros(group, np.float32)
            for member in range(group):
                largest = scores[member, :end].max()
                for position in range(end):
                    weight = math.exp(scores[member, position] - largest)
                    scores[member, position] = weight
                    sums[member] += weight
            for position in range(end):
                value = values[table[position // block_size], kv_head, position % block_size]
                for member in range(group):
                    weight = scores[member, position]
                    for channel in range(head_dim):
                        result[member, channel] += weight * value[channel]
            for member in range(group):
                result[member] /= sums[member]

    return numba.njit(parallel=True, fastmath=True)(attend)


class FlexBackend(AttentionBackend):
    """FlexAttention, compiled, over pages where they lie: a block mask names each row's, for all layers of a step.

    Decode rows are one call. Rows of several queries are one each: a block of queries is of one row, so a ragged batch
    would have to be padded. It is compiled for each shape: with dynamic ones most of what torch 2.13 writes for a CPU
    does not compile. Slots that are masked out are multiplied by zero, so what is not written must not be NaN.
    """

    name = "flex"

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = 64
        self._attend = torch.compile(flex_attention, dynamic=False)
        self._layout: RaggedLayout | None = None

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
        self._block_size, self._num_blocks = block_size, num_blocks
        shape = (num_kv_heads, num_blocks * block_size, head_dim)
        return zero_pages(num_layers, shape, shape, shape[:2], dtype, device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
        for tokens, stored in ((keys, pages.keys), (values, pages.values)):
            stored.index_copy_(1, layout.slot_mapping, tokens.transpose(0, 1))

    def prepare(self, layout: RaggedLayout) -> None:
        """Block masks for a step's layers: (tokens, query length, mask) of each call."""
        self._layout = layout
        query_lens = layout.query_starts.diff()
        groups = [(query_lens == 1).nonzero().flatten(), *(query_lens > 1).nonzero()]
        self._calls = [(self._tokens(rows), int(query_lens[rows[0]]), self._mask(rows)) for rows in groups if len(rows)]

    def _tokens(self, rows: torch.Tensor) -> torch.Tensor:
        starts, ends = self._layout.query_starts[rows], self._layout.query_starts[rows + 1]
        return torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])

    def _mask(self, rows: torch.Tensor) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        layout, size = self._layout, self._block_size
        query_len = int(layout.query_starts[rows[0] + 1] - layout.query_starts[rows[0]])
        first = (layout.context_lens[rows] - query_len).long()  # position of each row's first query
        blocks = torch.arange(0, query_len, _QUERY_BLOCK)
        whole = (first.unsqueeze(1) + blocks + 1) // size  # pages that all queries of a block see all of
        last = first.unsqueeze(1) + (blocks + _QUERY_BLOCK).clamp(max=query_len) - 1
        some = last // size + 1 - whole
        tables = torch.zeros(len(rows), self._num_blocks, dtype=torch.int64)
        logical = torch.full((len(rows), self._num_blocks), -1, dtype=torch.int64)
        for i, row in enumerate(rows.tolist()):
            pages = -(-int(layout.context_lens[row]) // size)
            tables[i, :pages] = layout.block_tables[row, :pages]
            logical[i, tables[i, :pages]] = torch.arange(pages)
        column = whole.unsqueeze(2) + torch.arange(self._num_blocks)
        partial = tables.unsqueeze(1).expand(-1, len(blocks), -1).gather(2, column.clamp(max=self._num_blocks - 1))

        def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            page = logical[row, slot // size]
            return (page >= 0) & (page * size + slot % size <= first[row] + query)

        return BlockMask.from_kv_blocks(
            some.unsqueeze(1).int(),
            partial.unsqueeze(1).int(),
            whole.unsqueeze(1).int(),
            tables[:, None, None].expand(-1, 1, len(blocks), -1).int(),
            (_QUERY_BLOCK, size),
            visible,
            seq_lengths=(query_len, self._num_blocks * size),
            compute_q_blocks=False,
        )

    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        if layout is not self._layout:
            self.prepare(layout)
        output = torch.empty_like(queries)
        for tokens, query_len, mask in self._calls:
            packed = queries[tokens].unflatten(0, (-1, query_len)).transpose(1, 2)
            keys, values = pages.keys.unsqueeze(0), pages.values.unsqueeze(0)
            attended = self._attend(packed, keys, values, block_mask=mask, scale=scale, enable_gqa=True)
            output[tokens] = attended.transpose(1, 2).flatten(0, 1)
        return output
