"""Automatic prefix caching: a radix tree over full pages, so that a prompt's known beginning is not computed again.

RadixAttention (Zheng et al., SGLang, NeurIPS 2024) at the grain of a page; vLLM's automatic prefix caching with a tree
for its hash table. A path from a root spells a sequence, one page of tokens an edge; each node names the page that
holds the keys and values of its edge's tokens after that path.

Who owns what: the pool owns the pages and counts the sequences that use them; the tree only remembers what is in a
page whose contents are computed. A page that no sequence uses stays until the pool has no free one left (`reclaim`):
then the leaf that was used least recently goes first. A sequence owns all pages of its path, so beneath an idle page
there are idle ones only, and a page in use is never reclaimed.

Where attention slides (`KVPool.window`) a page is of use without those before it, if only a window's width of them is
there. Then any idle page may go, and a node whose page is gone stays as long as others hang on it. What a request
leaves behind is idle, and can be found until it is reclaimed.

While a request computes its prompt, the pages to come stand in the tree as *pending* nodes. Another request that needs
them waits for them in the queue rather than compute the same.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.request import Request


class Node:
    """page     where the edge's keys and values are; None while `pending`, or when a sliding window's were reclaimed
    pending     the request that is computing them
    used        the cache's clock when its page was last given up by a sequence
    guests      how many running requests have this as the last node that they know
    writers     those of them that are filling the page after this one
    """

    __slots__ = ("children", "guests", "key", "page", "parent", "pending", "used", "writers")

    def __init__(self, parent: Node | None, key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Hashable, Node] = {}
        self.page: int | None = None
        self.pending: Request | None = None
        self.used = 0
        self.guests = 0
        self.writers: set[Request] = set()

    def child(self, key: Hashable) -> Node:
        """The node at the end of the edge `key`, made if there is none."""
        if key not in self.children:
            self.children[key] = Node(self, key)
        return self.children[key]


class Prefix(NamedTuple):
    """What the cache knows of a sequence's beginning.

    depth         full pages that need not be computed
    pages         those of them, the last ones, that what follows can see; their contents are known
    tail          a page whose first `num_tail` tokens come next; to be copied, since it goes on differently
    tail_owner    whose page that is: a node, which may lose it, or a running request
    """

    depth: int
    pages: list[int]
    tail: int | None = None
    num_tail: int = 0
    tail_owner: Node | Request | None = None

    @property
    def has_tail(self) -> bool:
        """Whether the tail is (still) there."""
        gone = isinstance(self.tail_owner, Node) and self.tail_owner.page != self.tail
        return self.tail is not None and not gone

    @property
    def first_page(self) -> int:
        """How many pages at the beginning are not needed."""
        return self.depth - len(self.pages)


NOTHING = Prefix(0, [])
# Of the pages that follow another, as many are compared with what is wanted: a comparison costs microseconds.
_MOST_COMPARED = 16


class PrefixCache:
    """The tree. `queries` and `hits` count prompt tokens looked up and found, as vLLM's metrics do."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self._slides = pool.window is not None
        self._roots: dict[Hashable, Node] = {}  # by Request.cache_namespace: nothing is shared between them
        self._nodes: list[Node | None] = [None] * pool.num_blocks  # by page
        self._idle: list[tuple[int, int, Node]] = []  # a heap of leaves, with some that have changed since
        self._clock = 0
        self.queries = 0
        self.hits = 0
        pool.reclaim = self._reclaim

    def match(self, request: Request) -> Prefix | None:
        """What is known of the request's tokens; None: what it needs next is being computed by another, wait for it.

        At least one token is left to compute, since the last one's logits are wanted; all of them, if all logits are.
        """
        if request.needs_prompt_logits:
            return NOTHING if request.first is None else None
        node = parent = self._roots.get(request.cache_namespace)
        found: list[int | None] = []
        depth = present_from = 0
        for key in self._keys(request, 0, (len(request.tokens) - 1) // self._block_size):
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            if node.pending is not None:
                return None
            found.append(node.page)
            if node.page is None:
                present_from = len(found)
            if present_from <= self._first_visible(len(found)):
                depth, parent = len(found), node
        pages = found[self._first_visible(depth) : depth]
        return Prefix(depth, pages, *self._longest_beginning(request, parent, depth * self._block_size))

    def _first_visible(self, depth: int) -> int:
        """The first page that what follows `depth` pages can see."""
        return self._pool.first_visible_page(depth * self._block_size)

    def _longest_beginning(
        self, request: Request, parent: Node | None, start: int
    ) -> tuple[int | None, int, Node | Request | None]:
        """The page after `parent` that begins most like the request's tokens from `start` on -> a Prefix's tail.

        It is a full page in the tree, or one that a running request is filling (another answer to the same prompt).
        """
        wanted = request.tokens[start : min(start + self._block_size, len(request.tokens) - 1)]
        if not wanted or parent is None:
            return None, 0, None
        best: tuple[int | None, int, Node | Request | None] = (None, 0, None)
        for key, child in islice(parent.children.items(), _MOST_COMPARED):
            if child.page is not None and (common := _common(wanted, array("q", key))) > best[1]:
                best = child.page, common, child
        for writer in islice(parent.writers, _MOST_COMPARED):
            common = _common(wanted, writer.tokens[start : writer.num_computed])
            if common > best[1]:
                best = int(self._pool.tables[writer.slot, start // self._block_size]), common, writer
        return best

    def start(self, request: Request, known: Prefix, num_cached: int) -> None:
        """The request, just admitted with `num_cached` tokens of `known`, will compute the rest of its full pages."""
        if request.times.scheduled is None:  # not when it comes back from preemption
            self.queries += len(request.tokens)
            self.hits += num_cached
            request.num_cached_tokens = num_cached
        node = self._roots.setdefault(request.cache_namespace, Node(None, request.cache_namespace))
        for key in self._keys(request, 0, known.depth):
            node = node.child(key)
        node.guests += 1
        request.cache_node, request.cache_depth = node, known.depth
        for key in self._keys(request, known.depth, len(request.tokens) // self._block_size):
            child = node.children.get(key)
            # Under a page that the request does not own none can hang, but where a window slides.
            if child is not None and (child.pending is not None or not self._slides):
                break
            node = node.child(key)
            if node.page is None:
                node.pending = request

    def computed(self, request: Request) -> None:
        """Remember the pages that the request has filled since the last call; cheap when there is none."""
        full = request.num_computed // self._block_size
        request.cache_node.writers.add(request)  # not before its first step: until then its pages may be empty
        if full <= request.cache_depth:
            return
        pages = self._pool.tables[request.slot, request.cache_depth : full].tolist()
        node = request.cache_node
        for index, key in enumerate(self._keys(request, request.cache_depth, full)):
            child = node.child(key)
            if child.page is None:
                child.page, child.pending = pages[index], None
                self._nodes[child.page] = child
                self._pool.cache(child.page)
            else:  # another has computed the same meanwhile: one page is enough
                self._pool.replace(request.slot, request.cache_depth + index, child.page)
            node = child
        self._leave(request)
        node.guests += 1
        node.writers.add(request)
        request.cache_node, request.cache_depth = node, full

    def given_up(self, pages: Sequence[int]) -> None:
        """A request has given up `pages`, which follow one another in its sequence; the last of them goes first."""
        for page in reversed(pages):
            node = self._nodes[page]
            if node is not None:
                self._clock += 1
                node.used = self._clock
                self._offer(node)

    def stop(self, request: Request, pages: list[int]) -> None:
        """The request no longer runs and has given up `pages`: what it has not computed, it will not."""
        self.given_up(pages)
        node = request.cache_node
        for key in self._keys(request, request.cache_depth, len(request.tokens) // self._block_size):
            child = node.children.get(key)
            if child is None or child.pending not in (request, None):
                break
            node = child
            node.pending = None
        self._leave(request)
        self._tidy(node)
        request.cache_node, request.cache_depth = None, 0

    def fork(self, request: Request, row: Request) -> None:
        """`row` goes on from what the request has computed, beside it."""
        row.cache_node, row.cache_depth = request.cache_node, request.cache_depth
        row.cache_node.guests += 1

    def hand_over(self, request: Request, row: Request) -> None:
        """`row` goes on with the request's pages, all of which are computed."""
        row.cache_node, row.cache_depth = request.cache_node, request.cache_depth
        request.cache_node.writers.discard(request)
        request.cache_node, request.cache_depth = None, 0

    @staticmethod
    def _leave(request: Request) -> None:
        request.cache_node.guests -= 1
        request.cache_node.writers.discard(request)

    def _tidy(self, node: Node) -> None:
        """Take out the nodes, from `node` up, that say nothing any more and lead nowhere; what is a leaf now may go."""
        while node.page is None and node.pending is None and not node.children and not node.guests:
            if node.parent is None:
                self._roots.pop(node.key, None)
                return
            del node.parent.children[node.key]
            node = node.parent
        self._offer(node)

    def _keys(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        size = self._block_size
        return (request.tokens[i * size : (i + 1) * size].tobytes() for i in range(first, last))

    def _offer(self, node: Node) -> None:
        """If nothing keeps the node's page, put it where `_reclaim` looks."""
        if node.page is not None and self._may_go(node, node.page):
            heapq.heappush(self._idle, (node.used, node.page, node))
            if len(self._idle) > 4 * self._pool.num_blocks:
                self._idle = [entry for entry in set(self._idle) if self._is_idle(*entry)]
                heapq.heapify(self._idle)

    def _is_idle(self, used: int, page: int, node: Node) -> bool:
        """Whether an entry of the heap is still true: the node may have been used, extended or reclaimed since."""
        return self._nodes[page] is node and node.used == used and self._may_go(node, page)

    def _may_go(self, node: Node, page: int) -> bool:
        return (self._slides or not node.children) and not self._pool.ref_counts[page]

    def _reclaim(self, count: int) -> None:
        """Free `count` pages, the least recently used first. The pool asks for no more than are cached."""
        while count:
            used, page, node = heapq.heappop(self._idle)
            if not self._is_idle(used, page, node):
                continue  # when it is idle again it is put here again
            self._nodes[page] = node.page = None
            self._pool.uncache(page)
            self._tidy(node)
            count -= 1

    def check(self) -> None:
        """Prove that tree and pool agree; else RuntimeError."""
        seen = 0
        todo = list(self._roots.values())
        idle = {id(node) for used, page, node in self._idle if self._is_idle(used, page, node)}
        while todo:
            node = todo.pop()
            for key, child in node.children.items():
                todo.append(child)
                if child.parent is not node or child.key != key:
                    raise RuntimeError("prefix cache: a node is not where its parent says")
                if any(writer.cache_node is not child or writer.slot is None for writer in child.writers):
                    raise RuntimeError("prefix cache: a page is filled by a request that does not run there")
                if child.pending is not None and (child.page is not None or child.pending.slot is None):
                    raise RuntimeError("prefix cache: a page is waited for that is there, or that nobody computes")
                if child.page is None:
                    if child.pending is None and not (self._slides and (child.children or child.guests)):
                        raise RuntimeError("prefix cache: a node says nothing and leads nowhere")
                    if not self._slides and any(below.page is not None for below in child.children.values()):
                        raise RuntimeError("prefix cache: a page is computed beneath one that is not")
                    continue
                seen += 1
                if self._nodes[child.page] is not child or not self._pool.in_cache[child.page]:
                    raise RuntimeError("prefix cache: the pool does not know a page as cached")
                if self._may_go(child, child.page) and id(child) not in idle:
                    raise RuntimeError("prefix cache: an idle page cannot be reclaimed")
                owners = self._pool.ref_counts[child.page]
                if not self._slides and node.page is not None and owners > self._pool.ref_counts[node.page]:
                    raise RuntimeError("prefix cache: a page is in use whose forerunner is not")
        if seen != int(self._pool.in_cache.sum()):
            raise RuntimeError("prefix cache: the pool holds pages that no path reaches")


def _common(first: array[int], second: array[int]) -> int:
    """How many tokens the two have in common from their beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
