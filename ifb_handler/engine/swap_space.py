"""Preemption by swapping: a request's pages move to host memory and back, instead of being computed again (vLLM).

What is cheaper is decided for each preemption by what was measured: seconds to prefill a token against seconds to move
a page there and back.
"""

from __future__ import annotations

MODES = ("auto", "recompute", "swap")

# Until something has been measured: a token costs a millisecond, and a page moves at a few gigabytes a second.
_SECONDS_PER_TOKEN = 1e-3
_SECONDS_PER_PAGE = 2e-4
_MEMORY = 0.9  # weight of the past in the running means


class SwapSpace:
    """The books of `num_pages` host pages, and the two running means that decide."""

    def __init__(self, num_pages: int, mode: str = "auto") -> None:
        self.num_pages = num_pages
        self._mode = mode
        self._free = list(range(num_pages))
        self._left: list[int] = []
        self._seconds_per_token = _SECONDS_PER_TOKEN
        self._seconds_per_page = _SECONDS_PER_PAGE

    def worth_it(self, num_tokens: int, num_pages: int) -> bool:
        """Whether to move `num_pages` rather than compute their `num_tokens` tokens again; they must fit, too."""
        if self._mode == "recompute" or not 0 < num_pages <= len(self._free):
            return False
        there_and_back = 2 * num_pages * self._seconds_per_page
        return self._mode == "swap" or there_and_back < num_tokens * self._seconds_per_token

    def take(self, num_pages: int) -> list[int]:
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        return pages

    def leave(self, pages: list[int]) -> None:
        """The pages are read in this step: until the next they are nobody's."""
        self._left.extend(pages)

    def next_step(self) -> None:
        self._free.extend(self._left)
        self._left.clear()

    def measured(self, seconds: float, num_tokens: int = 0, num_pages: int = 0) -> None:
        """What a step took to prefill `num_tokens`, or to move `num_pages` one way."""
        if num_tokens:
            self._seconds_per_token = _MEMORY * self._seconds_per_token + (1 - _MEMORY) * seconds / num_tokens
        if num_pages:
            self._seconds_per_page = _MEMORY * self._seconds_per_page + (1 - _MEMORY) * seconds / num_pages

    def check(self, held: list[int]) -> None:
        """Prove that free + held = total; `held` are the pages of the swapped requests. Else RuntimeError."""
        if sorted([*self._free, *self._left, *held]) != list(range(self.num_pages)):
            raise RuntimeError("swap space: a page is lost, or held twice")
