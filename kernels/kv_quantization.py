"""Keys and values in 8 bits: codes, and one scale for each token and head (keys and values each have their own).

    scale = bfloat16(max |x| / largest code),   code = nearest(x / scale) with ties to even,   x ~ code * scale

A head's scale holds for that one token, so a token's codes never change once they are written, whatever comes after it,
and a page is as good as the tokens in it (KIVI, Liu et al. 2024, keeps a scale for a group of tokens instead). Rounding
the scale to bfloat16 costs no range: 127 * (1 + 2^-9) still rounds to 127, and 448 * (1 + 2^-9) to 448.

`torch.int8`            codes -127 .. 127, stored as int8
`torch.float8_e4m3fn`   OCP's E4M3, largest 448, stored as the uint8 of its bits: every device reads bytes, and E4M3 is
                        arithmetic away, while fp8 types are missing on sm_80 and mean other numbers (fnuz) on gfx942

E4M3 keeps the scale too, where others store with scale 1: for 2 bytes beside `head_dim`, keys beyond 448 (which the
biases of Qwen2 come near to) and values below 1/64, E4M3's subnormals, keep their precision. SmolLM2-135M's perplexity
on a text of 1,359 tokens (`ifb bench perplexity` has it) is 21.330 with float32 pages, 21.354 (+0.11 %) with int8,
21.359 (+0.14 %) with E4M3 and 21.391 (+0.28 %) with E4M3 and scale 1.

Memory against a float's for 64 channels: (64 + 2) / 256 = 0.26 of float32, 0.52 of bfloat16.
"""

from __future__ import annotations

import torch

SCALE_DTYPE = torch.bfloat16

_CODES = {torch.int8: torch.int8, torch.float8_e4m3fn: torch.uint8}
QUANTIZED = tuple(_CODES)
_LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether pages of `dtype` hold codes with scales."""
    return dtype in QUANTIZED


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the tensors of pages of `dtype` are made of."""
    return _CODES.get(dtype, dtype)


def page_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a page of `block_size` tokens takes in all layers: keys, values and their scales."""
    head = head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if is_quantized(dtype) else 0)
    return 2 * num_layers * block_size * num_kv_heads * head


def quantize(x: torch.Tensor, codes_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., D] -> codes [..., D] of `codes_dtype` (int8, or uint8 for E4M3) and scales bfloat16 [...].

    A head that is all zeros has scale 0. One that holds an infinity or a NaN has a scale that is not finite either, so
    that what is read back is no number and cannot pass for one.
    """
    x = x.float()
    scales = (x.abs().amax(-1) / _LARGEST[codes_dtype]).to(SCALE_DTYPE)
    divisor = scales.float().unsqueeze(-1)
    scaled = x / torch.where(divisor == 0, 1.0, divisor)
    if codes_dtype == torch.int8:
        return scaled.round().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Codes [..., D] and scales [...] -> float32 [..., D]. Without scales `codes` are plain floats, only widened."""
    if scales is None:
        return codes.float()
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes.float() * scales.float().unsqueeze(-1)
