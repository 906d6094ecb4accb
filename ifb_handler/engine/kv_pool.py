"""The paged KV pool's books: which page is free, who owns the others, and each running sequence's block table.

The one owner of KV memory, after PagedAttention (Kwon et al., SOSP 2023). It counts pages; the tensors behind them are
the executor's. A running sequence holds a *slot*, its row of the block tables.

A page is in one of three states, and free + cached + used = total:
    used      owned by one or more slots (`ref_counts`)
    cached    owned by none, but the prefix cache still knows what is in it (`in_cache`): taken when no free one is left
    free      neither

Where every layer attends to a sliding window only (Mistral), a sequence gives back the pages that none of its tokens to
come can see: a token at position p sees positions p - window + 1 to p. However long it is, it then holds no more than
a window and a step's chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class KVPool:
    """`num_blocks` pages of `block_size` tokens for at most `max_num_seqs` sequences of at most `max_len` tokens.

    window       how many positions back a token sees, itself included; None: all of them
    tables       int32 [max_num_seqs, ceil(max_len / block_size)]: physical page by slot and logical page; a slot holds
                 entries `first_page[slot]` to `num_pages[slot]` - 1 of its row, the others are any page's
    first_page   int32 [max_num_seqs]: how many pages of each slot's beginning its window has left behind
    num_pages    int32 [max_num_seqs]: pages of each slot, those left behind included
    ref_counts   int32 [num_blocks]: slots that own each page
    in_cache     bool [num_blocks]: pages whose contents the prefix cache can give to another sequence
    reclaim      set by the prefix cache: gives up that many of its pages, all cached ones if need be (see `uncache`)
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_len: int,
        window: int | None = None,
        max_chunk: int | None = None,
    ) -> None:
        """`max_chunk`: most tokens of a sequence that a step computes; None: all of a prompt."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.max_sequence_len = min(max_len, num_blocks * block_size)
        self._most_pages: int | None = None  # that a sequence of any length holds at a time
        if window is not None and max_chunk is not None and self._pages_across(window) <= num_blocks:
            self.max_sequence_len = max_len
            self._most_pages = min(num_blocks, self._pages_across(window - 1 + max_chunk))
        self.tables = np.zeros((max_num_seqs, -(-max_len // block_size)), np.int32)
        self.first_page = np.zeros(max_num_seqs, np.int32)
        self.num_pages = np.zeros(max_num_seqs, np.int32)
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.in_cache = np.zeros(num_blocks, bool)
        self.num_cached = 0
        self.reclaim: Callable[[int], None] = lambda count: None
        # Stacks: the page and the slot given back last are taken first, so that memory in the cache is used again.
        self._free_pages = list(range(num_blocks - 1, -1, -1))
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Pages that a sequence can be given: the free and the cached ones."""
        return len(self._free_pages) + self.num_cached

    def num_available_beside(self, pages: list[int]) -> int:
        """As `num_available`, once `pages` are in use."""
        return self.num_available - int((self.ref_counts[pages] == 0).sum())

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pages_of(self, slot: int) -> np.ndarray:
        """int32: the pages that the slot holds, a view."""
        return self.tables[slot, self.first_page[slot] : self.num_pages[slot]]

    def _pages_across(self, num_tokens: int) -> int:
        """Pages that so many tokens in a row touch at most."""
        return self.pages_for(num_tokens - 1) + 1

    def most_pages(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` needs at the time when it needs most."""
        pages = self.pages_for(num_tokens)
        return pages if self._most_pages is None else min(pages, self._most_pages)

    def pages_ahead(self, first_page: int, num_tokens: int) -> int:
        """`num_pages` of a sequence of `num_tokens` that needs none before `first_page`, and holds all it can use."""
        return min(self.pages_for(num_tokens), first_page + self.most_pages(num_tokens))

    def first_visible_page(self, position: int) -> int:
        """The first page that the token at `position`, or any after it, sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def open(self) -> int:
        """Take a slot with no pages. Never more than `max_num_seqs` are open."""
        return self._free_slots.pop()

    def adopt(self, slot: int, pages: list[int], first_page: int = 0) -> None:
        """Make `slot`, which has none, an owner of computed pages: those of its sequence from `first_page` on."""
        self.num_cached -= int((self.ref_counts[pages] == 0).sum())
        self.ref_counts[pages] += 1
        self.tables[slot, first_page : first_page + len(pages)] = pages
        self.first_page[slot] = first_page
        self.num_pages[slot] = first_page + len(pages)

    def extend(self, slot: int, num_tokens: int) -> bool:
        """Give `slot` the pages to hold `num_tokens` in all. False, and nothing changed, if too few are available."""
        held = int(self.num_pages[slot])
        wanted = self.pages_for(num_tokens)
        missing = wanted - held
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if missing > len(self._free_pages):
            self.reclaim(missing - len(self._free_pages))
        pages = self._free_pages[-missing:]
        del self._free_pages[-missing:]
        self.tables[slot, held:wanted] = pages
        self.ref_counts[pages] = 1
        self.num_pages[slot] = wanted
        return True

    def shrink(self, slot: int, num_pages: int) -> None:
        """Take from `slot` the pages that it holds beyond the first `num_pages`, in which nothing is of use."""
        held = int(self.num_pages[slot])
        if held > num_pages:
            self._disown(self.tables[slot, num_pages:held])
            self.num_pages[slot] = num_pages

    def fork(self, slot: int, num_tokens: int) -> tuple[int, list[tuple[int, int]]]:
        """Open a slot that begins with the first `num_tokens` tokens of `slot`, whose keys and values are computed.

        -> the slot, and what is to be copied for it, (from, to). Full pages are shared; one that is partly filled goes
        on differently in each, and there must be a page available for its copy.
        """
        first, full = int(self.first_page[slot]), num_tokens // self.block_size
        fork = self.open()
        self.adopt(fork, self.tables[slot, first:full].tolist(), first)
        if not self.extend(fork, num_tokens):
            raise RuntimeError("KV pool: no page for a copy-on-write")
        last = slice(full, self.num_pages[fork])
        return fork, list(zip(self.tables[slot, last].tolist(), self.tables[fork, last].tolist(), strict=True))

    def slide(self, slot: int, position: int) -> list[int]:
        """Give back what the token at `position`, the slot's next, does not see -> the pages that were given back."""
        first, visible = int(self.first_page[slot]), self.first_visible_page(position)
        pages = self.tables[slot, first:visible].copy()
        if pages.size:
            self._disown(pages)
            self.first_page[slot] = visible
        return pages.tolist()

    def replace(self, slot: int, index: int, page: int) -> None:
        """Own `page`, which holds the same, in place of the slot's page number `index`."""
        old = int(self.tables[slot, index])
        self.num_cached -= int(self.ref_counts[page] == 0)
        self.ref_counts[page] += 1
        self.tables[slot, index] = page
        self._disown(np.array([old]))

    def close(self, slot: int) -> np.ndarray:
        """Give the slot back, and every page that has no other owner. -> the pages that it held"""
        pages = self.pages_of(slot).copy()
        self._disown(pages)
        self.first_page[slot] = self.num_pages[slot] = 0
        self._free_slots.append(slot)
        return pages

    def _disown(self, pages: np.ndarray) -> None:
        self.ref_counts[pages] -= 1
        left = pages[self.ref_counts[pages] == 0]
        cached = self.in_cache[left]
        self.num_cached += int(cached.sum())
        self._free_pages.extend(left[~cached].tolist())

    def cache(self, page: int) -> None:
        """Keep what is in `page`, which a slot owns, when its owners have gone."""
        self.in_cache[page] = True

    def uncache(self, page: int) -> None:
        """Forget what is in `page`, which is cached: it is free now."""
        self.in_cache[page] = False
        self.num_cached -= 1
        self._free_pages.append(page)

    def check(self) -> None:
        """Prove that free + cached + used = total and each page has the owners its count says; else RuntimeError."""
        owners = np.zeros(self.num_blocks, np.int32)
        for slot, (first, end) in enumerate(zip(self.first_page, self.num_pages, strict=True)):
            np.add.at(owners, self.tables[slot, first:end], 1)
        free = np.zeros(self.num_blocks, bool)
        free[self._free_pages] = True
        if len(self._free_pages) != int(free.sum()):
            raise RuntimeError("KV pool: a page is twice in the free list")
        if wrong := np.flatnonzero(owners != self.ref_counts).tolist():
            raise RuntimeError(f"KV pool: owner counts differ from the tables at pages {wrong}")
        if wrong := np.flatnonzero(free != ((owners == 0) & ~self.in_cache)).tolist():
            raise RuntimeError(f"KV pool: pages are free and owned or cached, or none of these: {wrong}")
        if self.num_cached != int(((owners == 0) & self.in_cache).sum()):
            raise RuntimeError(f"KV pool: {self.num_cached} is not the number of cached pages")
        if self.num_pages[self._free_slots].any() or len(set(self._free_slots)) != len(self._free_slots):
            raise RuntimeError("KV pool: a free slot holds pages, or is free twice")
