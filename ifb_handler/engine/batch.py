"""One iteration as ragged arrays: decode rows and prefill chunks side by side on one flat token axis.

Selective batching (Orca, OSDI 2022): everything but attention sees only the flat axis; attention finds each row's own
pages through its block table. Draft tokens (`speculation.py`) follow a request's own on the same axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.request import Request, RequestState

_NO_DRAFTS: Mapping[Request, Sequence[int]] = MappingProxyType({})


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
                                    costs what any row costs; a row with d draft tokens stands here 1 + d times
    sample_tokens   int64 [S]       flat index of the token after which each of them samples
    """

    requests: list[Request]
    token_ids: np.ndarray
    positions: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    sample_rows: np.ndarray
    sample_tokens: np.ndarray

    @property
    def logit_tokens(self) -> np.ndarray:
        """The tokens after which logits may be asked for, rising: those that sample; all, for a prompt's logprobs."""
        prompts = any(request.needs_prompt_logits for request in self.requests)
        return np.arange(len(self.token_ids)) if prompts else self.sample_tokens

    @classmethod
    def build(
        cls, num_tokens: dict[Request, int], pool: KVPool, drafts: Mapping[Request, Sequence[int]] = _NO_DRAFTS
    ) -> Batch:
        """A step of so many of each request's pending tokens; `drafts`: what some of them go on with."""
        texts, num_sampled = [], []
        for request, count in num_tokens.items():
            draft = drafts.get(request, ())
            last = count == request.num_pending or request.state is RequestState.FINISHED
            num_sampled.append(1 + len(draft) if last else 0)
            text = request.tokens[request.num_computed : request.num_computed + count]
            text.extend(draft)
            texts.append(text)
        return cls.ragged(list(num_tokens), [r.num_computed for r in num_tokens], texts, num_sampled, pool)

    @classmethod
    def ragged(
        cls,
        requests: list[Request],
        starts: Sequence[int],
        texts: Sequence[Sequence[int]],
        num_sampled: Sequence[int],
        pool: KVPool,
    ) -> Batch:
        """Of each request the tokens `texts`, the first at the position `starts`; the last `num_sampled` sample."""
        counts = np.fromiter(map(len, texts), np.int64, len(requests))
        computed = np.array(starts, np.int64)
        slots = np.fromiter((r.slot for r in requests), np.int64, len(requests))
        query_starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        token_ids = np.empty(query_starts[-1], np.int64)
        for text, start in zip(texts, query_starts.tolist(), strict=False):
            token_ids[start : start + len(text)] = text
        rows = np.repeat(np.arange(len(requests)), counts)
        positions = np.arange(len(token_ids)) - np.repeat(query_starts[:-1] - computed, counts)
        context_lens = (computed + counts).astype(np.int32)
        block_tables = pool.tables[slots, : pool.pages_for(int(context_lens.max()))]
        pages = block_tables[rows, positions // pool.block_size].astype(np.int64)
        places = np.array(num_sampled, np.int64)
        sample_rows = np.repeat(np.arange(len(requests)), places)
        from_end = np.repeat(np.cumsum(places), places) - np.arange(len(sample_rows))
        return cls(
            requests=requests,
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
            slot_mapping=pages * pool.block_size + positions % pool.block_size,
            sample_rows=sample_rows,
            sample_tokens=query_starts[sample_rows + 1] - from_end,
        )
