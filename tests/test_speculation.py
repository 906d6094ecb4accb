"""Guessing ahead changes how long an answer takes and nothing else, and is left off where it does not pay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from recall_executor import VOCAB_SIZE, RecallExecutor, SpreadExecutor, expected_answer
from speculators import EagerSpeculator, KnowingProposer, speculate

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.ngram_proposer import NgramIndex, NgramProposer
from ifb_handler.engine.outputs import FinishReason, RequestOutput
from ifb_handler.engine.request import GenerationRequest, Request, RequestState
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.scheduler import Schedule
from ifb_handler.engine.speculation import Acceptance, Speculator, accepted
from ifb_handler.engine.stopping import OutputAssembler


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


PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=25)


def knowing(prompt: Sequence[int] = PROMPT, wrong: float = 0.0) -> KnowingProposer:
    return KnowingProposer(lambda request: expected_answer(prompt, 60), VOCAB_SIZE, wrong)


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


# The n-grams.


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


# What is drafted, and what is not.


def deciding(per_token: float, fixed: float = 1.0, sizes: Sequence[int] = (1, 5, 9)) -> Speculator:
    """A speculator that has seen what steps take."""
    speculator = Speculator(NgramProposer(2, 4), 8, KVPool(100, 16, 8, 512))
    for size in itertools.islice(itertools.cycle(sizes), 60):
        speculator.observe(size, fixed + per_token * size)
    return speculator


def with_rate(request_id: str, hits: int, trials: int) -> Request:
    request = make_request(request_id, PROMPT, GREEDY)
    request.acceptance = Acceptance()
    for i in range(trials):
        request.acceptance.observe(int(i < hits), 1)
    return request


def test_where_more_tokens_take_no_longer_all_is_tried() -> None:
    request = with_rate("0", 2, 20)
    assert deciding(per_token=0.0)._choose({request: 8}, 1, 100) == {request: 8}


def test_where_every_token_takes_as_long_only_what_is_certain_is_tried() -> None:
    sure, unsure = with_rate("0", 200, 200), with_rate("1", 30, 100)
    wanted = deciding(per_token=0.1, fixed=0.3)._choose({sure: 8, unsure: 8}, 32, 100)
    assert wanted == {sure: wanted[sure]}
    assert wanted[sure] > 0
    assert deciding(per_token=0.1, fixed=0.0)._choose({unsure: 8}, 32, 100) == {}


def test_a_larger_batch_drafts_less() -> None:
    lengths = []
    for size in (1, 4, 16, 64):
        requests = {with_rate(str(i), 60, 100): 8 for i in range(size)}
        lengths.append(sum(deciding(0.1, sizes=(size, size + 8))._choose(requests, size, 1000).values()) / size)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_the_budget_goes_to_the_likeliest() -> None:
    good, bad = with_rate("0", 90, 100), with_rate("1", 10, 100)
    assert deciding(per_token=0.0)._choose({bad: 8, good: 8}, 2, 3) == {good: 3}
    assert deciding(per_token=0.0)._choose({bad: 8, good: 8}, 2, 0) == {}


def test_nothing_is_drafted_before_a_step_has_been_timed() -> None:
    speculator = Speculator(NgramProposer(2, 4), 8, KVPool(100, 16, 8, 512))
    assert speculator._choose({with_rate("0", 9, 10): 8}, 1, 100) == {}


def test_a_request_whose_drafts_fail_stops_and_is_judged_by_what_was_not_drafted() -> None:
    """The n-grams of this text are always wrong; once it repeats itself they are always right."""
    source = np.random.default_rng(3)
    block = source.integers(0, 40, 400).tolist()

    class Text(RecallExecutor):
        def logits_after(self, context: np.ndarray) -> torch.Tensor:
            logits = torch.zeros(VOCAB_SIZE)
            at = len(context) - 1
            logits[block[at] if at < 400 else 50 + at % 5] = 1.0
            return logits

    core = EngineCore(Text(100, max_model_len=1024), EngineConfig(max_num_seqs=1))
    speculator = core.speculator = deciding(per_token=0.2)
    speculator._pool = core.pool
    speculator.observe = lambda *args: None
    request = make_request("0", [50], SamplingParams(temperature=0.0, max_tokens=800))
    core.add(request)
    rates, drafted = [], []
    while core.has_work:
        before, length = speculator.num_draft_tokens, len(request.tokens)
        core.step()
        drafted.append((length, speculator.num_draft_tokens - before))
        if request.acceptance is not None:
            rates.append(request.acceptance.rate)
    assert sum(count for length, count in drafted if 200 < length < 400) < 20
    assert rates[-1] > 0.9
    assert min(rates) < 0.2
    assert core.stats().spec_decode_num_accepted_tokens > 300


def test_drafts_take_no_page_that_another_needs_and_no_one_is_preempted_for_one() -> None:
    prompts = [[i + 1] * 6 for i in range(4)]

    def run_all(drafting: bool) -> EngineCore:
        config = EngineConfig(block_size=4, max_num_seqs=4, enable_prefix_caching=False)
        core = EngineCore(RecallExecutor(8, 4), config)
        if drafting:
            answers = {str(i): expected_answer(prompt, 5) for i, prompt in enumerate(prompts)}
            speculate(core, KnowingProposer(lambda r: answers[r.request_id], VOCAB_SIZE, wrong=1.0), most=9)
        params = SamplingParams(temperature=0.0, max_tokens=5)
        outputs, _ = run(core, *(make_request(str(i), prompt, params) for i, prompt in enumerate(prompts)))
        for i, prompt in enumerate(prompts):
            assert tokens(outputs[str(i)]) == expected_answer(prompt, 5)
        return core

    plain, drafting = run_all(False), run_all(True)
    assert plain.num_preemptions == drafting.num_preemptions > 0
    assert drafting.stats().spec_decode_num_draft_tokens > 0


def test_requests_whose_logits_depend_on_their_answer_are_not_drafted_for() -> None:
    speculator = EagerSpeculator(knowing(), 5, KVPool(100, 16, 8, 512))
    plain = [{}, {"logprobs": 2}, {"logit_bias": {1: 1.0}}, {"min_tokens": 3}, {"allowed_token_ids": [1]}, {"seed": 1}]
    dependent = [{"presence_penalty": 0.5}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.1}]
    dependent.append({"bad_words": ((1, 2),)})
    for settings in (*plain, *dependent):
        request = make_request("0", PROMPT, SamplingParams(max_tokens=9, **settings))
        request.state, request.slot = RequestState.DECODE, 0
        drafts = speculator.draft(Schedule(100, {request: 1}))
        assert bool(drafts) == (settings in plain), settings


def test_as_many_are_accepted_as_agree_from_the_first_on() -> None:
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == 1
    assert accepted([], [1]) == 0
