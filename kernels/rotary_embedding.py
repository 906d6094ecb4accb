"""Rotary position embedding (Su et al., RoFormer, 2021) in the half-rotation form that Llama checkpoints use."""

from __future__ import annotations

import torch

from ifb_kernels import native


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """Rotate the queries `q` [T, Hq, D] and the keys `k` [T, Hk, D] IN PLACE by their tokens' positions.

    cos, sin    float32 [P, rot / 2], contiguous: the angle's cosine and sine at each position below P, for each pair of
                channels; rot <= D is even, and channels past `rot` stay as they are (partial rotary)
    positions   int64 [T], contiguous, each in 0 .. P - 1 (not checked)

    Channel i is paired with channel i + rot / 2. `q` and `k` may be views of one fused projection: the token axis may
    be strided, heads and channels are contiguous. Computed in float32, then rounded once. Inference only.
    """
    library = native.library_for(q, k)
    if library is None or not (_heads_together(q) and _heads_together(k)):
        rotary_embedding_reference(q, k, cos, sin, positions)
        return
    library.ifb_rotary_embedding(
        q.data_ptr(),
        q.stride(0),
        q.shape[1],
        k.data_ptr(),
        k.stride(0),
        k.shape[1],
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        q.shape[0],
        q.shape[2],
        cos.shape[1],
        native.DATA_TYPES[q.dtype],
        torch.get_num_threads(),
    )


def _heads_together(heads: torch.Tensor) -> bool:
    return heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]


def rotary_embedding_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """`rotary_embedding` in plain torch, on any device."""
    half = cos.shape[1]
    token_cos = cos[positions].unsqueeze(1)
    token_sin = sin[positions].unsqueeze(1)
    for heads in (q, k):
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated_first = first * token_cos - second * token_sin
        rotated_second = second * token_cos + first * token_sin
        first.copy_(rotated_first)
        second.copy_(rotated_second)
