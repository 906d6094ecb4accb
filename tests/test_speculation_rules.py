"""What is drafted, and what is not: drafts only where they pay, and never at another request's cost."""

from __future__ import annotations

import numpy as np
import torch
from recall_executor import VOCAB_SIZE, RecallExecutor, expected_answer
from speculators import (
    GREEDY,
    PROMPT,
    EagerSpeculator,
    KnowingProposer,
    deciding,
    knowing,
    make_request,
    run,
    speculate,
    tokens,
)

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.kv_pool import KVPool
from ifb_handler.engine.ngram_proposer import NgramProposer
from ifb_handler.engine.request import Request, RequestState
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.scheduler import Schedule
from ifb_handler.engine.speculation import Acceptance, Speculator


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
