"""Runs a decoder on ragged batches laid out by hand, as an engine would: rows of different sequences, page by page."""

from __future__ import annotations

import random

import torch

from ifb_handler.models.loading import LoadedModel
from ifb_kernels.layout import LayerKV, RaggedLayout

BLOCK_SIZE = 16


class RaggedRunner:
    """Feeds chunks of token sequences to a decoder; each sequence's pages lie scattered over the pool."""

    def __init__(
        self,
        model: LoadedModel,
        sequences: list[list[int]],
        device: torch.device | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.sequences = sequences
        self.device = device or torch.device("cpu")
        self.computed = [0] * len(sequences)
        pages_each = max(-(-len(s) // BLOCK_SIZE) for s in sequences)
        pages = list(range(pages_each * len(sequences)))
        random.Random(0).shuffle(pages)
        self.block_tables = torch.tensor(pages, dtype=torch.int32, device=self.device).view(len(sequences), pages_each)
        config = model.config
        self.pages: list[LayerKV] = model.decoder.backend.allocate(
            config.num_layers,
            len(pages),
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype or config.dtype,
            self.device,
        )

    def step(self, chunks: dict[int, int]) -> dict[int, torch.Tensor]:
        """Advance sequence i by chunks[i] tokens, all in one batch: the logits of each of those tokens, by sequence."""
        logits = self.model.decoder.logits(self.forward(chunks))
        return dict(zip(chunks, logits.split(list(chunks.values())), strict=True))

    def forward(self, chunks: dict[int, int], wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Advance sequence i by chunks[i] tokens, all in one batch: the hidden states of the `wanted` ones."""
        token_ids, positions, slots, starts, contexts = [], [], [], [0], []
        for index, length in chunks.items():
            begin = self.computed[index]
            end = begin + length
            token_ids += self.sequences[index][begin:end]
            positions += range(begin, end)
            table = self.block_tables[index].tolist()
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(begin, end)]
            starts.append(starts[-1] + length)
            contexts.append(end)
            self.computed[index] = end
        layout = RaggedLayout(
            query_starts=self._tensor(starts, torch.int32),
            context_lens=self._tensor(contexts, torch.int32),
            block_tables=self.block_tables[list(chunks)],
            slot_mapping=self._tensor(slots, torch.int64),
            max_query_len=max(chunks.values()),
            max_context_len=max(contexts),
        )
        ids, places = self._tensor(token_ids, torch.int64), self._tensor(positions, torch.int64)
        return self.model.decoder.forward(ids, places, layout, self.pages, wanted=wanted)

    def run(self, chunk_sizes: list[int]) -> list[torch.Tensor]:
        """All logits of every sequence. Sequence i goes on by chunk_sizes[i] tokens a step until all are done."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while chunks := {
            i: min(chunk_sizes[i], len(s) - self.computed[i])
            for i, s in enumerate(self.sequences)
            if self.computed[i] < len(s)
        }:
            for index, logits in self.step(chunks).items():
                parts[index].append(logits)
        return [torch.cat(part) for part in parts]

    def _tensor(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
