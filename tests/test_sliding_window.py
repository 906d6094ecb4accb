"""Models whose layers all see a window only: what falls out of it is given back, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from greedy_oracle import load_folder, make_cases
from recall_executor import VOCAB_SIZE, RecallExecutor, expected_answer
from test_engine_invariants import forget_free_pages, queue
from test_exactness import tiny

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import RequestError
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.models.source import resolve

BLOCK_SIZE = 4


def make(num_blocks: int, window: int | None, block_size: int = BLOCK_SIZE, **options: object) -> EngineCore:
    executor = RecallExecutor(num_blocks, block_size, max_model_len=65_536, sliding_window=window)
    defaults = {"block_size": block_size, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return EngineCore(executor, EngineConfig.from_mapping({**defaults, **options}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def finish(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """-> answers and prompt tokens not computed, by request; the most pages in use at a time"""
    answers: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    most = 0
    while core.has_work:
        result = core.step()
        most = max(most, result.record.used_blocks)
        core.check()
        forget_free_pages(core)
        for output in result.outputs:
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            cached[output.request_id] = output.num_cached_tokens
    assert core.pool.num_used == 0
    return answers, cached, most


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_prompt_of_32k_tokens_runs_in_a_pool_of_a_window_and_a_chunk(enable_prefix_caching: bool) -> None:
    window, budget = 1024, 256
    core = make(
        128, window, 16, max_num_batched_tokens=budget, enable_prefix_caching=enable_prefix_caching
    )  # 2,048 tokens
    prompt = prompt_of(32_000)
    queue(core, "0", prompt, 40)
    for i in range(1, 4):
        queue(core, str(i), prompt_of(20, seed=i), 100)
    most = 0
    answers: dict[str, list[int]] = {}
    while core.has_work:
        result = core.step()
        assert sum(n for _, n in result.record.prefill) + len(result.record.decode) <= budget
        most = max(most, core.pool.num_used)
        for output in result.outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        if result.record.step % 16 == 0:
            core.check()
            forget_free_pages(core)
    assert answers["0"] == expected_answer(prompt, 40, window=window)
    assert core.num_preemptions == 0
    assert most <= (window + budget) // 16 + 2 + 3 * (120 // 16 + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": "guaranteed_no_evict"},
        {"kv_reservation": "max_length"},
        {"capacity": "guaranteed_no_evict", "kv_reservation": "max_length", "prefill_priority": "prefill_first"},
    ],
)
def test_policies_that_look_ahead_count_what_a_request_holds_at_a_time(options: dict[str, str]) -> None:
    core = make(24, 8, max_num_batched_tokens=8, enable_prefix_caching=False, **options)
    each = core.pool.most_pages(10_000)
    assert each == 5
    prompts = {str(i): prompt_of(100 + 10 * i, seed=i) for i in range(8)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 50)
    core.step()
    assert len(core.scheduler.running) >= 1
    widest = 0
    answers: dict[str, list[int]] = {}
    while core.has_work:
        result = core.step()
        widest = max(widest, len(core.scheduler.running))
        core.check()
        forget_free_pages(core)
        for output in result.outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    for request_id, prompt in prompts.items():
        expected = expected_answer(prompt, 50, window=8)
        assert expected[-len(answers[request_id]) :] == answers[request_id]
    assert core.num_preemptions == 0
    assert widest == 24 // each


def test_pages_are_given_back_as_soon_as_no_token_to_come_sees_them() -> None:
    for window in (1, 5, 8, 9):
        core = make(64, window, enable_prefix_caching=False, max_num_batched_tokens=1)
        queue(core, "0", prompt_of(40), 20)
        while core.has_work:
            schedule = core.schedule()
            (request,) = schedule.num_tokens
            first_seen = max(0, request.num_computed - window + 1)
            pages = request.num_computed // BLOCK_SIZE - first_seen // BLOCK_SIZE + 1
            if request.num_computed >= 40:  # a prompt has pages ahead, as many as a window and a chunk can use
                assert core.pool.num_used == pages
            assert core.pool.num_used <= core.pool.most_pages(60)
            core.run(schedule)


def test_where_one_layer_sees_everything_nothing_is_given_back() -> None:
    core = make(64, None)
    queue(core, "0", prompt_of(40), 20)
    while core.has_work:
        held = core.pool.num_used
        core.step()
        assert core.pool.num_used >= held or not core.has_work


def test_a_pool_too_small_for_a_window_takes_what_fits_it_whole() -> None:
    with Engine.with_executor(
        RecallExecutor(5, BLOCK_SIZE, sliding_window=100), block_size=BLOCK_SIZE, max_num_batched_tokens=8
    ) as engine:
        assert engine.max_model_len == 20
        with pytest.raises(RequestError, match="leave no room for one more"):
            engine.generate([prompt_of(20)])
        (output,) = engine.generate([prompt_of(12)], SamplingParams(temperature=0.0, max_tokens=8))
        assert output.token_ids == expected_answer(prompt_of(12), 8)


def test_a_window_that_just_fits_prefills_in_smaller_chunks() -> None:
    core = make(4, 12, max_num_batched_tokens=16)
    assert core.max_request_len == 65_536
    queue(core, "0", prompt_of(100), 20)
    answers, _, most = finish(core)
    assert answers["0"] == expected_answer(prompt_of(100), 20, window=12)
    assert most == 4


def test_without_chunks_a_prompt_needs_all_of_its_pages_at_once() -> None:
    core = make(10, 8, enable_chunked_prefill=False)
    assert core.max_request_len == 40
    queue(core, "0", prompt_of(30), 10)
    answers, _, most = finish(core)
    assert answers["0"] == expected_answer(prompt_of(30), 10, window=8)
    assert most == 8


def test_what_a_request_has_left_behind_is_found_until_its_page_is_needed() -> None:
    core = make(64, 8)
    prompt = prompt_of(60)
    queue(core, "0", prompt, 4)
    finish(core)
    queue(core, "1", [*prompt[:40], 1, 2, 3], 4)
    answers, cached, most = finish(core)
    assert cached["1"] == 40
    assert answers["1"] == expected_answer([*prompt[:40], 1, 2, 3], 4, window=8)
    assert most <= core.pool.most_pages(47), "of the known beginning only what the window shows is taken"


def test_a_beginning_is_known_if_a_windows_width_of_it_is_there() -> None:
    core = make(20, 8)
    old, new = prompt_of(60), prompt_of(30, seed=1)
    queue(core, "0", old, 1)  # 15 pages
    finish(core)
    queue(core, "1", new, 4)  # needs some of them
    finish(core)
    for request_id, prompt in (("2", [*old, 1]), ("3", [*old[:8], 1])):
        queue(core, request_id, prompt, 4)
        answers, cached, _ = finish(core)
        assert answers[request_id] == expected_answer(prompt, 4, window=8)
        assert cached[request_id] == {"2": 60, "3": 0}[request_id], "its beginning was the first to be left behind"


def test_answers_to_one_prompt_share_the_window_that_they_part_in() -> None:
    core = make(64, 12, max_num_batched_tokens=32)
    prompt = prompt_of(50)
    for request_id in ("0", "1", "2"):
        queue(core, request_id, prompt, 20)
    answers, cached, _ = finish(core)
    assert set(map(tuple, answers.values())) == {tuple(expected_answer(prompt, 20, window=12))}
    assert sorted(cached.values()) == [0, 49, 49]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_preempted_request_swaps_what_it_holds_and_no_more(enable_prefix_caching: bool) -> None:
    core = make(
        12, 16, swap_space=20 / 1024, preemption_mode="swap", enable_prefix_caching=enable_prefix_caching
    )  # 20 host pages
    prompts = {str(i): prompt_of(6, seed=i) for i in range(3)}
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, 40)
    moved = []
    swap_out = core.executor.swap_out
    core.executor.swap_out = lambda pairs: (moved.append(len(pairs)), swap_out(pairs))
    answers, _, _ = finish(core)
    assert answers == {i: expected_answer(prompt, 40, window=16) for i, prompt in prompts.items()}
    assert moved
    assert max(moved) <= 2 * 5, "a window's pages of each that was preempted in a step"


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_a_windowed_model_answers_as_generate_does_in_a_pool_smaller_than_its_prompts(
    tmp_path: Path, num_blocks: int, enable_prefix_caching: bool
) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("Mistral", sliding_window=37)).save_pretrained(tmp_path)
    cases = make_cases(load_folder(tmp_path), 8, 30, 600, most_tokens=40, vocab_size=320)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=64,
        enable_prefix_caching=enable_prefix_caching,
    )
    executor = ModelExecutor(config, resolve(config.model))
    core = EngineCore(executor, config)
    for i, case in enumerate(cases):
        queue(core, str(i), case.prompt, case.num_tokens)
        core.requests[str(i)].text._all_eos = core.requests[str(i)].text._eos = frozenset()
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(cases))}
    while core.has_work:
        result = core.step()
        core.check()
        free = torch.from_numpy(np.flatnonzero((core.pool.ref_counts == 0) & ~core.pool.in_cache))
        for layer in executor.target.pages:
            for tensor in layer.tensors():
                tensor[free] = torch.nan
        for output in result.outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
    assert answers == {str(i): case.answer for i, case in enumerate(cases)}
