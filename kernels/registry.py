"""Which attention backend serves a device."""

from __future__ import annotations

import torch

from ifb_kernels.backend import AttentionBackend

BACKEND_NAMES = ("torch", "reference")


def build(device: torch.device, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, or the quickest that runs on `device`. Raises ValueError on an unknown name."""
    if name is None:
        name = "torch"
    if name == "torch":
        from ifb_kernels.torch_backend import TorchBackend

        return TorchBackend()
    if name == "reference":
        from ifb_kernels.reference import ReferenceBackend

        return ReferenceBackend()
    raise ValueError(f"attention backend: {name!r} is not one of {', '.join(BACKEND_NAMES)}")
