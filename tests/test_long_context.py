"""Contexts beyond what a model was trained for, and prompts that are very long beside others that are short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from greedy_oracle import generate_alone, load_folder
from test_engine_invariants import queue
from test_exactness import tiny

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.model_executor import ModelExecutor
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
