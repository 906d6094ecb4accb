"""Prompt lookup: a text is taken to go on as it went on where its last tokens stood before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from recall_executor import VOCAB_SIZE, RecallExecutor
from speculators import PROMPT, make_core, make_request, run, tokens

from ifb_handler.engine.ngram_proposer import NgramIndex, NgramProposer
from ifb_handler.engine.sampling_params import SamplingParams


def proposals(text: Sequence[int], most: int, shortest: int = 2, longest: int = 3) -> list[int]:
    """All in one go, and the same token by token."""
    params = SamplingParams(max_tokens=100)
    whole = NgramIndex(shortest, longest).propose(make_request("0", text, params), most)
    index, request = NgramIndex(shortest, longest), make_request("0", text[:1], params)
    for token in text[1:]:
        index.propose(request, most)
        request.tokens.append(token)
    assert index.propose(request, most) == whole
    return whole


def test_the_text_goes_on_as_where_its_end_stood_before() -> None:
    assert proposals([1, 2, 3, 4, 5, 9, 2, 3], 3) == [4, 5, 9]
    assert proposals([1, 2, 3], 3) == []
    assert proposals([7, 3, 4, 3], 3) == [], "one token is not enough"
    assert proposals([7, 3, 4, 3], 3, shortest=1) == [4, 3, 4]


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert proposals([1, 2, 3, 10, 8, 2, 3, 11, 1, 2, 3], 1) == [10]
    assert proposals([1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3], 1) == [11]


def test_what_comes_round_is_taken_to_go_on_coming_round() -> None:
    assert proposals([4, 5, 6, 4, 5, 6, 4, 5], 7) == [6, 4, 5, 6, 4, 5, 6]
    assert proposals([9, 4, 4, 4], 5) == [4, 4, 4, 4, 4]


def test_random_texts_are_searched_as_by_hand() -> None:
    source = np.random.default_rng(0)
    for _ in range(200):
        text = source.integers(0, 4, source.integers(1, 30)).tolist()
        expected: list[int] = []
        for size in (3, 2):
            places = [i + size for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
            if places and size <= len(text):
                expected = text[places[-1] : places[-1] + 2]
                break
        assert proposals(text, 2)[: len(expected)] == expected


def test_a_repeating_answer_takes_fewer_steps_by_default_rules() -> None:
    class Repeating(RecallExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            logits = torch.zeros(VOCAB_SIZE)
            logits[len(context) % 6] = 1.0
            return logits

    params = SamplingParams(temperature=0.0, max_tokens=120)
    core = make_core(Repeating(200), speculative_method="ngram")
    assert isinstance(core.speculator.proposer, NgramProposer)
    core.speculator.observe = lambda num_tokens, _: core.speculator._step_time.observe(num_tokens, 1.0)
    outputs, _ = run(core, make_request("0", PROMPT, params))
    assert tokens(outputs["0"]) == [i % 6 for i in range(3, 123)]
    assert core.stats().spec_decode_num_accepted_tokens > 40
