"""OpenVINO GenAI's continuous batching pipeline; the GGUF file is loaded directly, in the precision it chooses."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peer_protocol import serve

# Its own default; larger steps were slower.
_BUDGET = 256


class OpenVino:
    def __init__(self, setup: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = setup["kv_cache_gib"]
        scheduler.max_num_seqs = setup["max_num_seqs"]
        scheduler.max_num_batched_tokens = setup["max_num_batched_tokens"] or _BUDGET
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = setup["prefix_caching"]
        properties = {"INFERENCE_NUM_THREADS": setup["threads"], **setup["options"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(setup["model"], scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._num_requests = 0

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_requests += 1
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(self._num_requests, ids, config)
        self._left[index] = num_output_tokens

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        self._pipeline.step()
        now = time.monotonic()
        news = []
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    news.append((index, list(output.generated_ids), now))
                    self._left[index] -= len(output.generated_ids)
            if not self._left[index]:
                del self._handles[index], self._left[index]
        return news

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    serve(OpenVino)
