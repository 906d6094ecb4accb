"""Contexts beyond what a model was trained for, and prompts that are very long beside others that are short."""

from __future__ import annotations

import cProfile
import pstats
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy_oracle import generate_alone, load_folder
from recall_executor import VOCAB_SIZE, RecallExecutor
from test_engine_invariants import queue
from test_exactness import tiny

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Detokenizer, Vocabulary
from ifb_handler.engine.model_executor import ModelExecutor
from ifb_handler.engine.request import GenerationRequest, Request
from ifb_handler.engine.sampling_params import SamplingParams
from ifb_handler.engine.stopping import OutputAssembler
from ifb_handler.models.source import resolve


def write_model(folder: Path, **changes: object) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("Llama", **changes)).save_pretrained(folder)
    return folder


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(core: EngineCore, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        queue(core, request_id, prompt, num_tokens)
        core.requests[request_id].text._eos = frozenset()
    answers: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while core.has_work:
        for output in core.step().outputs:
            answers[output.request_id] += output.token_ids
        core.check()
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 400},
        {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 23},
        {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 40},  # preempts
        {"num_gpu_blocks_override": 28, "swap_space": 0.01, "preemption_mode": "swap", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_dynamic_ntk_answers_as_generate_does_at_any_length_however_prompts_are_cut(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """Prompts below, at and beyond the trained 128 tokens, with answers that cross it, and beginnings in common."""
    scaling = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    folder = write_model(tmp_path, max_position_embeddings=128, rope_parameters=scaling)
    long = tokens_of(380, seed=0)
    lengths = [300, 20, 90, 120, 128, 129, 200, 380, 300]
    prompts = {str(i): [*long[: length - 1], 5 + i] for i, length in enumerate(lengths)}
    expected = {i: generate_alone(load_folder(folder), prompt, 40) for i, prompt in prompts.items()}
    config = EngineConfig(model=str(folder), dtype="float32", max_num_seqs=6, **options)
    executor = ModelExecutor(config, resolve(config.model))
    assert executor.max_model_len == 512
    core = EngineCore(executor, config)
    assert run(core, prompts, 40) == expected
    assert (core.num_preemptions > 0) == (executor.num_blocks < 400)
    if executor.num_blocks == 400:
        assert core.cache.hits >= 280, "prompts of one length share what they have in common"


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_prompt_of_32k_tokens_runs_in_bounded_memory_and_stalls_none_of_its_neighbours(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    folder = write_model(tmp_path, num_hidden_layers=2, max_position_embeddings=65_536, rope_parameters=LLAMA3, **shape)
    config = EngineConfig(model=str(folder), dtype="float32", num_gpu_blocks_override=2200, max_num_batched_tokens=256)
    executor = ModelExecutor(config, resolve(config.model))
    core = EngineCore(executor, config)
    neighbours = {str(i) for i in range(4)}
    for request_id in sorted(neighbours):
        queue(core, request_id, tokens_of(20, seed=int(request_id)), 300)
        core.requests[request_id].text._eos = frozenset()
    core.step()
    core.step()
    before = most = resident_bytes()
    queue(core, "4", tokens_of(32_000, seed=9), 4)
    chunks: list[int] = []
    while "4" in core.requests:
        result = core.step()
        assert set(result.record.decode) - {"4"} == neighbours
        assert {output.request_id for output in result.outputs if output.token_ids} >= neighbours
        chunks += [count for _, count in result.record.prefill]
        assert len(result.record.decode) + sum(count for _, count in result.record.prefill) <= 256
        most = max(most, resident_bytes())
    assert sum(chunks) == 32_000
    assert len(chunks) == -(-32_000 // 252)
    core.check()
    # Its keys and values, a rotary table, and block tables; a single score a pair of tokens would be 4 GB.
    assert most - before < executor.pool_bytes + (48 << 20)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {}),
        ({"speculative_method": "ngram"}, {}),
        ({"enable_prefix_caching": False}, {"repetition_penalty": 1.1}),
        ({}, {"bad_words": [[5, 6, 7]], "logit_bias": {3: 1.0}}),
    ],
    ids=str,
)
def test_what_a_prompt_costs_outside_the_model_grows_as_its_length(
    options: dict[str, object], asked: dict[str, object]
) -> None:
    def calls(length: int, window: int | None) -> int:
        """Functions called, a measure that no other load changes."""
        executor = RecallExecutor(2 * length // 16, max_model_len=2 * length, sliding_window=window)
        core = EngineCore(executor, EngineConfig.from_mapping({"max_num_batched_tokens": 512, **options}))
        params = SamplingParams(temperature=0.0, max_tokens=4, **asked)
        text = OutputAssembler(params, (), 4, Detokenizer(Vocabulary(None)))
        profile = cProfile.Profile()
        profile.enable()
        prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, length).tolist()
        core.add(Request(GenerationRequest("0", prompt, params), 0, 0, text))
        while core.has_work:
            core.step()
        profile.disable()
        return pstats.Stats(profile).total_calls

    for window in (None, 16):
        assert calls(32_000, window) < 4.5 * calls(8_000, window)
