"""Hugging Face `generate` on static batches: a batch runs until its longest answer ends."""

from __future__ import annotations

import time
from typing import Any

import torch
from peer_protocol import serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

_BATCH_SIZE = 16


class Static:
    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        dtype = getattr(torch, setup["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(setup["hf_folder"], dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None  # else it stands in for one that a call leaves out
        self._batch_size = setup["options"].get("batch_size", _BATCH_SIZE)
        self._queue: list[tuple[int, list[int], int]] = []

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        self._queue.append((index, prompt, num_output_tokens))

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        batch, self._queue = self._queue[: self._batch_size], self._queue[self._batch_size :]
        width = max(len(prompt) for _, prompt, _ in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (_, prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(count for _, _, count in batch)
        config = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=0)
        heard = _Heard()
        self._model.generate(ids, attention_mask=mask, generation_config=config, streamer=heard)
        return [
            (index, [tokens[row]], at)
            for step, (tokens, at) in enumerate(heard.steps)
            for row, (index, _, count) in enumerate(batch)
            if step < count
        ]

    def close(self) -> None:
        del self._model


class _Heard(BaseStreamer):
    """Each step's tokens, a row each, and when they were there; what comes first is the prompts."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], float]] = []
        self._told_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self._told_prompts:
            self.steps.append((value.tolist(), time.monotonic()))
        self._told_prompts = True

    def end(self) -> None:
        pass


if __name__ == "__main__":
    serve(Static)
