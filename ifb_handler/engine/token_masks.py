"""Which tokens the constrained requests of a step may choose, found out while the model computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ifb_handler.engine.logit_edits import Masks
from ifb_handler.engine.request import Request


class Filling:
    """The masks of a step, while they are being filled: `result` waits for them."""

    def __init__(self, rows: list[int], bits: np.ndarray, parts: list[Future[None]]) -> None:
        self._rows = np.array(rows)
        self._bits = bits
        self._parts = parts

    def result(self) -> Masks:
        for part in self._parts:
            part.result()
        return self._rows, torch.from_numpy(self._bits)


class MaskFiller:
    """Fills a step's masks on threads of its own while the model computes: they depend on no logits of that step."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._words = -(-vocab_size // 32)
        self._eos = np.zeros(self._words, np.uint32)
        for token_id in (i for i in eos_token_ids if i < vocab_size):
            self._eos[token_id // 32] |= np.uint32(1 << token_id % 32)
        # Few: on a CPU the model computes on the same cores. They are started with the first constrained request.
        self._num_threads = max(1, min(8, (os.cpu_count() or 1) // 4))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="ifb-masks")

    def begin(self, requests: Sequence[Request]) -> Filling | None:
        """For the next token of each of the requests, in the order of the rows of logits; None if none is constrained.

        Until the result is there, no one else may use their matchers.
        """
        rows = [row for row, request in enumerate(requests) if request.matcher is not None]
        if not rows:
            return None
        constrained = [requests[row] for row in rows]
        bits = np.empty((len(rows), constrained[0].matcher.num_words), np.int32)
        step = min(self._num_threads, len(rows))
        parts = [self._threads.submit(self._fill, bits[i::step], constrained[i::step]) for i in range(step)]
        return Filling(rows, bits[:, : self._words], parts)

    def _fill(self, bits: np.ndarray, requests: Sequence[Request]) -> None:
        for row, request in zip(bits, requests, strict=True):
            request.matcher.fill(row)
            if request.num_generated < request.params.min_tokens:
                others = row[: self._words].view(np.uint32) & ~self._eos
                if others.any():  # an answer that can not go on ends before min_tokens
                    row[: self._words] = others.view(np.int32)
