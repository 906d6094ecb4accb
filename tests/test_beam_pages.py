"""Beams share the pages of what they have in common, and every page comes back, whatever else runs and ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from beams import BEAMS, note, queue
from recall_executor import VOCAB_SIZE, SpreadExecutor
from test_engine_invariants import forget_free_pages

from ifb_handler.engine.config import CHOICES, EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.engine import Engine

BLOCK_SIZE = 4
MODES = ("preemption_mode", "scheduling_policy", "prefill_priority", "capacity", "kv_reservation")


def new_core(num_blocks: int, eos: list[int], window: int | None = None, **options: Any) -> EngineCore:
    executor = SpreadExecutor(num_blocks, BLOCK_SIZE, eos=eos, sliding_window=window)
    return EngineCore(executor, EngineConfig(block_size=BLOCK_SIZE, **options))


@pytest.mark.parametrize("seed", range(24))
def test_every_search_ends_with_its_own_answers_and_every_page_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    eos = draw.sample(range(VOCAB_SIZE), draw.choice([0, 1, 5]))
    num_blocks, budget, chunked = draw.randint(14, 28), draw.randint(4, 32), draw.random() < 0.7
    window = draw.choice([None, None, 3, 9])
    core = new_core(
        num_blocks,
        eos,
        window,
        max_num_seqs=draw.randint(6, 16),
        max_num_batched_tokens=budget,
        enable_prefix_caching=draw.random() < 0.5,
        swap_space=draw.choice([0, 3, 30]) / 1024,
        enable_chunked_prefill=chunked,
        **{name: draw.choice(CHOICES[name]) for name in MODES},
    )
    common = [draw.randrange(VOCAB_SIZE) for _ in range(10)]
    plan: dict[int, list[tuple[int, list[int], int, int]]] = {}
    cancels: dict[int, list[str]] = {}
    expected: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    cancelled: set[str] = set()
    arrivals = sorted(draw.randrange(30) for _ in range(12))
    for number, at in enumerate(arrivals):
        prompt = common[: draw.randrange(10)] + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 5))]
        asked = number, prompt, draw.choice([0, 1, 2, 3, 4]), draw.randint(4, 20)
        plan.setdefault(at, []).append(asked)
        if draw.random() < 0.2:
            cancels.setdefault(at + draw.randrange(30), []).append(str(number))
        alone = new_core(num_blocks, eos, window, max_num_seqs=4)
        queue(alone, *asked)
        while alone.has_work:
            note(alone.step().outputs, expected)
        assert alone.num_preemptions == 0
    step = 0
    while plan or cancels or core.has_work:
        for asked in plan.pop(step, []):
            queue(core, *asked)
        for request_id in cancels.pop(step, []):
            if core.abort(request_id) is not None:
                cancelled.add(request_id)
            core.check()
        result = core.step()
        core.check()
        forget_free_pages(core)
        if result is not None:
            note(result.outputs, answers)
            if chunked:
                assert len(result.record.decode) + sum(n for _, n in result.record.prefill) <= budget
        else:
            assert not core.has_work, "requests are alive and none is scheduled"
        step += 1
        assert step < 5_000, "a request never ends"
    assert core.pool.num_used == 0
    for request_id, answer in expected.items():
        if request_id not in cancelled:
            assert answers[request_id] == answer


def test_beams_share_the_pages_of_what_they_have_in_common() -> None:
    copies: list[int] = []

    class Counting(SpreadExecutor):
        def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
            copies.append(len(pairs))
            super().copy_pages(pairs)

    width, prompt = 4, [(7 * i) % VOCAB_SIZE for i in range(101)]
    core = EngineCore(
        Counting(200, BLOCK_SIZE), EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=4, enable_prefix_caching=False)
    )
    queue(core, 0, prompt, width, 20)
    prefilled = sum(tokens for _, tokens in core.step().record.prefill)
    assert core.pool.num_used == 26
    answers: dict[str, Any] = {}
    for generated in range(1, 20):
        copies.clear()
        record = core.step()
        note(record.outputs, answers)
        prefilled += sum(tokens for _, tokens in record.record.prefill)
        core.check()
        if core.has_work:
            (request,) = core.scheduler.running
            rows = len(request.rows)
            assert rows <= width
            assert (core.pool.ref_counts[core.pool.tables[request.rows[0].slot, :25]] == rows).all()
            assert core.pool.num_used <= 25 + width * -(-(1 + generated) // BLOCK_SIZE)
            assert sum(copies) == 0 if (100 + generated) % BLOCK_SIZE == 0 else sum(copies) < width
    assert prefilled == len(prompt)
    assert core.pool.num_used == 0
    assert len(answers["0"]) == width


def test_a_prompt_that_is_known_is_not_computed_for_beams_either() -> None:
    with Engine.with_executor(SpreadExecutor(200, 4), block_size=4) as engine:
        prompt = list(range(50))
        first = engine.generate([prompt], BEAMS)
        again = engine.generate([prompt], BEAMS)
        assert [o.token_ids for o in again] == [o.token_ids for o in first]
        assert {o.num_cached_tokens for o in again} == {49}
        assert {o.num_prompt_tokens for o in again} == {50}
