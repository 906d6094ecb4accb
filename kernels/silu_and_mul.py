"""The gate of a SwiGLU feed-forward block (Shazeer, GLU Variants Improve Transformer, 2020)."""

from __future__ import annotations

import torch

from ifb_kernels import native


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for the fused projection `gate_up` [T, 2 * I], gate in the first half -> [T, I].

    The last axis is contiguous. Computed in float32, rounded once to the input's dtype. Inference only.
    """
    library = native.library_for(gate_up)
    if library is None or gate_up.stride(1) != 1:
        return silu_and_mul_reference(gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    library.ifb_silu_and_mul(
        output.data_ptr(),
        gate_up.data_ptr(),
        gate_up.stride(0),
        num_tokens,
        size,
        native.DATA_TYPES[gate_up.dtype],
        torch.get_num_threads(),
    )
    return output


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_and_mul` in plain torch, on any device."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
