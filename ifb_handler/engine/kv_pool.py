"""The paged KV pool's books: which page is free, who owns the others, and each running sequence's block table.

The one owner of KV memory, after PagedAttention (Kwon et al., SOSP 2023). It counts pages; the tensors behind them are
the executor's. A running sequence holds a *slot*, its row of the block tables.
"""

from __future__ import annotations

import numpy as np


class KVPool:
    """`num_blocks` pages of `block_size` tokens for at most `max_num_seqs` sequences of at most `max_len` tokens.

    tables       int32 [max_num_seqs, ceil(max_len / block_size)]: physical page by slot and logical page; only the
                 first `num_pages[slot]` entries of a row mean anything
    num_pages    int32 [max_num_seqs]: pages held by each slot
    ref_counts   int32 [num_blocks]: owners of each page, 0 for a free one
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables = np.zeros((max_num_seqs, -(-max_len // block_size)), np.int32)
        self.num_pages = np.zeros(max_num_seqs, np.int32)
        self.ref_counts = np.zeros(num_blocks, np.int32)
        # Stacks: the page and the slot given back last are taken first, so that memory in the cache is used again.
        self._free_pages = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_pages)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free_pages)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self) -> int:
        """Take a slot with no pages. Never more than `max_num_seqs` are open."""
        return self._free_slots.pop()

    def extend(self, slot: int, num_tokens: int) -> bool:
        """Give `slot` the pages to hold `num_tokens` in all. False, and nothing has changed, if too few are free."""
        held = int(self.num_pages[slot])
        wanted = self.pages_for(num_tokens)
        if wanted <= held:
            return True
        missing = wanted - held
        if missing > len(self._free_pages):
            return False
        pages = self._free_pages[-missing:]
        del self._free_pages[-missing:]
        self.tables[slot, held:wanted] = pages
        self.ref_counts[pages] = 1
        self.num_pages[slot] = wanted
        return True

    def close(self, slot: int) -> None:
        """Give the slot back, and every page that has no other owner."""
        pages = self.tables[slot, : self.num_pages[slot]]
        self.ref_counts[pages] -= 1
        self._free_pages.extend(pages[self.ref_counts[pages] == 0].tolist())
        self.num_pages[slot] = 0
        self._free_slots.append(slot)

    def check(self) -> None:
        """Prove that free + used = total and that each page has just the owners its count says; else RuntimeError."""
        owners = np.zeros(self.num_blocks, np.int32)
        for slot, count in enumerate(self.num_pages):
            np.add.at(owners, self.tables[slot, :count], 1)
        free = np.zeros(self.num_blocks, bool)
        free[self._free_pages] = True
        if len(self._free_pages) != int(free.sum()):
            raise RuntimeError("KV pool: a page is twice in the free list")
        if not np.array_equal(owners, self.ref_counts):
            raise RuntimeError(
                f"KV pool: owner counts differ from the tables at pages {np.flatnonzero(owners != self.ref_counts)}"
            )
        if not np.array_equal(free, owners == 0):
            raise RuntimeError(
                f"KV pool: pages neither free nor owned, or both: {np.flatnonzero(free != (owners == 0))}"
            )
        if self.num_pages[self._free_slots].any() or len(set(self._free_slots)) != len(self._free_slots):
            raise RuntimeError("KV pool: a free slot holds pages, or is free twice")
