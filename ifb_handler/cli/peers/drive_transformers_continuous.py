"""transformers' own continuous batching, with its paged SDPA attention."""

from __future__ import annotations

import time
from typing import Any

import torch
from peer_protocol import serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

_BUDGET = 256
_PAGE_TOKENS = 256  # its own default


class Continuous:
    def __init__(self, setup: dict[str, Any]) -> None:
        torch.set_num_threads(setup["threads"])
        dtype = getattr(torch, setup["dtype"])
        model = AutoModelForCausalLM.from_pretrained(setup["hf_folder"], dtype=dtype, attn_implementation="sdpa").eval()
        shape = model.config
        head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        token_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * dtype.itemsize
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=int(setup["kv_cache_gib"] * 2**30) // (token_bytes * _PAGE_TOKENS),
                max_batch_tokens=setup["max_num_batched_tokens"] or _BUDGET,
                max_requests_per_batch=setup["max_num_seqs"],
                allow_block_sharing=setup["prefix_caching"],
                use_cuda_graph=False,
                **setup["options"],
            ),
        )
        self._manager.start()
        self._num_requests = 0
        self._jobs: dict[str, tuple[int, int]] = {}  # by request: the job, and how many of its tokens were told

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._jobs[request_id] = (index, 0)
        self._manager.add_request(prompt, request_id, num_output_tokens, streaming=True, eos_token_id=-1)

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        output = self._manager.get_result(timeout=seconds or 1e-6)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("its generation thread has ended")
            return []
        if output.error is not None:
            raise RuntimeError(output.error)
        index, count = self._jobs[output.request_id]
        new = output.generated_tokens[count:]
        self._jobs[output.request_id] = (index, count + len(new))
        return [(index, list(new), time.monotonic())] if new else []

    def close(self) -> None:
        self._manager.stop(block=True)


if __name__ == "__main__":
    serve(Continuous)
