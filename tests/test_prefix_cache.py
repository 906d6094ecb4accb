"""The radix tree over pages: what is computed once is not computed again, and nothing else changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recall_executor import RecallExecutor, expected_answer
from test_engine_invariants import queue

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.outputs import RequestOutput

BLOCK_SIZE = 4


def make(num_blocks: int = 64, **options: object) -> EngineCore:
    executor = RecallExecutor(num_blocks, BLOCK_SIZE)
    return EngineCore(executor, EngineConfig.from_mapping({"block_size": BLOCK_SIZE, "max_num_seqs": 8, **options}))


def finish(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, RequestOutput], dict[str, int]]:
    """-> answers, last outputs, and prompt tokens computed, by request"""
    answers: dict[str, list[int]] = {}
    last: dict[str, RequestOutput] = {}
    computed: dict[str, int] = {}
    while core.has_work:
        result = core.step()
        core.check()
        for request_id, count in result.record.prefill:
            computed[request_id] = computed.get(request_id, 0) + count
        for output in result.outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            last[output.request_id] = output
    return answers, last, computed


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    core = make()
    prompt = list(range(21))
    queue(core, "0", prompt, 3)
    finish(core)
    queue(core, "1", prompt, 3)
    answers, last, computed = finish(core)
    assert answers["1"] == expected_answer(prompt, 3)
    assert computed["1"] == 1
    assert last["1"].num_cached_tokens == 20
    assert (core.stats().prefix_cache_queries, core.stats().prefix_cache_hits) == (42, 20)


def test_a_fully_cached_prompt_of_an_exact_page_multiple_still_computes_one_token() -> None:
    core = make()
    prompt = list(range(5 * BLOCK_SIZE))
    for request_id in ("0", "1"):
        queue(core, request_id, prompt, 6)
        answers, _, computed = finish(core)
        assert answers[request_id] == expected_answer(prompt, 6)
    assert computed["1"] == 1


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_turn_before() -> None:
    core = make(num_blocks=200)
    history = list(range(10))
    work = []
    for turn in range(8):
        queue(core, str(turn), history, 12)
        answers, _, computed = finish(core)
        work.append(computed[str(turn)])
        history = history + answers[str(turn)] + [turn] * 10
    assert max(work[1:]) <= 22 + BLOCK_SIZE, "prefill work of a turn does not grow with the history"


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    core = make(num_blocks=300, max_num_batched_tokens=32)
    common = list(range(60))
    prompts = {str(i): [*common, 70 + i, 2, 3] for i in range(8)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 5)
    answers, _, computed = finish(core)
    assert answers == {request_id: expected_answer(prompt, 5) for request_id, prompt in prompts.items()}
    assert sum(computed.values()) == 63 + 7 * 3


def test_one_that_waits_for_a_prefix_computes_it_itself_when_the_other_is_cancelled() -> None:
    core = make(num_blocks=300, max_num_batched_tokens=8)
    common = list(range(60))
    queue(core, "0", [*common, 70], 5)
    queue(core, "1", [*common, 71], 5)
    for _ in range(3):
        core.step()
    assert [r.request_id for r in core.scheduler.waiting] == ["1"]
    core.abort("0")
    core.check()
    answers, last, _ = finish(core)
    assert answers["1"] == expected_answer([*common, 71], 5)
    assert last["1"].num_cached_tokens == 24, "what the other had computed by then"


def test_answers_to_the_same_prompt_share_its_pages_and_copy_the_one_where_they_part() -> None:
    core = make(num_blocks=100, max_num_batched_tokens=64)
    prompt = list(range(22))
    for request_id in ("0", "1", "2"):
        queue(core, request_id, prompt, 6)
    core.step()
    core.step()
    assert len(core.scheduler.running) == 3
    tables = core.pool.tables[[r.slot for r in core.scheduler.running]]
    assert (tables[:, :5] == tables[0, :5]).all(), "five full pages in common"
    assert len(set(tables[:, 5].tolist())) == 3, "a page of its own where they part"
    answers, _, _ = finish(core)
    assert core.stats().prefix_cache_hits == 2 * 21, "all but the last token, page or not"
    assert all(answer == expected_answer(prompt, 6)[-len(answer) :] for answer in answers.values())


def test_requests_of_different_namespaces_share_nothing() -> None:
    core = make()
    prompt = list(range(21))
    for request_id, namespace in (("0", "a"), ("1", "b"), ("2", "a")):
        queue(core, request_id, prompt, 3)
        core.requests[request_id].cache_namespace = namespace
        _, last, _ = finish(core)
    assert last["2"].num_cached_tokens == 20
    assert core.stats().prefix_cache_hits == 20


def test_the_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    core = make(num_blocks=12)
    old, recent = [1] * 16, [2] * 16
    queue(core, "0", old, 1)
    finish(core)
    queue(core, "1", recent, 1)
    finish(core)
    assert core.pool.num_cached == 8
    queue(core, "2", [3] * 20, 1)  # five pages: one more than are free, and a page of room
    finish(core)
    queue(core, "3", [*recent, 5], 1)
    _, last, _ = finish(core)
    assert last["3"].num_cached_tokens == 16
    queue(core, "4", [*old, 5], 1)
    _, last, _ = finish(core)
    assert 0 < last["4"].num_cached_tokens < 16, "its last page is gone, its first is not"


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    core = make(num_blocks=14)
    prompts = {str(i): [i + 1] * 9 for i in range(3)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 20)
    answers, _, _ = finish(core)
    assert core.num_preemptions > 0
    assert answers == {request_id: expected_answer(prompt, 20) for request_id, prompt in prompts.items()}


def test_with_caching_off_nothing_is_kept() -> None:
    core = make(enable_prefix_caching=False)
    for request_id in ("0", "1"):
        queue(core, request_id, list(range(21)), 3)
        _, last, computed = finish(core)
    assert computed["1"] == 21
    assert last["1"].num_cached_tokens == 0
    assert core.pool.num_cached == 0


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=12),
    seed=st.integers(0, 100),
)
def test_hits_are_those_of_a_set_of_all_prefixes_computed_so_far(prompts: list[list[int]], seed: int) -> None:
    """While nothing is reclaimed the tree is just the set of page-sized prefixes of all that was computed."""
    core = make(num_blocks=400)
    known: set[tuple[int, ...]] = set()
    source = random.Random(seed)
    for i, prompt in enumerate(prompts):
        num_tokens = source.randint(1, 6)
        queue(core, str(i), prompt, num_tokens)
        answers, last, _ = finish(core)
        expected = 0
        for end in range(1, len(prompt)):  # all of the prompt but its last token may be known, to the token
            page_start = (end - 1) // BLOCK_SIZE * BLOCK_SIZE
            pages_known = page_start == 0 or tuple(prompt[:page_start]) in known
            if pages_known and any(prefix[:end] == tuple(prompt[:end]) for prefix in known):
                expected = end
        assert last[str(i)].num_cached_tokens == expected
        computed = [*prompt, *answers[str(i)][:-1]]  # the last token's keys are never computed
        known |= {tuple(computed[:end]) for end in range(BLOCK_SIZE, len(computed) + 1, BLOCK_SIZE)}
    assert core.pool.num_cached == len(known)


@pytest.mark.parametrize("num_blocks", [8, 20])
def test_the_heap_of_idle_pages_does_not_grow_with_the_requests_served(num_blocks: int) -> None:
    core = make(num_blocks=num_blocks)
    for i in range(300):
        queue(core, str(i), [i % 3] * 9, 2)
        finish(core)
    assert len(core.cache._idle) <= 4 * num_blocks + 1
