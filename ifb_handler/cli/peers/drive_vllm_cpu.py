"""vLLM's engine on the CPU, stepped in this process: what its server adds on two cores is not counted against it."""

from __future__ import annotations

import os
import time
from typing import Any

from peer_protocol import serve


class Vllm:
    def __init__(self, setup: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(setup["kv_cache_gib"]),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup['threads'] - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._params = SamplingParams
        options = {"max_num_batched_tokens": setup["max_num_batched_tokens"], **setup["options"]}
        arguments = EngineArgs(
            model=setup["hf_folder"],
            dtype=setup["dtype"],
            max_num_seqs=setup["max_num_seqs"],
            max_model_len=setup["max_model_len"],
            enable_prefix_caching=setup["prefix_caching"],
            **{name: value for name, value in options.items() if value is not None},
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._num_requests = 0
        self._jobs: dict[str, int] = {}

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        params = self._params(
            temperature=0.0,
            max_tokens=num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._jobs[request_id] = index
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        outputs = self._engine.step()
        now = time.monotonic()
        news = [(self._jobs[output.request_id], list(output.outputs[0].token_ids), now) for output in outputs]
        for output in outputs:
            if output.finished:
                del self._jobs[output.request_id]
        return news

    def close(self) -> None:
        del self._engine


if __name__ == "__main__":
    serve(Vllm)
