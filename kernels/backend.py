"""The one interface between the decoder and the kernels: write keys and values to pages, attend over pages."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ifb_kernels.layout import LayerKV, RaggedLayout


class AttentionBackend(ABC):
    """Paged attention on one kind of device. Stateless: the pool's tensors are passed in."""

    name: str

    @abstractmethod
    def allocate(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[LayerKV]:
        """Make the pool's memory in its own layout, 2 * block_size * num_kv_heads * head_dim values a page.

        `dtype` float32, bfloat16, float16, or the quantized int8 and float8_e4m3fn (see `kv_quantization.py`).
        """

    @abstractmethod
    def write(self, keys: torch.Tensor, values: torch.Tensor, pages: LayerKV, layout: RaggedLayout) -> None:
        """Store `keys` and `values`, [T, num_kv_heads, head_dim] each (rows may be strided), at `slot_mapping`.

        Quantized pages get each token's codes and scales here; nothing that is written later changes them.
        """

    @abstractmethod
    def attend(
        self,
        queries: torch.Tensor,
        pages: LayerKV,
        layout: RaggedLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of `queries` [T, num_heads, head_dim] over each row's own pages -> [T, num_heads, head_dim].

        A query at position p sees keys at positions max(0, p - sliding_window + 1) .. p. Scores, softmax and the
        weighted sum are computed in float32 whatever the pages' dtype. A query sees its own chunk's keys, and its own,
        as the pages hold them (quantized, if they are), so that how a prompt was cut does not show.
        """


def select_backend(device: torch.device, name: str | None = None) -> AttentionBackend:
    """The backend for `device`: Triton on CUDA (and ROCm), the native CPU kernel where it builds, else plain torch.

    `name` (`triton`, `cpu`, `torch`, `reference`) overrides the choice. Raises ValueError on an unknown name, or on one
    that cannot run on `device`.
    """
    from ifb_kernels.registry import build

    return build(device, name)
