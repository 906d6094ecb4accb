"""Rotary frequencies, held against those that transformers computes from the same configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ifb_handler.models.decoder_config import config_from_huggingface
from ifb_handler.models.rope import RotaryTable, dynamic_frequencies, inverse_frequencies

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 32.0, "rope_theta": 1e6},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"attention_factor": 0.7},
        {"mscale": 0.9, "mscale_all_dim": 0.5},
        {"truncate": False},
    ],
)
def test_yarn_is_that_of_transformers(changes: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**YARN, **changes}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=head_dim, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = config_from_huggingface(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), expected, rtol=1e-6, atol=0)
    cos, sin = RotaryTable(ours, head_dim, 1024, torch.device("cpu")).upto(1024)
    angles = torch.arange(1024.0)[:, None] * expected
    torch.testing.assert_close(cos[:1024], angles.cos() * factor, rtol=0, atol=2e-4)
    torch.testing.assert_close(sin[:1024], angles.sin() * factor, rtol=0, atol=2e-4)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_dynamic_ntk_is_that_of_transformers_at_every_length(factor: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"type": "dynamic", "factor": factor}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=512, rope_scaling=scaling
    )
    ours = config_from_huggingface({**config.to_dict(), "rope_parameters": None, "rope_scaling": scaling})
    assert ours.max_model_len == 512 * factor
    lengths = [1, 511, 512, 513, 1000, int(512 * factor)]
    frequencies = dynamic_frequencies(ours.rope, head_dim, torch.tensor(lengths))
    for length, actual in zip(lengths, frequencies, strict=True):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=torch.tensor(length))
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(frequencies[0], inverse_frequencies(ours.rope, head_dim), rtol=2e-6, atol=0)
