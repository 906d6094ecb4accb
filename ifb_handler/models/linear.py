"""Matrix products with weights held in the layout that the machine multiplies quickest.

On a CPU the weights are packed once into oneDNN's blocked layout, and the plain copy is dropped. For SmolLM2-135M in
float32 on two AVX-512 cores that halves a step of 32 rows (48 ms of products against 104 ms with `F.linear` and 105 ms
with MKL's packed layout; at one row 17, 43 and 30 ms, at 256 rows 337, 455 and 472 ms).

oneDNN compiles a kernel for each number of rows that it meets, which costs about 0.7 ms and 0.6 MB a weight shape. So
rows are rounded up to a few sizes (`gemm_rows`), and its cache of kernels is kept small.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

# Kernels that oneDNN keeps, over all shapes and sizes: 8 sizes of a model with five shapes, about 25 MB.
_KERNELS_KEPT = 40

# The number of rows that a weight's layout is chosen for. Other numbers run on the same layout.
_TYPICAL_ROWS = 32


class Linear:
    """y = x W^T + b for x [..., in] -> [..., out], in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight` [out, in] and `bias` [out] on one device. A packed weight no longer refers to `weight`'s memory."""
        self.out_features, self.in_features = weight.shape
        self.is_packed = _can_pack(weight)
        self.bias = bias
        if self.is_packed:
            os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS_KEPT))
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        else:
            self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        values = self.out_features * (self.in_features + (self.bias is not None))
        return values * self.weight.element_size()


def gemm_rows(rows: int, packed: bool) -> int:
    """The number of rows, at least `rows`, that a step runs its products on: `rows` itself unless weights are packed.

    Steps of 4 up to 32 rows, of 8 up to 64, of 16 up to 128 and of 32 beyond: at most an eighth is wasted past 32 rows.
    """
    if not packed or rows <= 2:
        return rows
    for limit, step in ((32, 4), (64, 8), (128, 16)):
        if rows <= limit:
            return -(-rows // step) * step
    return -(-rows // 32) * 32


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with zeros after its first axis's last entry, `rows` entries in all; `x` itself when it has as many."""
    missing = rows - x.shape[0]
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
