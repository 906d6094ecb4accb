"""Codes of quantized pages (`kv_quantization.py`) in Triton, made and read by integer and float16 arithmetic alone.

So they are the same bits on every GPU: sm_80 has no conversion from E4M3, and gfx942's own is of another E4M3 (fnuz).
"""

# A Triton kernel's arguments are typed at its launch.
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen_codes(codes, dtype: tl.constexpr):
    """int8 codes, or uint8 bits of E4M3 -> the same numbers in `dtype` (float32, bfloat16 or float16), exactly."""
    if codes.dtype == tl.uint8:
        # Exponent and mantissa placed as float16's leave the number short by 2^8; subnormals come out right too.
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        return codes.to(dtype)


@triton.jit
def store_quantized(x, codes, scale, mask):
    """One token's head `x`, float32, 0 where `mask` is not: its codes to the pointers `codes`, its scale to `scale`."""
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    highest = tl.max(magnitude, 0).to(tl.float32, bitcast=True)  # as integers, a NaN is above infinity
    largest_code = 448.0 if codes.dtype.element_ty == tl.uint8 else 127.0
    quotient = tl.div_rn(highest, largest_code)
    # Rounded to bfloat16 by hand, to the nearest with ties to even: the interpreter's own conversion truncates.
    bits = quotient.to(tl.uint32, bitcast=True)
    rounded = tl.where(quotient == quotient, bits + 0x7FFF + ((bits >> 16) & 1), bits)
    divisor = ((rounded >> 16) << 16).to(tl.float32, bitcast=True)
    tl.store(scale, divisor.to(tl.bfloat16))
    scaled = tl.div_rn(x, tl.where(divisor == 0.0, 1.0, divisor) + tl.zeros_like(x))
    if codes.dtype.element_ty == tl.uint8:
        # To the nearest, ties to even; below E4M3's least normal number, 2^14 ends in units of 2^-9, its subnormals'.
        bits = scaled.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        subnormal = (tl.abs(scaled) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
        code = tl.where(magnitude < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)
        tl.store(codes, code.to(tl.uint8), mask=mask)
    else:
        # Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
        code = (scaled + 12582912.0).to(tl.int32, bitcast=True)
        tl.store(codes, code.to(tl.int8), mask=mask)
