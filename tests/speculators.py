"""Proposers that know the answers, or that never do, and a speculator that tries whatever they say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.proposer import Proposer
from ifb_handler.engine.request import Request
from ifb_handler.engine.speculation import Speculator


class KnowingProposer(Proposer):
    """Proposes what `answers` says of a request: its whole answer. A share of the tokens is made wrong."""

    def __init__(self, answers: Callable[[Request], Sequence[int]], vocab_size: int, wrong: float = 0.0) -> None:
        super().__init__()
        self._answers = answers
        self._vocab_size = vocab_size
        self._wrong = wrong
        self._random = random.Random(0)

    def start(self, request: Request) -> None:
        """There is nothing to prepare."""

    def begin(self, most: dict[Request, int]) -> dict[Request, int]:
        self.offers = {
            request: [
                (token + (self._random.random() < self._wrong)) % self._vocab_size
                for token in self._answers(request)[request.num_generated :][:count]
            ]
            for request, count in most.items()
        }
        return {request: len(offer) for request, offer in self.offers.items() if offer}

    def propose(self, wanted: dict[Request, int], num_tokens: dict[Request, int]) -> dict[Request, list[int]]:
        return {request: self.offers[request][:count] for request, count in wanted.items()}


class EagerSpeculator(Speculator):
    """Drafts all that is offered, whatever it costs, as far as the budget goes."""

    def _choose(self, offered: dict[Request, int], num_tokens: int, budget: int) -> dict[Request, int]:
        wanted = {}
        for request, count in offered.items():
            if count := min(count, budget):
                wanted[request] = count
                budget -= count
        return wanted


def speculate(core: EngineCore, proposer: Proposer, most: int = 5) -> Speculator:
    core.speculator = EagerSpeculator(proposer, most, core.pool)
    return core.speculator
