"""Which attention backend serves a device."""

from __future__ import annotations

import os

import torch

from ifb_kernels.backend import AttentionBackend

BACKEND_NAMES = ("triton", "cpu", "torch", "reference")


def build(device: torch.device, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, or the quickest that runs on `device`.

    Raises ValueError on an unknown name, or on one that cannot run on `device`.
    """
    if name is None:
        name = _quickest(device)
    if name == "triton":
        return _triton(device)
    if name == "cpu":
        return _cpu(device)
    if name == "torch":
        from ifb_kernels.torch_backend import TorchBackend

        return TorchBackend()
    if name == "reference":
        from ifb_kernels.reference import ReferenceBackend

        return ReferenceBackend()
    raise ValueError(f"attention backend: {name!r} is not one of {', '.join(BACKEND_NAMES)}")


def _quickest(device: torch.device) -> str:
    if device.type == "cuda":  # ROCm's devices, too, go by this name
        return "triton"
    if device.type == "cpu":
        from ifb_kernels import native

        return "torch" if native.library() is None else "cpu"
    return "torch"


def _triton(device: torch.device) -> AttentionBackend:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attention backend: 'triton' cannot run on {device}, only on CUDA and ROCm devices "
            "(or in Triton's interpreter, with TRITON_INTERPRET=1 set before Python starts)"
        )
    from ifb_kernels.triton_backend import TritonBackend

    return TritonBackend()


def _cpu(device: torch.device) -> AttentionBackend:
    from ifb_kernels import native
    from ifb_kernels.cpu_backend import CpuBackend

    library = native.library() if device.type == "cpu" else None
    if library is None:
        reason = f"the device is {device}" if device.type != "cpu" else "the native library did not build (see the log)"
        raise ValueError(f"attention backend: 'cpu' cannot run here: {reason}. Use 'torch'")
    return CpuBackend(library)
