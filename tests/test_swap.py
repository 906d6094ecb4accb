"""Preemption by swapping: what was computed comes back from host memory instead of being computed again."""

from __future__ import annotations

import pytest
from recall_executor import RecallExecutor, expected_answer
from test_engine_invariants import queue

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.request import Request
from ifb_handler.engine.swap_space import SwapSpace

BLOCK_SIZE = 4


def run_three(num_host_pages: int, mode: str = "swap") -> tuple[EngineCore, int]:
    """Three requests in a pool that holds two. -> the core and the tokens that were computed in prefills"""
    executor = RecallExecutor(16, BLOCK_SIZE)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        enable_prefix_caching=False,
        swap_space=num_host_pages / 1024,
        preemption_mode=mode,
    )
    core = EngineCore(executor, config)
    prompts = {str(i): [i + 1] * 9 for i in range(3)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 24)
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    prefilled = 0
    while core.has_work:
        result = core.step()
        core.check()
        prefilled += sum(count for _, count in result.record.prefill)
        for output in result.outputs:
            answers[output.request_id] += output.token_ids
    assert core.num_preemptions > 0
    assert answers == {request_id: expected_answer(prompt, 24) for request_id, prompt in prompts.items()}
    return core, prefilled


def test_a_swapped_request_goes_on_where_it_was() -> None:
    core, prefilled = run_three(num_host_pages=20)
    assert core.num_swapped_pages > 0
    assert prefilled <= 3 * 9 + core.num_preemptions, "no more than the token that was next"
    _, recomputed = run_three(num_host_pages=20, mode="recompute")
    assert recomputed > prefilled


def test_without_room_in_the_swap_space_it_is_computed_again() -> None:
    core, _ = run_three(num_host_pages=1)
    assert core.num_swapped_pages == 0


def test_a_swapped_request_that_is_cancelled_gives_its_host_pages_back() -> None:
    executor = RecallExecutor(8, BLOCK_SIZE)
    config = EngineConfig(block_size=BLOCK_SIZE, swap_space=20 / 1024, preemption_mode="swap")
    core = EngineCore(executor, config)
    for i in range(2):
        queue(core, str(i), [i + 1] * 9, 15)
    while not any(request.swapped for request in core.scheduler.waiting):
        core.step()
        core.check()
    core.abort("1")
    core.check()
    core.abort("0")
    core.check()
    core.schedule()
    core.scheduler.swap.check([])


def test_a_page_is_copied_before_one_that_comes_back_from_host_memory_takes_its_place() -> None:
    """The page that a prompt begins like is the prefix cache's, and another's before the step is over."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        scheduling_policy="priority",
        swap_space=30 / 1024,
        preemption_mode="swap",
    )
    core = EngineCore(RecallExecutor(9, BLOCK_SIZE), config)

    def start(request_id: str, prompt: list[int], max_tokens: int, priority: int, num_steps: int) -> Request:
        queue(core, request_id, prompt, max_tokens)
        request = core.requests[request_id]
        request.priority = priority
        for _ in range(num_steps):
            core.step()
            core.check()
        return request

    swapped = start("0", [2] * 5, 12, priority=1, num_steps=2)
    known = start("1", [3] * 5, 12, priority=0, num_steps=2)
    start("2", [4] * 4, 12, priority=0, num_steps=0)
    while not swapped.swapped:
        core.step()
        core.check()
    prompt = [*known.tokens[: known.num_computed // BLOCK_SIZE * BLOCK_SIZE - 1], 88]
    core.abort("1")
    core.abort("2")
    start("3", prompt, 4, priority=-1, num_steps=0)
    schedule = core.schedule()
    assert schedule is not None
    assert {source for source, _ in schedule.copies} & {target for _, target in schedule.swap_in}
    answers = [token for output in core.run(schedule).outputs if output.request_id == "3" for token in output.token_ids]
    while "3" in core.requests:
        answers += [token for o in core.step().outputs if o.request_id == "3" for token in o.token_ids]
        core.check()
    assert answers == expected_answer(prompt, 4)


@pytest.mark.parametrize(("seconds_per_page", "worth_it"), [(1e-4, True), (1e-1, False)])
def test_auto_swaps_when_moving_costs_less_than_computing(seconds_per_page: float, worth_it: bool) -> None:
    swap = SwapSpace(100)
    for _ in range(100):
        swap.measured(1e-3 * 64, num_tokens=64)
        swap.measured(seconds_per_page * 10, num_pages=10)
    assert swap.worth_it(num_tokens=160, num_pages=10) is worth_it
