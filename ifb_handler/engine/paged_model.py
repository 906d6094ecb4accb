"""A decoder with its pages: what the executor keeps of each model that it runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ifb_handler.engine.batch import Batch
from ifb_handler.models.loading import LoadedModel
from ifb_kernels.kv_quantization import page_bytes
from ifb_kernels.layout import LayerKV, RaggedLayout

_KV_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}  # auto: the model's own


class PagedModel:
    """Page b of every model holds the keys and values of the same tokens: the pool counts it once.

    page_bytes      memory of a page, all layers
    dynamic_from    the trained length, of a model whose positions are scaled dynamically beyond it, else None
    """

    def __init__(self, model: LoadedModel, device: torch.device, block_size: int, kv_cache_dtype: str) -> None:
        self.model = model
        self._device = device
        self._block_size = block_size
        shape = model.config
        self.dynamic_from = shape.rope.original_max_position_embeddings if shape.rope.type == "dynamic" else None
        self._kv_dtype = _KV_DTYPES.get(kv_cache_dtype, shape.dtype)
        self.page_bytes = page_bytes(shape.num_layers, block_size, shape.num_kv_heads, shape.head_dim, self._kv_dtype)

    def allocate(self, num_blocks: int) -> None:
        """The pool's memory. Raises MemoryError or RuntimeError if there is none."""
        shape = self.model.config
        self.pages: list[LayerKV] = self.model.decoder.backend.allocate(
            shape.num_layers,
            num_blocks,
            self._block_size,
            shape.num_kv_heads,
            shape.head_dim,
            self._kv_dtype,
            self._device,
        )

    def allocate_host_pages(self, num_pages: int) -> None:
        """Swap space. Raises MemoryError or RuntimeError if there is none."""
        pinned = self._device.type != "cpu"
        self._host = [
            torch.empty((num_pages, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
            for tensor in self._tensors()
        ]

    @torch.inference_mode()
    def forward(self, batch: Batch, wanted: np.ndarray) -> None:
        """Write the batch's keys and values to their pages; `logits_at` tells what comes after the tokens `wanted`.

        `wanted`: flat indices, int64 [S], rising.
        """
        counts = batch.query_starts[1:] - batch.query_starts[:-1]
        layout = RaggedLayout(
            query_starts=self._put(batch.query_starts),
            context_lens=self._put(batch.context_lens),
            block_tables=self._put(batch.block_tables),
            slot_mapping=self._put(batch.slot_mapping),
            max_query_len=int(counts.max()),
            max_context_len=int(batch.context_lens.max()),
        )
        token_ids, positions = self._put(batch.token_ids), self._put(batch.positions)
        lengths = self._rope_lengths(batch, counts)
        self._wanted = wanted
        self._hidden = self.model.decoder.forward(token_ids, positions, layout, self.pages, lengths, self._put(wanted))

    def _rope_lengths(self, batch: Batch, counts: np.ndarray) -> torch.Tensor | None:
        """int64 [T]: see `RotaryTable.of_tokens`; None if none is above the trained length."""
        if self.dynamic_from is None:
            return None
        prompts = np.fromiter((r.num_prompt_tokens for r in batch.requests), np.int64, len(counts))
        lengths = np.maximum(np.repeat(prompts, counts), batch.positions + 1)
        return self._put(lengths) if lengths.max() > self.dynamic_from else None

    @torch.inference_mode()
    def logits_at(self, places: np.ndarray) -> torch.Tensor:
        """float32 [N, V] after the tokens at `places`, int64 [N], of the last batch, which were `wanted`."""
        hidden = self._hidden
        if places is not self._wanted:
            hidden = hidden[self._put(np.searchsorted(self._wanted, places))]
        return self.model.decoder.logits(hidden)

    @torch.inference_mode()
    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        source, target = self._put(np.ascontiguousarray(np.array(pairs, np.int64).T))
        for tensor in self._tensors():
            values = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # float8 is not always supported
            values.index_copy_(0, target, values.index_select(0, source))

    @torch.inference_mode()
    def swap(self, pairs: list[tuple[int, int]], out: bool) -> None:
        """Copy pages, (from, to): to the host's if `out`, else from there."""
        source, target = torch.tensor(pairs).T
        for ours, host in zip(self._tensors(), self._host, strict=True):
            if out:
                host[target] = ours[source.to(self._device)].to("cpu")
            else:
                ours[target.to(self._device)] = host[source].to(self._device)

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for layer in self.pages for tensor in layer.tensors())

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
