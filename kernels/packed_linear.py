"""The matrix product of a linear layer on a CPU, its weight packed once into the order that the product reads it in.

For SmolLM2-135M in float32 on one core with AVX-512 (Zen 4) all products of a step take 19 ms at one row, 84 ms at 32
and 654 ms at 256; oneDNN with packed weights takes 32, 96 and 666 ms, and compiles code anew for each number of rows.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from ifb_kernels import large_pages, native
from ifb_kernels.decoder_layers import NativeLinear
from ifb_kernels.native_product import NativeProduct


class _PackedWeights(ctypes.Structure):
    """As in native_linear.cpp."""

    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("out", c_int64), ("in", c_int64), ("type", c_int64))


class PackedLinear:
    """y = x W^T + b for x [T, in] -> [T, out], in the weight's dtype. Sums are taken in float32.

    A row's result is the same bits whatever the other rows are. Inference only: no gradient flows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight` [out, in] in main memory, float32, bfloat16 or float16, last axis contiguous; `bias` [out].

        A copy of the weight is made. Raises ValueError where `can_pack` is False.
        """
        library = native.library_for(weight)
        if library is None or weight.stride(1) != 1:
            raise ValueError(f"weight: {weight.dtype} on {weight.device} cannot be packed; see can_pack")
        self.library = library
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.float()
        panel = ctypes.c_int()
        library.ifb_linear_panel(ctypes.byref(panel))
        panels = -(-self.out_features // panel.value)
        self.packed = large_pages.empty((panels, self.in_features, panel.value), weight.dtype)
        library.ifb_linear_pack(
            self.packed.data_ptr(),
            weight.data_ptr(),
            weight.stride(0),
            self.out_features,
            self.in_features,
            native.DATA_TYPES[weight.dtype],
            torch.get_num_threads(),
        )

        weights = _PackedWeights(
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.out_features,
            self.in_features,
            native.DATA_TYPES[weight.dtype],
        )
        self._product = NativeProduct(library.ifb_linear, weights, self.out_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x.float()).to(self.packed.dtype)

    def native(self) -> NativeLinear:
        """For native callers, float32 in and out; valid while this object lives."""
        return self._product.native()


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `PackedLinear` takes this weight here: in main memory, of a supported dtype, with the native library."""
    return native.library_for(weight) is not None and weight.stride(1) == 1
