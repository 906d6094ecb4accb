"""What speculative decoding asks of whatever guesses the next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ifb_handler.engine.request import Request


class Proposer(ABC):
    """offers    what it takes to come next in this step, by request; it may be more than is asked for"""

    def __init__(self) -> None:
        self.offers: dict[Request, list[int]] = {}

    @abstractmethod
    def begin(self, most: dict[Request, int]) -> dict[Request, int]:
        """A step of which these requests may be given as many draft tokens -> how many it can propose, if any."""

    @abstractmethod
    def propose(self, wanted: dict[Request, int]) -> dict[Request, list[int]]:
        """So many tokens for each: what it guesses to come next, the likeliest one at every place."""
