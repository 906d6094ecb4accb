"""The budget of a step follows what steps take."""

from __future__ import annotations

import random

import pytest
from recall_executor import RecallExecutor, expected_answer
from test_engine_invariants import queue

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.latency_target import LEAST_CHUNK, LatencyTarget


@pytest.mark.parametrize(("fixed", "per_token"), [(0.010, 0.001), (0.0, 0.002), (0.030, 0.0005)])
def test_it_finds_the_budget_whose_step_takes_nine_tenths_of_the_target(fixed: float, per_token: float) -> None:
    target = LatencyTarget(0.1, most=512)
    source = random.Random(0)
    for _ in range(300):
        tokens = min(target.budget(num_decoding=4), source.choice([4, 4, 20, 300]))
        target.observe(tokens, (fixed + per_token * tokens) * source.uniform(0.98, 1.02))
    assert target.budget(4) == pytest.approx((0.09 - fixed) / per_token, rel=0.15)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    target = LatencyTarget(0.1, most=512)
    budgets = []
    for per_token in (0.0005, 0.002):
        for i in range(200):
            tokens = max(1, min(target.budget(4), (4, 60, 200)[i % 3]))
            target.observe(tokens, 0.01 + per_token * tokens)
        budgets.append(target.budget(4))
    assert budgets[0] > 3 * budgets[1]


def test_decodes_and_a_little_of_a_prompt_always_have_their_place() -> None:
    target = LatencyTarget(0.001, most=256)
    target.observe(100, 5.0)
    assert target.budget(num_decoding=30) == 30 + LEAST_CHUNK


def test_an_unreachable_target_slows_prompts_down_and_stops_nothing() -> None:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, target_itl_ms=1e-6, enable_prefix_caching=False)
    core = EngineCore(RecallExecutor(200), config)
    for i in range(4):
        queue(core, str(i), [i] * 100, 5)
    answers: dict[str, list[int]] = {str(i): [] for i in range(4)}
    while core.has_work:
        result = core.step()
        core.check()
        assert sum(count for _, count in result.record.prefill) <= LEAST_CHUNK
        for output in result.outputs:
            answers[output.request_id] += output.token_ids
    assert answers == {str(i): expected_answer([i] * 100, 5) for i in range(4)}
