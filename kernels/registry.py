"""Which attention backend serves a device."""

from __future__ import annotations

import torch

from ifb_kernels.backend import AttentionBackend

BACKEND_NAMES = ("cpu", "torch", "reference")


def build(device: torch.device, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, or the quickest that runs on `device`.

    Raises ValueError on an unknown name, or on one that cannot run on `device`.
    """
    from ifb_kernels import native

    if name is None:
        name = "cpu" if device.type == "cpu" and native.library() is not None else "torch"
    if name == "cpu":
        from ifb_kernels.cpu_backend import CpuBackend

        library = native.library()
        if device.type != "cpu" or library is None:
            reason = f"the device is {device}" if device.type != "cpu" else "the native library did not build (see log)"
            raise ValueError(f"attention backend: 'cpu' cannot run here, {reason}; use 'torch'")
        return CpuBackend(library)
    if name == "torch":
        from ifb_kernels.torch_backend import TorchBackend

        return TorchBackend()
    if name == "reference":
        from ifb_kernels.reference import ReferenceBackend

        return ReferenceBackend()
    raise ValueError(f"attention backend: {name!r} is not one of {', '.join(BACKEND_NAMES)}")
