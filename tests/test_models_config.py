"""What the decoder understands of a config.json: transformers' own reading of the same file is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ifb_handler.models.decoder_config import config_from_huggingface
from ifb_handler.models.errors import ModelError
from ifb_handler.models.rope import RotaryTable, inverse_frequencies

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read_by_transformers(folder: Path, raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(raw))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen2", {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        (
            "qwen2",
            {
                "num_key_value_heads": 4,
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("qwen3", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_assumes(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    raw = {"model_type": model_type, **BASE, **options}
    if model_type == "mistral":
        raw.setdefault("num_key_value_heads", 2)
    theirs, ours = read_by_transformers(tmp_path, raw), config_from_huggingface(raw)
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    assert ours.sliding_windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}},
    ],
)
def test_rotary_tables_equal_those_of_transformers_in_the_old_style_and_the_new(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {"model_type": "llama", **BASE, "head_dim": 32, "max_position_embeddings": 300, **rope}
    positions = torch.arange(300)
    cos, sin = LlamaRotaryEmbedding(read_by_transformers(tmp_path, raw))(torch.empty(0), positions[None])
    config = config_from_huggingface(raw)
    our_cos, our_sin = RotaryTable(config.rope, config.head_dim, 300, torch.device("cpu")).upto(300)
    torch.testing.assert_close(our_cos, cos[0, :, :16], rtol=0, atol=1e-6)
    torch.testing.assert_close(our_sin, sin[0, :, :16], rtol=0, atol=1e-6)


def test_a_rotary_table_grows_with_the_context_and_no_further() -> None:
    config = config_from_huggingface({"model_type": "llama", **BASE, "max_position_embeddings": 100_000})
    table = RotaryTable(config.rope, config.head_dim, config.max_model_len, torch.device("cpu"))
    first_cos = table.upto(10)[0]
    assert table.upto(first_cos.shape[0])[0] is first_cos
    grown_cos, grown_sin = table.upto(first_cos.shape[0] + 1)
    assert first_cos.shape[0] < grown_cos.shape[0] < 100_000
    assert torch.equal(grown_cos[: first_cos.shape[0]], first_cos)
    assert table.upto(100_000)[0].shape == (100_000, config.head_dim // 2)
    last = grown_cos.shape[0] - 1
    expected = (last * inverse_frequencies(config.rope, config.head_dim)).sin()
    torch.testing.assert_close(grown_sin[last], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type: None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported is silu"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type: 'longrope' is not supported; supported are default",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor: missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: a gptq checkpoint"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"vocab_size": 0}, "vocab_size: 0 is not a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "num_kv_heads: 3 does not divide the 4 attention heads"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' is not one of float32, bfloat16, float16"),
        ({"eos_token_id": "</s>"}, "eos_token_id: '</s>' is neither a token id nor a list"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types: 1; expected are 4"),
        ({"model_type": "qwen2", "layer_types": ["chunked"] * 4}, "layer_types: .'chunked'.; expected"),
    ],
)
def test_what_cannot_be_served_is_an_error_that_names_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_huggingface({"model_type": "llama", **BASE, **options})
