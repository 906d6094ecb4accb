"""One iteration as ragged arrays: decode rows and prefill chunks side by side on one flat token axis.

Selective batching (Orca, OSDI 2022): everything but attention sees only the flat axis; attention finds each row's own
pages through its block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.request import Request, RequestState


@dataclass(frozen=True)
class Batch:
    """R rows (one a scheduled request), T tokens, S of the rows sample a token. Plain numpy, on no device.

    requests        the R requests, in the order of the rows
    token_ids       int64 [T]
    positions       int64 [T]
    query_starts    int32 [R + 1]
    context_lens    int32 [R]       with this step's tokens
    block_tables    int32 [R, B]
    slot_mapping    int64 [T]       page * block_size + offset
    sample_rows     int64 [S]       rows whose last pending token is in this step, and padding of a static batch, which
                                    costs what any row costs
    """

    requests: list[Request]
    token_ids: np.ndarray
    positions: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    sample_rows: np.ndarray

    @property
    def sample_tokens(self) -> np.ndarray:
        """int64 [S]: flat index of each sampling row's last token."""
        return self.query_starts[self.sample_rows + 1].astype(np.int64) - 1

    @classmethod
    def build(cls, num_tokens: dict[Request, int], pool: KVPool) -> Batch:
        requests = list(num_tokens)
        counts = np.fromiter(num_tokens.values(), np.int64, len(requests))
        computed = np.fromiter((r.num_computed for r in requests), np.int64, len(requests))
        pending = np.fromiter((r.num_pending for r in requests), np.int64, len(requests))
        padding = np.fromiter((r.state is RequestState.FINISHED for r in requests), bool, len(requests))
        slots = np.fromiter((r.slot for r in requests), np.int64, len(requests))
        query_starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        token_ids = np.empty(query_starts[-1], np.int64)
        for request, start, count in zip(requests, query_starts.tolist(), counts.tolist(), strict=False):
            at = request.num_computed
            token_ids[start : start + count] = request.tokens[at : at + count]
        rows = np.repeat(np.arange(len(requests)), counts)
        positions = np.arange(len(token_ids)) - np.repeat(query_starts[:-1] - computed, counts)
        context_lens = (computed + counts).astype(np.int32)
        block_tables = pool.tables[slots, : pool.pages_for(int(context_lens.max()))]
        pages = block_tables[rows, positions // pool.block_size].astype(np.int64)
        return cls(
            requests=requests,
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            slot_mapping=pages * pool.block_size + positions % pool.block_size,
            sample_rows=np.flatnonzero((counts == pending) | padding),
        )
