"""The engine's options: every bad one is an error that names the key."""

from __future__ import annotations

import math

import pytest

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.errors import ConfigError


def test_an_empty_section_is_the_embedded_model_with_defaults() -> None:
    assert EngineConfig.from_mapping({}) == EngineConfig()
    assert EngineConfig().model == "smollm2-135m"


def test_an_unknown_key_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seq: not an option .* did you mean 'max_num_seqs'\?"):
        EngineConfig.from_mapping({"max_num_seq": 4})
    with pytest.raises(ConfigError, match="the options are model, tokenizer"):
        EngineConfig.from_mapping({7: 4})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ""),
        ("model", None),
        ("model", 5),
        ("tokenizer", 5),
        ("dtype", "int8"),
        ("dtype", 16),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", 8),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("device", "cuda:x"),
        ("max_model_len", 0),
        ("max_model_len", "1024"),
        ("max_model_len", 1024.0),
        ("block_size", 0),
        ("block_size", 24),
        ("block_size", True),
        ("block_size", None),
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("max_num_seqs", 65_537),
        ("block_size", 2048),
        ("max_model_len", 10**30),
        ("max_num_batched_tokens", 10**12),
        ("num_gpu_blocks_override", 10**12),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", [256]),
        ("max_num_waiting", -1),
        ("speculative_method", "eagle"),
        ("speculative_model", "smollm2-135m"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 65),
        ("prompt_lookup_max", 0),
        ("prompt_lookup_max", 65),
        ("prompt_lookup_min", 5),
        ("num_gpu_blocks_override", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", math.nan),
        ("gpu_memory_utilization", "0.9"),
        ("cpu_kv_cache_gib", 0),
        ("cpu_kv_cache_gib", math.inf),
        ("cpu_kv_cache_gib", 10**400),
        ("cpu_kv_cache_gib", True),
        ("cpu_kv_cache_gib", 1e300),
        ("swap_space", 1e300),
        ("default_max_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("attention_backend", "cuda"),
        ("num_threads", 0),
        ("max_input_tokens", 0),
        ("max_total_tokens", 0),
        ("max_stop_sequences", 0),
        ("max_stop_length", None),
        ("max_n", 0),
        ("max_logprobs", 0),
        ("max_logprobs", 21),
        ("max_client_batch_size", "all"),
        ("request_timeout", 0),
        ("request_timeout", math.inf),
    ],
)
def test_a_bad_value_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_mapping({key: value})
    assert str(error.value).startswith(f"{key}: ")
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "cuda:1"),
        ("speculative_method", "ngram"),
        ("dtype", "bfloat16"),
        ("kv_cache_dtype", "int8"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("max_model_len", None),
        ("block_size", 32),
        ("block_size", 1024),
        ("max_num_seqs", 65_536),
        ("cpu_kv_cache_gib", 2),
        ("gpu_memory_utilization", 1),
        ("seed", 2**64 - 1),
        ("attention_backend", "triton"),
        ("tokenizer", "elsewhere"),
    ],
)
def test_a_good_value_is_kept(key: str, value: object) -> None:
    assert getattr(EngineConfig.from_mapping({key: value}), key) == value
