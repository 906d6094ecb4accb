"""The gate of a SwiGLU feed-forward block (Shazeer, GLU Variants Improve Transformer, 2020)."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for the fused projection `gate_up` [T, 2 * I], gate in the first half -> [T, I].

    The last axis is contiguous. Computed in float32, rounded once to the input's dtype. Inference only.
    """
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in plain torch, on any device."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
