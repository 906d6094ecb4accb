"""Guessing ahead changes how long an answer takes and nothing else."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from recall_executor import VOCAB_SIZE, RecallExecutor, SpreadExecutor, expected_answer
from speculators import GREEDY, PROMPT, KnowingProposer, knowing, make_core, make_request, run, speculate, tokens

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.outputs import FinishReason
from ifb_handler.engine.request import Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.speculation import accepted


def test_right_drafts_bring_several_tokens_a_step() -> None:
    core = make_core()
    speculate(core, knowing(), most=5)
    outputs, _ = run(core, make_request("0", PROMPT, GREEDY))
    assert tokens(outputs["0"]) == expected_answer(PROMPT, 25)
    assert [len(output.token_ids) for output in outputs["0"]] == [1, 6, 6, 6, 6]
    assert outputs["0"][-1].num_generated_tokens == 25
    assert (core.stats().spec_decode_num_draft_tokens, core.stats().spec_decode_num_accepted_tokens) == (20, 20)
    assert core.stats().generation_tokens == 25


def test_wrong_drafts_cost_no_step_and_leave_no_page() -> None:
    core = make_core(RecallExecutor(200, 4), block_size=4)
    speculate(core, knowing(wrong=1.0), most=9)
    request = make_request("0", PROMPT, GREEDY)
    core.add(request)
    answer: list[int] = []
    for _ in range(25):
        answer += tokens(core.step().outputs)
        core.check()
        if request.slot is not None:
            assert core.pool.num_pages[request.slot] == core.pool.pages_for(request.num_computed)
    assert answer == expected_answer(PROMPT, 25)
    assert not core.has_work
    assert core.stats().spec_decode_num_accepted_tokens == 0


@pytest.mark.parametrize("end", range(2, 9))
def test_an_answer_ends_at_its_end_of_sequence_in_the_midst_of_what_was_accepted(end: int) -> None:
    answer = expected_answer(PROMPT, 9)
    assert len(set(answer)) == 9
    core = make_core(RecallExecutor(200, eos=[answer[end]]))
    speculate(core, knowing())
    outputs, _ = run(core, make_request("0", PROMPT, GREEDY, eos=[answer[end]]))
    assert tokens(outputs["0"]) == answer[: end + 1]
    assert outputs["0"][-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_an_answer_ends_at_max_tokens_and_nothing_is_drafted_beyond(max_tokens: int) -> None:
    core = make_core()
    speculate(core, knowing())
    outputs, _ = run(core, make_request("0", PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens)))
    assert tokens(outputs["0"]) == expected_answer(PROMPT, max_tokens)
    assert outputs["0"][-1].finish_reason is FinishReason.LENGTH
    assert core.stats().spec_decode_num_draft_tokens <= max(0, max_tokens - 2)


def test_logprobs_are_those_without_speculation_one_for_each_token() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=25, logprobs=3)
    executor = SpreadExecutor(200)
    plain, _ = run(make_core(executor), make_request("0", PROMPT, params))
    core = make_core(executor)
    speculate(core, KnowingProposer(lambda request: tokens(plain["0"]), VOCAB_SIZE, wrong=0.2))
    outputs, steps = run(core, make_request("0", PROMPT, params))
    assert steps < 25
    assert tokens(outputs["0"]) == tokens(plain["0"])
    for output in outputs["0"]:
        assert [told.token_id for told in output.logprobs] == output.token_ids
    told = [one for output in outputs["0"] for one in output.logprobs]
    assert told == [one for output in plain["0"] for one in output.logprobs]


DRAWN = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 4: -100.0}, "min_tokens": 12},
    {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 5, 8, 13, 21]},
    {"temperature": 0.0, "min_tokens": 20},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.8, "bad_words": ((7, 8), (9,))},
]


@pytest.mark.parametrize("settings", DRAWN, ids=lambda settings: "-".join(settings))
@pytest.mark.parametrize("wrong", [0.2, 1.0])
def test_a_seeded_request_draws_the_same_tokens_with_speculation_and_without(
    settings: dict[str, Any], wrong: float
) -> None:
    params = SamplingParams(seed=11, max_tokens=40, **settings)
    executor = SpreadExecutor(400, eos=[17])
    plain, _ = run(make_core(executor), make_request("0", PROMPT, params, eos=[17]))
    core = make_core(executor)
    speculate(core, KnowingProposer(lambda request: tokens(plain["0"]), VOCAB_SIZE, wrong))
    neighbours = [make_request(str(i), [i] * 5, SamplingParams(seed=i, max_tokens=30)) for i in range(1, 4)]
    outputs, _ = run(core, make_request("0", PROMPT, params, eos=[17]), *neighbours)
    assert tokens(outputs["0"]) == tokens(plain["0"])


class FewTokens(RecallExecutor):
    """Five tokens, their logits a function of the whole context."""

    def __init__(self) -> None:
        super().__init__(2000, block_size=4, max_model_len=64)
        self.vocab_size = 5

    def logits_after(self, context: np.ndarray) -> torch.Tensor:
        number = int(np.dot(context + 1, 7 ** np.arange(len(context))))
        return torch.tensor([1.5 * math.sin(number + 2.0 * token) for token in range(5)])


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_drawn_answers_keep_the_distribution_of_the_model_by_chi_square(top_p: float) -> None:
    """The first draft token is often right, so that all of accepting, refusing and the token after both are in it."""
    executor, samples, length, prompt = FewTokens(), 4000, 3, [1, 2]
    core = EngineCore(executor, EngineConfig(block_size=4, max_num_seqs=64, enable_prefix_caching=False))
    likeliest = [int(executor.logits_after(np.array([*prompt, i])).argmax()) for i in range(5)]

    def drafts(request: Request) -> list[int]:
        return [0, likeliest[request.tokens[2]] if request.num_generated else 0, 3]

    speculate(core, KnowingProposer(drafts, 5), most=2)
    requests = [
        make_request(str(i), prompt, SamplingParams(temperature=1.0, top_p=top_p, max_tokens=length, seed=i))
        for i in range(samples)
    ]
    for request in requests:
        core.add(request)
    seen: dict[tuple[int, ...], int] = {}
    while core.has_work:
        core.step()
    for request in requests:
        answer = tuple(request.tokens[2:])
        seen[answer] = seen.get(answer, 0) + 1
    expected = {}
    for answer in itertools.product(range(5), repeat=length):
        chances = [_filtered(executor.logits_after(np.array([*prompt, *answer[:i]])), top_p) for i in range(length)]
        expected[answer] = samples * math.prod(float(p[t]) for p, t in zip(chances, answer, strict=True))
    assert core.stats().spec_decode_num_accepted_tokens > samples / 4
    assert core.stats().spec_decode_num_draft_tokens > 1.5 * core.stats().spec_decode_num_accepted_tokens
    assert all(expected[answer] > 0 for answer in seen)
    assert _chi_square(seen, expected) > 1e-3


def _filtered(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The oracle's own nucleus: the likeliest tokens until their sum reaches top_p."""
    probs, order = logits.double().softmax(-1).sort(descending=True)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)
    return torch.zeros(5, dtype=torch.float64).scatter(0, order, probs / probs.sum())


def _chi_square(seen: dict[Any, int], expected: dict[Any, float]) -> float:
    """The probability of counts at least as far from what was expected; small cells are taken together."""
    large = [cell for cell, count in expected.items() if count >= 5]
    counts = [(seen.get(cell, 0), expected[cell]) for cell in large]
    rest = sum(expected.values()) - sum(count for _, count in counts)
    if rest >= 5:
        counts.append((sum(seen.values()) - sum(count for count, _ in counts), rest))
    statistic = sum((count - e) ** 2 / e for count, e in counts)
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_a_place_without_usable_logits_ends_the_request_there_and_not_before() -> None:
    answer = expected_answer(PROMPT, 20)

    class Breaking(RecallExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            logits = super().logits_after(context)
            return logits * torch.nan if len(context) == len(PROMPT) + 4 else logits

    core = make_core(Breaking(200))
    speculate(core, knowing())
    outputs, _ = run(core, make_request("0", PROMPT, GREEDY))
    assert tokens(outputs["0"]) == answer[:4]
    assert outputs["0"][-1].finish_reason is FinishReason.ERROR
    assert "NaN" in outputs["0"][-1].error


def test_pages_of_accepted_tokens_are_found_in_the_prefix_cache_and_those_of_refused_ones_never() -> None:
    executor = RecallExecutor(200, 4)
    for wrong in (0.0, 0.5, 1.0):
        core = make_core(executor, block_size=4)
        speculate(core, knowing(wrong=wrong))
        run(core, make_request("0", PROMPT, SamplingParams(temperature=0.0, max_tokens=26)))
        turn = [*PROMPT, *expected_answer(PROMPT, 26), 1]
        core.speculator = None
        outputs, _ = run(core, make_request("1", turn, GREEDY))
        assert outputs["1"][0].num_cached_tokens == 28, "all but the last token of the first answer has been computed"
        assert tokens(outputs["1"]) == expected_answer(turn, 25)


def test_as_many_are_accepted_as_agree_from_the_first_on() -> None:
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == 1
    assert accepted([], [1]) == 0
