"""Greedy choice: the index of each row's highest value, found at the speed of memory."""

from __future__ import annotations

import torch

from ifb_kernels import native


def finite_argmax(values: torch.Tensor) -> torch.Tensor:
    """The first index of the highest of each row of `values`, float32 [S, V] -> int64 [S], on the same device.

    -1 where the highest is infinite, or a value is NaN.
    """
    library = native.library_for(values)
    if library is None or values.dtype != torch.float32 or values.stride(1) != 1:
        return finite_argmax_reference(values)
    chosen = torch.empty(len(values), dtype=torch.int64)
    library.ifb_finite_argmax(
        chosen.data_ptr(), values.data_ptr(), values.stride(0), *values.shape, torch.get_num_threads()
    )
    return chosen


def finite_argmax_reference(values: torch.Tensor) -> torch.Tensor:
    """`finite_argmax` in plain torch, on any device."""
    chosen = values.argmax(-1)  # a NaN counts as the highest
    finite = values.gather(1, chosen[:, None]).squeeze(1).isfinite()
    return chosen.masked_fill_(~finite, -1)
