"""The decoder's fused operations against transformers' Llama modules and against their plain torch references."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ifb_kernels import native
from ifb_kernels.rms_norm import rms_norm, rms_norm_reference
from ifb_kernels.rotary_embedding import rotary_embedding, rotary_embedding_reference
from ifb_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Two units in the last place of values near 4; in float32 with a relative part beside it (sums run in another order).
ULP = {torch.float32: 1e-6, torch.bfloat16: 3.2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    assert native.library() is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 576), (3, 37), (200, 576), (2, 5)])
def test_rms_norm_is_llamas(dtype: torch.dtype, tokens: int, size: int) -> None:
    module = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    module.weight.data.normal_()
    x, residual = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype)
    with torch.no_grad():
        normed, same = rms_norm(x, module.weight, 1e-5)
        assert same is x
        torch.testing.assert_close(normed, module(x), rtol=2e-6, atol=ULP[dtype])
        summed = x + residual
        normed, updated = rms_norm(x, module.weight, 1e-5, residual)
        assert updated is residual
        assert torch.equal(residual, summed)
        torch.testing.assert_close(normed, module(summed), rtol=2e-6, atol=ULP[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_the_heads_of_a_fused_projection(dtype: torch.dtype) -> None:
    fused, weight = torch.randn(50, 10 * 64).to(dtype), torch.randn(64).to(dtype)
    heads = fused[:, 128:512].view(50, 6, 64)
    expected, _ = rms_norm_reference(heads, weight, 1e-6)
    normed, _ = rms_norm(heads, weight, 1e-6)
    assert normed.is_contiguous()
    torch.testing.assert_close(normed, expected, rtol=2e-6, atol=ULP[dtype])


def test_rms_norm_refuses_a_residual_of_another_shape() -> None:
    with pytest.raises(ValueError, match="residual: must be contiguous and of x's shape"):
        rms_norm(torch.ones(4, 8), torch.ones(8), 1e-5, torch.ones(4, 16)[:, ::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 24])
def test_rotary_embedding_is_llamas_and_leaves_the_values_alone(dtype: torch.dtype, head_dim: int) -> None:
    config = LlamaConfig(hidden_size=9 * head_dim, num_attention_heads=9, head_dim=head_dim, rope_theta=10_000.0)
    positions = torch.tensor([0, 5, 1999, 7, 7])
    cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), torch.arange(2000).unsqueeze(0))
    half_cos, half_sin = (angles[0, :, : head_dim // 2].contiguous() for angles in (cos, sin))
    fused = torch.randn(5, 15 * head_dim).to(dtype)
    heads = fused.view(1, 5, 15, head_dim).transpose(1, 2).float()
    expected_q, expected_k = apply_rotary_pos_emb(heads[:, :9], heads[:, 9:12], cos[:, positions], sin[:, positions])
    values = fused[:, 12 * head_dim :].clone()
    q = fused[:, : 9 * head_dim].view(5, 9, head_dim)
    k = fused[:, 9 * head_dim : 12 * head_dim].view(5, 3, head_dim)
    rotary_embedding(q, k, half_cos, half_sin, positions)
    torch.testing.assert_close(q.float(), expected_q[0].transpose(0, 1), rtol=2e-6, atol=ULP[dtype])
    torch.testing.assert_close(k.float(), expected_k[0].transpose(0, 1), rtol=2e-6, atol=ULP[dtype])
    assert torch.equal(fused[:, 12 * head_dim :], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 300])
def test_partial_rotary_leaves_the_last_channels_alone(dtype: torch.dtype, tokens: int) -> None:
    cos, sin, positions = torch.randn(50, 12), torch.randn(50, 12), torch.randint(0, 50, (tokens,))
    q, k = torch.randn(tokens, 4, 32).to(dtype), torch.randn(tokens, 2, 32).to(dtype)
    expected_q, expected_k, before = q.clone(), k.clone(), q.clone()
    rotary_embedding_reference(expected_q, expected_k, cos, sin, positions)
    rotary_embedding(q, k, cos, sin, positions)
    torch.testing.assert_close(q, expected_q, rtol=2e-6, atol=2 * ULP[dtype])
    torch.testing.assert_close(k, expected_k, rtol=2e-6, atol=2 * ULP[dtype])
    assert torch.equal(q[..., 24:], before[..., 24:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1536), (100, 1536), (3, 21)])
def test_silu_and_mul_is_the_gate_of_a_llama_block(dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = (torch.randn(tokens, 2 * size) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    output = silu_and_mul(gate_up)
    assert output.is_contiguous()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(silu_and_mul_reference(gate_up), expected, rtol=0, atol=0)


def test_silu_and_mul_holds_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-float("inf"), -1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("nan")])
    output = silu_and_mul(torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0))[0]
    assert torch.isnan(output[-1])
    torch.testing.assert_close(output[1:-1], torch.nn.functional.silu(gate[1:-1]), rtol=1e-6, atol=1e-6)
