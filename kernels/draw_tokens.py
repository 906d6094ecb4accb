"""Random choice: a token of each row, after temperature, top_k, top_p and min_p; the vocabulary is not sorted."""

from __future__ import annotations

import numpy as np
import torch

from ifb_kernels import native


def draw_tokens(
    chosen: torch.Tensor,
    logits: torch.Tensor,
    rows: np.ndarray,
    *,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    uniforms: np.ndarray,
) -> bool:
    """Writes a drawn token to `chosen` for each of `rows`. False, and nothing is done, where there is no native kernel.

    chosen        int64 [S]: on entry the index of each row's highest logit; where that is -1 it is left
    logits        float32 [S, V], in main memory
    rows          int64 [R], each once
    temperature   above 0; top_p in (0, 1], min_p in [0, 1], uniforms in [0, 1): float64 [R]
    top_k         int64 [R], at least 1; V or more: off

    The filters come in the order of their arguments, as in Hugging Face's `generate`. The token is the first whose
    weight, with those of the kept tokens before it, exceeds `uniforms` times all of them (to float32's rounding), in
    the order of their ids or, under top_k or top_p, of falling logits. A row draws the same token among any others.
    """
    library = native.library_for(logits)
    if library is None or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return False
    settings = [np.ascontiguousarray(each, dtype=np.float64) for each in (temperature, top_p, min_p, uniforms)]
    limits, rows = (np.ascontiguousarray(each, dtype=np.int64) for each in (top_k, rows))
    temperature, top_p, min_p, uniforms = settings
    library.ifb_draw_tokens(
        chosen.data_ptr(),
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.ctypes.data,
        len(rows),
        temperature.ctypes.data,
        limits.ctypes.data,
        top_p.ctypes.data,
        min_p.ctypes.data,
        uniforms.ctypes.data,
        torch.get_num_threads(),
    )
    return True
