"""Proposers that know the answers, or never do; a speculator that tries whatever they say; a core to run them in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from recall_executor import VOCAB_SIZE, RecallExecutor, expected_answer

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.ngram_proposer import NgramProposer
from ifb_handler.engine.outputs import RequestOutput
from ifb_handler.engine.proposer import Proposer
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.speculation import Speculator
from ifb_handler.engine.stopping import OutputAssembler

PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=25)


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


def knowing(prompt: Sequence[int] = PROMPT, wrong: float = 0.0) -> KnowingProposer:
    return KnowingProposer(lambda request: expected_answer(prompt, 60), VOCAB_SIZE, wrong)


def make_core(executor: Any = None, **options: Any) -> EngineCore:
    return EngineCore(executor or RecallExecutor(200), EngineConfig(max_num_seqs=8, **options))


def make_request(request_id: str, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> Request:
    text = OutputAssembler(params, eos, params.max_tokens, Detokenizer(Vocabulary(None)))
    return Request(GenerationRequest(request_id, list(prompt), params), int(request_id), params.seed or 0, text)


def run(core: EngineCore, *requests: Request) -> tuple[dict[str, list[RequestOutput]], int]:
    """-> the outputs by request, and the number of steps"""
    for request in requests:
        core.add(request)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    steps = 0
    while core.has_work:
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
        core.check()
        steps += 1
    return outputs, steps


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def deciding(per_token: float, fixed: float = 1.0, sizes: Sequence[int] = (1, 5, 9)) -> Speculator:
    """A speculator that has seen what steps take."""
    speculator = Speculator(NgramProposer(2, 4), 8, KVPool(100, 16, 8, 512))
    for size in itertools.islice(itertools.cycle(sizes), 60):
        speculator.observe(size, fixed + per_token * size)
    return speculator
