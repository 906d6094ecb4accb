"""The matrix product of a linear layer with weights in codes of 8 or 4 bits and activations in floats, on a CPU.

Along the input channels, each group of 32 weights of an output has a scale, and with 4 bits a least value too:

    W[o, i] ~ codes[o, i] * scales[o, i // 32] + minimums[o, i // 32]

These are the types Q8_0 and Q4_1 of GGUF files, and Q4_0 is Q4_1 with a least value of -8 scales: a file's own blocks
are multiplied as they are. Weights become floats in registers on their way into the sums, which are those of
`packed_linear.py`: a row's result is the same bits whatever the other rows are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch

from ifb_kernels import large_pages, native
from ifb_kernels.decoder_layers import NativeLinear
from ifb_kernels.native_product import NativeProduct

GROUP = 32

# Quantized together: what it takes beside the weight.
_VALUES_AT_A_TIME = 1 << 18


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] in groups; G groups of 32 channels cover `in`, the last may be cut short.

    codes       int8 [out, 32 G], from -127 to 127, for 8 bits; uint8, from 0 to 15, for 4
    scales      float16 [out, G]
    minimums    float16 [out, G] for 4 bits, None for 8
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    in_features: int

    @property
    def bits(self) -> int:
        return 8 if self.minimums is None else 4

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def rows(self, index: slice | torch.Tensor) -> GroupedWeight:
        """Some outputs only, or all of them in another order."""
        minimums = None if self.minimums is None else self.minimums[index]
        return GroupedWeight(self.codes[index], self.scales[index], minimums, self.in_features)

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        values = self.codes.view(*self.scales.shape, GROUP).float() * self.scales.float().unsqueeze(2)
        if self.minimums is not None:
            values += self.minimums.float().unsqueeze(2)
        return values.flatten(1)[:, : self.in_features]


def concatenated(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """All outputs of `weights`, which are of the same bits and inputs, one after another."""
    minimums = [w.minimums for w in weights if w.minimums is not None]
    return GroupedWeight(
        torch.cat([w.codes for w in weights]),
        torch.cat([w.scales for w in weights]),
        torch.cat(minimums) if minimums else None,
        weights[0].in_features,
    )


def quantize_in_groups(weight: torch.Tensor, bits: int) -> GroupedWeight:
    """`weight` [out, in], of any float dtype, in groups of 8 or 4 bits: to the nearest codes."""
    out_features, in_features = weight.shape
    step = max(1, _VALUES_AT_A_TIME // in_features)
    parts = [_quantize(weight[start : start + step].float(), bits) for start in range(0, out_features, step)]
    return concatenated(parts)


def _quantize(weight: torch.Tensor, bits: int) -> GroupedWeight:
    out_features, in_features = weight.shape
    # The last channel is repeated to fill the last group: zeros would widen the range that its codes have to cover.
    missing = -in_features % GROUP
    padded = torch.cat((weight, weight[:, -1:].expand(-1, missing)), dim=1) if missing else weight
    groups = padded.reshape(out_features, -1, GROUP)
    if bits == 8:
        scales, minimums = (groups.abs().amax(2) / 127).half(), None
        codes = _nearest_codes(groups, scales, -127, 127).to(torch.int8)
    else:
        minimums = groups.amin(2).half()
        scales = ((groups.amax(2) - minimums.float()) / 15).half()
        codes = _nearest_codes(groups - minimums.float().unsqueeze(2), scales, 0, 15).to(torch.uint8)
    return GroupedWeight(codes.flatten(1), scales, minimums, in_features)


def _nearest_codes(groups: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    inverse = torch.where(scales > 0, 1 / scales.float(), torch.zeros(()))
    return (groups * inverse.unsqueeze(2)).round_().clamp_(least, most)


class _GroupedWeights(ctypes.Structure):
    """As in native_linear_grouped.cpp."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("bias", c_void_p),
        ("out", c_int64),
        ("in", c_int64),
        ("bits", c_int64),
    )


class GroupedLinear:
    """y = x W^T + b for x [T, in] -> [T, out] of x's dtype (float32, bfloat16 or float16). Inference only."""

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None = None) -> None:
        """`bias` [out]. A packed copy of the weight is made."""
        library = native.library()
        self.bias = None if bias is None else bias.float()
        self._product: NativeProduct | None = None
        self._weight: GroupedWeight | None = None
        if library is None:
            self._weight = weight
            self._tensors = [weight.codes, weight.scales]
            return
        panel = ctypes.c_int()
        library.ifb_linear_panel(ctypes.byref(panel))
        codes = _in_panels(weight.codes, panel.value)
        if weight.bits == 4:
            codes = _in_words(codes)
        scales = _in_panels(weight.scales, panel.value)
        minimums = None if weight.minimums is None else _in_panels(weight.minimums, panel.value)
        self._tensors = [large_pages.copy(t) for t in (codes, scales, minimums) if t is not None]
        addresses = [t.data_ptr() for t in self._tensors] + [None] * (3 - len(self._tensors))
        addresses.append(None if self.bias is None else self.bias.data_ptr())
        structure = _GroupedWeights(*addresses, weight.out_features, weight.in_features, weight.bits)
        self._product = NativeProduct(library.ifb_linear_grouped, structure, weight.out_features)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors) + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        y = self._product(wide) if self._product is not None else self._plain(wide)
        return y.to(x.dtype)

    def native(self) -> NativeLinear | None:
        """For native callers, float32 in and out; valid while this object lives. None without the native library."""
        return None if self._product is None else self._product.native()

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        step = max(1, _VALUES_AT_A_TIME // self._weight.in_features)
        starts = range(0, self._weight.out_features, step)
        weights = (self._weight.rows(slice(start, start + step)).dequantize() for start in starts)
        y = torch.cat([torch.nn.functional.linear(x, weight) for weight in weights], dim=1)
        return y if self.bias is None else y + self.bias


def _in_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, uint8 [panels, N, panel], as int32 [panels, N / 8, panel]: the first in a word's lowest bits."""
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = pairs.view(pairs.shape[0], -1, 4, pairs.shape[2]).transpose(2, 3)
    return parts.contiguous().view(torch.int32).squeeze(3)


def _in_panels(rows: torch.Tensor, panel: int) -> torch.Tensor:
    """[out, N] -> [panels, N, panel], zeros for what the last panel has too many."""
    missing = -rows.shape[0] % panel
    padded = torch.cat((rows, rows.new_zeros(missing, rows.shape[1]))) if missing else rows
    return padded.view(-1, panel, rows.shape[1]).transpose(1, 2).contiguous()
