"""Presence, frequency and repetition penalties against transformers' processor and OpenAI's formula."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from ifb_handler.engine.penalties import Penalties
from ifb_handler.engine.sampler import Sampler
from ifb_handler.engine.sampling_params import SamplingParams

VOCAB_SIZE = 300


class Text:
    """A request's tokens as the engine keeps them."""

    def __init__(self, num_prompt_tokens: int, num_generated: int, seed: int) -> None:
        source = random.Random(seed)
        # Few different ones, so that many come again.
        self.tokens = array("q", (source.randrange(60) * 5 for _ in range(num_prompt_tokens + num_generated)))
        self.num_prompt_tokens = num_prompt_tokens

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :].tolist()


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def expected(logits: torch.Tensor, text: Text, params: SamplingParams) -> torch.Tensor:
    """Of one row, float64 [V]."""
    logits = logits.double()
    if params.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
        logits = processor(torch.tensor([text.tokens.tolist()]), logits[None])[0]
    counts = torch.bincount(torch.tensor(text.generated, dtype=torch.int64), minlength=VOCAB_SIZE)
    # "mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence": OpenAI's API reference
    return logits - counts * params.frequency_penalty - (counts > 0).double() * params.presence_penalty


EACH = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.5},
    {"frequency_penalty": -2},
    {"presence_penalty": 1.5},
    {"presence_penalty": -0.5},
    {"presence_penalty": 0.9, "frequency_penalty": 0.3},
    {"presence_penalty": -1, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_each_penalty_alone_and_all_together_agree_with_their_definitions(settings: dict) -> None:
    params = SamplingParams(**settings)
    for num_prompt_tokens, num_generated in ((1, 0), (40, 0), (3, 50), (200, 300)):
        text, logits = Text(num_prompt_tokens, num_generated, seed=num_generated), logits_of(1)
        penalties, result = Penalties(1), logits.clone()
        penalties.set(0, params)
        penalties.apply(result, np.array([0]), np.array([0]), [(text.tokens, text.num_prompt_tokens)])
        torch.testing.assert_close(result[0].double(), expected(logits[0], text, params), atol=1e-5, rtol=1e-6)


def test_penalties_grow_token_by_token_in_a_batch_and_plain_neighbours_do_not_change_by_a_bit() -> None:
    params = [SamplingParams(temperature=0.0, **(EACH[i // 2] if i % 2 else {})) for i in range(16)]
    texts = [Text(i + 1, 0, seed=i) for i in range(16)]
    sampler = Sampler(20)
    slots = [19 - i for i in range(16)]
    for slot, one, text in zip(slots, params, texts, strict=True):
        sampler.state.set(slot, one, 0, text.tokens, text.num_prompt_tokens)
    source = random.Random(0)
    for step in range(60):
        logits = logits_of(16, seed=step)
        edited = logits.clone()
        rows = sorted(source.sample(range(16), 9))  # some are not in the step
        edited_rows = edited[rows]
        chosen = sampler.sample(edited_rows, [slots[i] for i in rows], [len(texts[i].generated) for i in rows])
        for row, i in enumerate(rows):
            if i % 2:
                right = expected(logits[i], texts[i], params[i])
                torch.testing.assert_close(edited_rows[row].double(), right, atol=1e-5, rtol=1e-6)
            else:
                assert torch.equal(edited_rows[row], logits[i])
            texts[i].tokens.append(int(chosen[row]))


def test_a_request_that_was_preempted_is_penalised_as_if_it_had_never_stopped() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.6, repetition_penalty=1.2)
    logits = [logits_of(1, seed) for seed in range(40)]

    def answer(preempted_at: set[int]) -> list[int]:
        sampler, text, other = Sampler(2), Text(5, 0, seed=1), Text(90, 90, seed=2)
        slot = 0
        sampler.state.set(slot, params, 0, text.tokens, text.num_prompt_tokens)
        for step, one in enumerate(logits):
            if step in preempted_at:
                slot = 1 - slot
                sampler.state.set(1 - slot, params, 0, other.tokens, other.num_prompt_tokens)
                sampler.sample(one.clone(), [1 - slot], [90])
                sampler.state.set(slot, params, 0, text.tokens, text.num_prompt_tokens)
            text.tokens.append(sampler.sample(one.clone(), [slot], [step]).item())
        return text.generated

    assert answer(set()) == answer({1, 2, 7, 30})


def test_memory_is_taken_only_when_a_request_asks() -> None:
    sampler, text = Sampler(64), Text(100, 0, seed=0)
    sampler.state.set(3, SamplingParams(), 0, text.tokens, 100)
    sampler.sample(logits_of(1), [3], [0])
    assert sampler.state.edits._penalties.ids.nbytes == 0
    sampler.state.set(3, SamplingParams(repetition_penalty=1.1), 0, text.tokens, 100)
    sampler.sample(logits_of(1), [3], [0])
    assert sampler.state.edits._penalties.ids.nbytes > 0


def test_a_positive_penalty_of_two_stops_a_loop_that_greedy_decoding_would_be_caught_in() -> None:
    logits = torch.zeros(1, 10)
    logits[0, :4] = torch.tensor([3.0, 2.9, 2.8, 2.7])
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}):
        sampler, tokens = Sampler(1), array("q", [9])
        sampler.state.set(0, SamplingParams(temperature=0.0, **penalty), 0, tokens, 1)
        for step in range(4):
            tokens.append(sampler.sample(logits.clone(), [0], [step]).item())
        assert tokens.tolist() == [9, 0, 1, 2, 3]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_a_repetition_penalty_at_the_ends_of_its_range_leaves_usable_logits(penalty: float) -> None:
    text = Text(10, 10, seed=0)
    sampler = Sampler(1)
    sampler.state.set(0, SamplingParams(repetition_penalty=penalty), 0, text.tokens, 10)
    assert 0 <= sampler.sample(logits_of(1), [0], [10]).item() < VOCAB_SIZE


def test_forbidden_and_impossible_tokens_stay_so_under_every_penalty() -> None:
    text = Text(30, 30, seed=0)
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, [text.tokens[0], text.tokens[40], 299]] = torch.tensor([1.0, 2.0, -4.0])
    sampler = Sampler(1)
    params = {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 0.1}
    sampler.state.set(0, SamplingParams(**params), 0, text.tokens, 30)
    finite = logits.isfinite()
    sampler.sample(logits, [0], [30])
    assert torch.equal(logits.isfinite(), finite)
