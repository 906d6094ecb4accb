"""How the native matrix products of linear layers are called, whatever the form of their weights."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import Any

import torch

from ifb_kernels.decoder_layers import NativeLinear


class NativeProduct:
    """float32 x [T, in] -> float32 y [T, out] = x W^T + b, by a native function that takes what `NativeLinear` says."""

    def __init__(self, function: Any, weights: ctypes.Structure, out_features: int) -> None:
        """`weights`: the structure that `function` takes first. Whoever made it keeps alive what it points to."""
        self._function = function
        self._weights = weights
        self._address = ctypes.addressof(weights)
        self._out_features = out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        y = x.new_empty(x.shape[0], self._out_features)
        self._function(self._address, y.data_ptr(), x.data_ptr(), x.stride(0), x.shape[0], torch.get_num_threads())
        return y

    def native(self) -> NativeLinear:
        """For native callers; valid while this object lives."""
        return NativeLinear(ctypes.cast(self._function, c_void_p).value, self._address)
