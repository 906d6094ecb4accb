"""What speculative decoding asks of whatever guesses the next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ifb_handler.engine.request import Request


class Proposer(ABC):
    """offers             what it takes to come next in this step, by request; it may be more than is asked for
    seconds_per_round    what it takes to propose one more token for each of a few requests
    """

    def __init__(self) -> None:
        self.offers: dict[Request, list[int]] = {}
        self.seconds_per_round = 0.0

    @abstractmethod
    def start(self, request: Request) -> None:
        """The request has just been admitted, perhaps not for the first time."""

    @abstractmethod
    def begin(self, most: dict[Request, int]) -> dict[Request, int]:
        """A step of which these requests may be given as many draft tokens -> how many it can propose, if any."""

    @abstractmethod
    def propose(self, wanted: dict[Request, int], num_tokens: dict[Request, int]) -> dict[Request, list[int]]:
        """So many tokens for each: what it guesses to come next, the likeliest one at every place.

        num_tokens    what the whole step computes: how many tokens of each request
        """
