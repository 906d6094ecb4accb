"""Root mean square layer normalisation (Zhang and Sennrich, 2019), fused with the residual addition before it."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last axis of `x` [..., N] and scale it by `weight` [N] -> (normed, residual).

    With `residual` (contiguous, the shape and dtype of `x`), `x` is first added to it IN PLACE and the sum is what is
    normalised: both the normed tensor and `residual` itself are returned, so that a decoder layer reads

        normed, residual = rms_norm(hidden, weight, eps, residual)

    Without it, `x` itself comes back as the residual. `normed` is a new contiguous tensor of x's dtype. The variance is
    taken in float32 and the result is rounded to x's dtype before it is scaled, as Hugging Face's LlamaRMSNorm does.
    Inference only: no gradient flows.
    """
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` in plain torch, on any device."""
    residual = x if residual is None else residual.add_(x)
    wide = residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), residual
