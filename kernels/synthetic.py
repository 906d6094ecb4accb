"""Random ragged batches over a filled pool, for the tests and the bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ifb_kernels.backend import AttentionBackend
from ifb_kernels.layout import LayerKV, RaggedLayout

# A page that no pool has: what block tables hold past a row's end, so that reading it fails loudly.
_NO_PAGE = 2**30


@dataclass(frozen=True)
class SyntheticBatch:
    """Rows of (query tokens, context tokens), with their pages scattered over the pool.

    keys, values    [S, num_kv_heads, head_dim]  of every context token of every row
    queries         [T, num_heads, head_dim]     the last query tokens of each row
    history         the layout that writes all S tokens
    step            the layout of the T query tokens
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    history: RaggedLayout
    step: RaggedLayout
    block_size: int
    num_blocks: int

    def fill(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> LayerKV:
        """A pool of one layer with every context token written; what is not written is NaN (or wild codes)."""
        num_kv_heads, head_dim = self.keys.shape[1:]
        dtype = dtype or self.keys.dtype
        (pages,) = backend.allocate(
            1, self.num_blocks, self.block_size, num_kv_heads, head_dim, dtype, self.queries.device
        )
        for tensor in pages.tensors():
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in every float; a quantized page's scale is one
        backend.write(self.keys, self.values, pages, self.history)
        return pages

    def give_back(self, pages: LayerKV, sliding_window: int) -> None:
        """Overwrite, as `fill` does, the pages that none of the step's queries sees: they are somebody else's now."""
        first_queries = self.step.context_lens - self.step.query_starts.diff()
        for table, position in zip(self.step.block_tables, first_queries.tolist(), strict=True):
            hidden = table[: max(0, position - sliding_window + 1) // self.block_size].long()
            for tensor in pages.tensors():
                tensor.view(torch.uint8)[hidden] = 0xFF

    def attend(self, backend: AttentionBackend, pages: LayerKV, sliding_window: int | None = None) -> torch.Tensor:
        """Attention of the step's queries over `pages`."""
        return backend.attend(self.queries, pages, self.step, self.queries.shape[2] ** -0.5, sliding_window)


def synthetic_batch(
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> SyntheticBatch:
    """A batch of `rows` (query tokens, context tokens), seeded. Lies in main memory."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(pages_of) + 2
    free = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(rows), max(pages_of) + 2), _NO_PAGE, dtype=torch.int32)
    taken = 0
    for row, count in enumerate(pages_of):
        tables[row, :count] = free[taken : taken + count]
        taken += count

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_tokens, num_keys = sum(query for query, _ in rows), sum(context for _, context in rows)
    return SyntheticBatch(
        keys=normal(num_keys, num_kv_heads, head_dim),
        values=normal(num_keys, num_kv_heads, head_dim),
        queries=normal(num_tokens, num_heads, head_dim),
        history=_layout([(context, context) for _, context in rows], tables, block_size),
        step=_layout(rows, tables, block_size),
        block_size=block_size,
        num_blocks=num_blocks,
    )


def of_every_magnitude(head_dim: int, dtype: torch.dtype = torch.float32) -> SyntheticBatch:
    """One row whose heads' channels range over 20 powers of two, with heads of zeros, of ties, of one large value."""
    batch = synthetic_batch([(1, 40)], num_heads=2, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for tokens in (batch.keys, batch.values):
        tokens *= torch.exp2(torch.randint(-14, 6, tokens.shape, generator=generator))
        tokens[0] = 0.0
        tokens[1] = torch.arange(head_dim) - head_dim / 2 + 0.5
        tokens[1, :, 0] = 127.0  # scale 1 in int8: every other channel lies between two codes
        tokens[2] = 1e-3
        tokens[2, :, 0] = 1e4
        tokens[3] *= 1e-30
    return batch


def _layout(rows: Sequence[tuple[int, int]], tables: torch.Tensor, block_size: int) -> RaggedLayout:
    slots = []
    for table, (query_len, context_len) in zip(tables, rows, strict=True):
        positions = torch.arange(context_len - query_len, context_len)
        slots.append(table[positions // block_size].long() * block_size + positions % block_size)
    starts = torch.tensor([0, *(query_len for query_len, _ in rows)]).cumsum(0)
    return RaggedLayout(
        query_starts=starts.to(torch.int32),
        context_lens=torch.tensor([context_len for _, context_len in rows], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        max_query_len=max(query_len for query_len, _ in rows),
        max_context_len=max(context_len for _, context_len in rows),
    )
