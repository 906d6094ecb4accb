"""A brute-force model of the prefix cache: a dictionary of every full-page prefix that was computed and not reclaimed.

It listens at the doors of cache and pool, and holds whatever they answer against itself. A sliding window must show
something of the page before it: it is of 2 tokens or more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.prefix_cache import Prefix
from ifb_handler.engine.request import Request

Known = tuple[Hashable, tuple[int, ...]]


class RadixModel:
    """pages     by namespace and tokens from the beginning on, a multiple of the page's: where the last page is
    given_up    by page: when a sequence last gave it up
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.pages: dict[Known, int] = {}
        self.given_up: dict[int, int] = {}
        self.num_hits = self.num_reclaimed = 0
        self._clock = 0
        self._size = core.pool.block_size
        cache, pool = core.cache, core.pool
        self._match, self._computed, self._given_up = cache.match, cache.computed, cache.given_up
        self._uncache = pool.uncache
        cache.match, cache.computed, cache.given_up = self.match, self.computed, self.gave_up
        pool.uncache = self.reclaimed

    def match(self, request: Request) -> Prefix | None:
        found = self._match(request)
        if found is None:
            assert self._is_being_computed(request), "waits for what nobody computes"
            return found
        if request.needs_prompt_logits:
            assert found.depth == 0
            return found
        depth, pages = self._longest(request)
        assert found.depth == depth
        assert list(found.pages) == pages
        self.num_hits += found.depth
        wanted = request.tokens[depth * self._size : -1].tolist()
        known = request.cache_namespace, tuple(request.tokens[: depth * self._size])
        beside = [prefix[-self._size :] for space, prefix in self.pages if (space, prefix[: -self._size]) == known]
        best = max((_num_common(wanted, tokens) for tokens in beside), default=0)
        assert found.num_tail >= best, "a page that begins alike was not found"
        return found

    def computed(self, request: Request) -> None:
        self._computed(request)
        pool = self.core.pool
        first, full = int(pool.first_page[request.slot]), request.num_computed // self._size
        for index, known in enumerate(self._prefixes(request, full)):
            if index >= first:
                page = int(pool.tables[request.slot, index])
                assert self.pages.setdefault(known, page) == page, "the same tokens in two pages"

    def gave_up(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._clock += 1
            self.given_up[page] = self._clock
        self._given_up(pages)

    def reclaimed(self, page: int) -> None:
        self.num_reclaimed += 1
        pool = self.core.pool
        (known,) = [prefix for prefix, at in self.pages.items() if at == page]
        assert not pool.ref_counts[page], "a page in use is reclaimed"
        inner = {(space, tokens[: -self._size]) for space, tokens in self.pages} if pool.window is None else set()
        assert known not in inner, "not a leaf"
        leaves = [at for prefix, at in self.pages.items() if prefix not in inner and not pool.ref_counts[at]]
        assert self.given_up[page] == min(self.given_up[at] for at in leaves), "not the least recently used"
        del self.pages[known]
        self._uncache(page)

    def check(self) -> None:
        """The tree says what the dictionary says, and the pages hold the tokens that both say they do."""
        found: dict[Known, int] = {}
        todo = [(root, (space, ())) for space, root in self.core.cache._roots.items()]
        while todo:
            node, (space, tokens) = todo.pop()
            for key, child in node.children.items():
                known = space, (*tokens, *memoryview(key).cast("q"))
                todo.append((child, known))
                if child.page is not None:
                    found[known] = child.page
        assert found == self.pages
        memory = self.core.executor.memory.reshape(-1, self._size)
        for (_, tokens), page in self.pages.items():
            assert memory[page].tolist() == list(tokens[-self._size :]), "a cached page was overwritten"

    def _prefixes(self, request: Request, count: int) -> list[Known]:
        tokens = tuple(request.tokens)
        return [(request.cache_namespace, tokens[: (i + 1) * self._size]) for i in range(count)]

    def _longest(self, request: Request) -> tuple[int, list[int]]:
        """The most pages of which all that what follows can see are there."""
        prefixes = self._prefixes(request, (len(request.tokens) - 1) // self._size)
        window = self.core.pool.window
        for depth in range(len(prefixes), -1, -1):
            first = 0 if window is None else max(0, depth * self._size - window + 1) // self._size
            seen = [self.pages.get(known) for known in prefixes[first:depth]]
            if None not in seen:
                return depth, seen
        raise AssertionError("nothing is always known")

    def _is_being_computed(self, request: Request) -> bool:
        wanted = request.tokens.tolist()
        for other in self.core.scheduler.running:
            same = other is not request and other.cache_namespace == request.cache_namespace
            common = _num_common(wanted[:-1], other.tokens.tolist()) // self._size * self._size
            if same and other.num_computed < common:
                return True
        return False


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
