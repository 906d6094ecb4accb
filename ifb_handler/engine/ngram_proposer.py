"""Prompt lookup: the answer goes on as the text did where its last few tokens stood before.

Saxena, "Prompt Lookup Decoding" (2023); the `ngram` method of vLLM. It costs nothing but a few dictionary look-ups, and
pays where an answer repeats its prompt or itself: summaries, edits of code, retrieved documents, lists.
"""

from __future__ import annotations

from ifb_handler.engine.proposer import Proposer
from ifb_handler.engine.request import Request


class NgramIndex:
    """Where each n-gram of a request's tokens was last followed by another token.

    Cost of a token: `longest - shortest + 1` entries, whatever the length of the text.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[bytes, int] = {}
        self._known = 0  # n-grams that end at or before this token are in there

    def propose(self, request: Request, most: int) -> list[int]:
        """The `most` tokens after the latest place where the longest n-gram at the text's end, that is known, stood."""
        tokens, length = request.tokens, len(request.tokens)
        ends = self._ends
        for end in range(self._known + 1, length):
            for size in self._sizes:
                if size <= end:
                    ends[tokens[end - size : end].tobytes()] = end
        self._known = max(self._known, length - 1)
        for size in self._sizes:
            if size <= length and (end := ends.get(tokens[length - size :].tobytes())) is not None:
                proposed = tokens[end : end + most].tolist()
                while len(proposed) < most:  # the text has come round: so may what follows it
                    proposed.append(proposed[end - length])
                return proposed
        return []


class NgramProposer(Proposer):
    def __init__(self, shortest: int, longest: int) -> None:
        """n-grams of `shortest` to `longest` tokens are looked for."""
        super().__init__()
        self._shortest, self._longest = shortest, longest

    def start(self, request: Request) -> None:
        if request.proposer is None:
            request.proposer = NgramIndex(self._shortest, self._longest)

    def begin(self, most: dict[Request, int]) -> dict[Request, int]:
        self.offers.clear()
        for request, count in most.items():
            if offer := request.proposer.propose(request, count):
                self.offers[request] = offer
        return {request: len(offer) for request, offer in self.offers.items()}

    def propose(self, wanted: dict[Request, int], num_tokens: dict[Request, int]) -> dict[Request, list[int]]:
        return {request: self.offers[request][:count] for request, count in wanted.items()}
