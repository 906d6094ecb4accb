"""An executor without a model: where a decoder keeps keys and values it keeps token ids, and reads them all back.

The next token is a hash of the whole context as found through the block tables. A page that was lost, shared by
mistake, overwritten or read too early changes the answer, and `expected_answer` says what the answer must be.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from ifb_handler.engine.batch import Batch
from ifb_handler.engine.executor import Executor

VOCAB_SIZE = 89


def next_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(context, np.int64).tobytes()) % VOCAB_SIZE


def expected_answer(
    prompt: Sequence[int], num_tokens: int, eos: Sequence[int] = (), window: int | None = None
) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context if window is None else context[-window:]))
        if context[-1] in eos:
            break
    return context[len(prompt) :]


class RecallExecutor(Executor):
    """`sliding_window`: it reads no more than so many tokens back, as a decoder does whose layers all slide."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 512,
        eos: Sequence[int] = (),
        sliding_window: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.max_num_batched_tokens = 256
        self.eos_token_ids = tuple(eos)
        self.sliding_window = sliding_window
        self.memory = np.full(num_blocks * block_size, -1, np.int64)
        self.draft_memory = self.memory.copy()
        self.fail_next = False

    def allocate_swap_space(self, num_bytes: int) -> int:
        num_pages = num_bytes >> 20  # as if a page were a MiB
        self.hosts = [np.full((num_pages, self.block_size), -1, np.int64) for _ in range(2)]
        return num_pages

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        source, target = np.array(pairs).T
        for host, pages in zip(self.hosts, self.pages(), strict=True):
            host[target] = pages[source]

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        source, target = np.array(pairs).T
        for host, pages in zip(self.hosts, self.pages(), strict=True):
            pages[target] = host[source]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        source, target = np.array(pairs).T
        for pages in self.pages():
            pages[target] = pages[source]

    def pages(self) -> list[np.ndarray]:
        """The model's and the draft model's."""
        return [memory.reshape(self.num_blocks, self.block_size) for memory in (self.memory, self.draft_memory)]

    def forget(self, pages: np.ndarray) -> None:
        """Overwrite what is in `pages`, as whoever is given them next may."""
        for memory in self.pages():
            memory[pages] = -2

    def execute(self, batch: Batch) -> torch.Tensor:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("asked to fail")
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping), "two tokens in one place"
        self.memory[batch.slot_mapping] = batch.token_ids
        self.batch = batch
        return self.logits_at(batch.sample_tokens)

    def execute_draft(self, batch: Batch) -> torch.Tensor:
        """The draft model says what the model itself would, of what it finds in its own memory."""
        self.draft_memory[batch.slot_mapping] = batch.token_ids
        return self._logits(batch, batch.sample_tokens, self.draft_memory)

    def logits_at(self, places: np.ndarray) -> torch.Tensor:
        return self._logits(self.batch, places, self.memory)

    def _logits(self, batch: Batch, places: np.ndarray, memory: np.ndarray) -> torch.Tensor:
        logits = torch.zeros(len(places), self.vocab_size)
        for i, place in enumerate(places.tolist()):
            row = int(np.searchsorted(batch.query_starts, place, side="right")) - 1
            length = int(batch.positions[place]) + 1
            pages = batch.block_tables[row, : -(-length // self.block_size)]
            slots = (pages[:, None] * self.block_size + np.arange(self.block_size)).ravel()[:length]
            logits[i] = self.logits_after(memory[slots[-(self.sliding_window or length) :]])
        return logits

    def logits_after(self, context: np.ndarray) -> torch.Tensor:
        """float32 [V]"""
        logits = torch.zeros(VOCAB_SIZE)
        logits[next_token(context)] = 1.0
        return logits


class SpreadExecutor(RecallExecutor):
    """Logits drawn from the whole context, none of them alike; an eighth of the tokens is impossible."""

    def logits_after(self, context: np.ndarray) -> torch.Tensor:
        draw = torch.Generator().manual_seed(zlib.crc32(np.asarray(context, np.int64).tobytes()))
        logits = torch.randn(VOCAB_SIZE, generator=draw) * 2
        logits[torch.rand(VOCAB_SIZE, generator=draw) < 1 / 8] = -torch.inf
        return logits
