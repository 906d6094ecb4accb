"""Linear layers, with weights held in the layout that the machine multiplies quickest.

On a CPU a weight is packed once and the plain copy dropped: into our own panels where the native library was built
(`ifb_kernels.packed_linear`), into oneDNN's blocks where it was not and for bfloat16 where the processor has
instructions for it. Quantized weights are panels of codes. Elsewhere torch's `F.linear` multiplies as it likes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ifb_kernels.decoder_layers import NativeLinear
from ifb_kernels.grouped_linear import GroupedLinear, GroupedWeight, quantize_in_groups
from ifb_kernels.int8_linear import Int8Linear
from ifb_kernels.packed_linear import PackedLinear, can_pack

Multiply = Callable[[torch.Tensor], torch.Tensor]

QUANTIZATIONS = ("int8", "int8_weight_only", "int4_weight_only")
WEIGHT_ONLY_BITS = {"int8_weight_only": 8, "int4_weight_only": 4}


class Linear:
    """y = x W^T + b for x [T, in] -> [T, out], in the weight's dtype. `weight` is None once it is packed."""

    def __init__(
        self, weight: torch.Tensor | GroupedWeight, bias: torch.Tensor | None = None, quantization: str | None = None
    ) -> None:
        """`weight` [out, in] and `bias` [out] on one device: a CPU where the weight is quantized.

        It is where it comes in groups, and else by `quantization`, one of QUANTIZATIONS.
        """
        self.weight: torch.Tensor | None = None
        self._multiply: Multiply
        if isinstance(weight, GroupedWeight) or quantization is not None:
            quantized = _quantized(weight, bias, quantization)
            self._multiply, self.num_bytes = quantized, quantized.num_bytes
            return
        values = weight.numel() + (0 if bias is None else bias.numel())
        self.num_bytes = values * weight.element_size()
        if _suits_onednn(weight):
            self._multiply = _OneDNNLinear(weight, bias)
        elif can_pack(weight):
            self._multiply = PackedLinear(weight, bias)
        else:
            self.weight = weight
            self._multiply = partial(F.linear, weight=weight, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

    def native(self) -> NativeLinear | None:
        """For native callers, float32 in and out; None where native code cannot multiply by this weight."""
        kinds = (PackedLinear, Int8Linear, GroupedLinear)
        return self._multiply.native() if isinstance(self._multiply, kinds) else None


def _quantized(
    weight: torch.Tensor | GroupedWeight, bias: torch.Tensor | None, quantization: str | None
) -> Int8Linear | GroupedLinear:
    if isinstance(weight, GroupedWeight):
        return GroupedLinear(weight, bias)
    if quantization in WEIGHT_ONLY_BITS:
        return GroupedLinear(quantize_in_groups(weight, WEIGHT_ONLY_BITS[quantization]), bias)
    return Int8Linear(weight, bias)


def packs(weight: torch.Tensor, quantization: str | None = None) -> bool:
    """Whether a `Linear` with a weight of this one's dtype and device holds a packed copy, not the weight itself."""
    return quantization is not None or _suits_onednn(weight) or can_pack(weight)


def multiplies_codes_as_floats(weight: torch.Tensor) -> bool:
    """Whether a `GroupedWeight` gives the bits that a weight of this one's dtype and device would, and in less time."""
    return weight.dtype == torch.float32 and can_pack(weight)


def _suits_onednn(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and not can_pack(weight)


class _OneDNNLinear:
    """oneDNN's product with a packed weight.

    It compiles a kernel for each number of rows that it meets, which costs about 0.7 ms and 0.6 MB a weight shape. So
    rows are rounded up to a few sizes, and few kernels are kept.
    """

    # Over all shapes and sizes: 8 sizes of a model with five shapes, about 25 MB.
    KERNELS_KEPT = 40

    # The number of rows that the layout is chosen for; other numbers run on it as well.
    TYPICAL_ROWS = 32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(self.KERNELS_KEPT))
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.TYPICAL_ROWS)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        missing = _rounded_up(x.shape[0]) - x.shape[0]
        padded = x if missing == 0 else torch.cat((x, x.new_zeros(missing, x.shape[1])))
        y = torch.ops.mkldnn._linear_pointwise.default(padded, self.packed, self.bias, "none", [], "")
        return y[: x.shape[0]]


def _rounded_up(rows: int) -> int:
    """Steps of 4 up to 32 rows, of 8 up to 64, of 16 up to 128 and of 32 beyond; 1 and 2 as they are."""
    if rows <= 2:
        return rows
    for limit, step in ((32, 4), (64, 8), (128, 16)):
        if rows <= limit:
            return -(-rows // step) * step
    return -(-rows // 32) * 32
