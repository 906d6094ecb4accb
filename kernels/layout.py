"""What an attention kernel is told about one ragged batch, and where keys and values lie in the paged pool.

One iteration of in-flight batching runs decode rows (one query token) and prefill chunks (many query tokens) side by
side. All tokens lie on one flat axis; a *row* is one sequence's share of it. Pages hold `block_size` tokens and are
found through block tables, after PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ifb_kernels import large_pages
from ifb_kernels.kv_quantization import SCALE_DTYPE, is_quantized, stored_dtype


@dataclass(frozen=True)
class RaggedLayout:
    """The shape of one ragged batch of R rows and T tokens; all tensors lie on the device of the KV pool.

    query_starts   int32 [R + 1]     row r owns the flat tokens query_starts[r] : query_starts[r + 1]
    context_lens   int32 [R]         tokens of row r in the pool after this step's keys are written; the row's queries
                                     are its last `query_starts[r + 1] - query_starts[r]` positions
    block_tables   int32 [R, B]      physical page of each logical page; entries past ceil(context_len / block_size) are
                                     never read. With a sliding window, those of pages that none of the row's queries
                                     sees are some page's, and what is in it is never used. Rows may be strided, the
                                     last axis is contiguous
    slot_mapping   int64 [T]         where each token's key and value go: page * block_size + offset in the page
    max_query_len, max_context_len   at least the largest of each over the rows
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int

    def only(self, tokens: torch.Tensor) -> RaggedLayout:
        """The queries of the flat `tokens`, int64 [S], alone: each is a row that ends with it."""
        rows = torch.searchsorted(self.query_starts, tokens, right=True) - 1
        later = self.query_starts[rows + 1] - 1 - tokens
        return RaggedLayout(
            query_starts=torch.arange(len(tokens) + 1, dtype=torch.int32, device=tokens.device),
            context_lens=(self.context_lens[rows] - later).int(),
            block_tables=self.block_tables[rows],
            slot_mapping=self.slot_mapping[tokens],
            max_query_len=1,
            max_context_len=self.max_context_len,
        )


@dataclass(frozen=True)
class LayerKV:
    """The pages of one layer. The first axis of every tensor is the physical page, so a page can be copied as it is.

    keys, values               floats, or int8 or uint8 codes (see `kv_quantization.py`)
    key_scales, value_scales   bfloat16, one a token and head; None where keys and values are floats

    The order of the other axes is the attention backend's own business (see `backend.py`).
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a page is made of, for whoever moves pages about."""
        all_four = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(tensor for tensor in all_four if tensor is not None)


def zero_pages(
    num_layers: int,
    key_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerKV]:
    """Pages of `num_layers` layers, all zeros; quantized ones (int8, float8_e4m3fn) with their scales."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if device.type == "cpu":
            return large_pages.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    def layer() -> LayerKV:
        keys, values = zeros(key_shape, stored_dtype(dtype)), zeros(value_shape, stored_dtype(dtype))
        if not is_quantized(dtype):
            return LayerKV(keys, values)
        return LayerKV(keys, values, zeros(scale_shape, SCALE_DTYPE), zeros(scale_shape, SCALE_DTYPE))

    return [layer() for _ in range(num_layers)]


def heads_together(tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` [T, H, D] with each token's heads and channels contiguous: itself, or a copy if its strides are odd."""
    if tokens.stride(2) == 1 and tokens.stride(1) == tokens.shape[2]:
        return tokens
    return tokens.contiguous()
