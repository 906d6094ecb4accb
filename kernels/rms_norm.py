"""Root mean square layer normalisation (Zhang and Sennrich, 2019), fused with the residual addition before it."""

from __future__ import annotations

import torch

from ifb_kernels import native


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last axis of `x` [T, N] or [T, H, N] and scale it by `weight` [N] -> (normed, residual).

    With `residual` (contiguous, the shape and dtype of `x`), `x` is first added to it IN PLACE and the sum is what is
    normalised: both the normed tensor and `residual` itself are returned, so that a decoder layer reads

        normed, residual = rms_norm(hidden, weight, eps, residual)

    Without it, `x` itself comes back as the residual. `normed` is a new contiguous tensor of x's dtype. Tokens may be
    strided in `x` (the heads of a fused projection, for one), what belongs to one token is contiguous. The variance is
    taken in float32 and the result is rounded to x's dtype before it is scaled, as Hugging Face's LlamaRMSNorm does.
    Inference only: no gradient flows.
    """
    library = native.library_for(x, weight)
    size = x.shape[-1]
    per_token = x.shape[1] if x.dim() == 3 else 1
    if library is None or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != size):
        return rms_norm_reference(x, weight, eps, residual)
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"residual: must be contiguous and of x's shape {tuple(x.shape)}, is {tuple(residual.shape)}")
    normed = x.new_empty(*x.shape)
    library.ifb_rms_norm(
        normed.data_ptr(),
        None if residual is None else residual.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        x.shape[0],
        per_token,
        size,
        eps,
        native.DATA_TYPES[x.dtype],
        torch.get_num_threads(),
    )
    return normed, x if residual is None else residual


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` in plain torch, on any device."""
    residual = x if residual is None else residual.add_(x)
    wide = residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), residual
