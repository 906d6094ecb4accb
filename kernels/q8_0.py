"""GGUF's Q8_0: blocks of 32 values, stored as a float16 scale and 32 codes of 8 bits; a value is code times scale."""

from __future__ import annotations

import torch

from ifb_kernels import native

_CODES = 32
_BLOCK_BYTES = 2 + _CODES


def widen_q8_0(rows: torch.Tensor) -> torch.Tensor:
    """Rows as stored, uint8 [T, bytes a row] in main memory, contiguous -> float32 [T, values a row]."""
    library = native.library()
    if library is None:
        return widen_q8_0_reference(rows)
    values = torch.empty(rows.shape[0], rows.shape[1] // _BLOCK_BYTES * _CODES)
    library.ifb_widen_q8_0(values.data_ptr(), rows.data_ptr(), rows.numel() // _BLOCK_BYTES)
    return values


def widen_q8_0_reference(rows: torch.Tensor) -> torch.Tensor:
    """`widen_q8_0` in plain torch."""
    blocks = rows.view(rows.shape[0], -1, _BLOCK_BYTES)
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    return (blocks[..., 2:].view(torch.int8).float() * scales).flatten(1)
