"""llama.cpp's server, through its own HTTP: the GGUF file as it is, a slot for each request that runs."""

from __future__ import annotations

from typing import Any

import xllamacpp
from peer_protocol import serve
from stream_client import StreamClient


class LlamaCpp(StreamClient):
    def __init__(self, setup: dict[str, Any]) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = setup["model"]
        params.n_parallel = setup["max_num_seqs"]
        params.n_ctx = setup["max_model_len"] * setup["max_num_seqs"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup["threads"]
        params.cont_batching = True
        params.ctx_shift = False
        params.ui = False
        params.hostnames = ["127.0.0.1"]
        params.port = 0  # any free one
        if setup["max_num_batched_tokens"]:
            params.n_batch = setup["max_num_batched_tokens"]
        for name, value in setup["options"].items():
            setattr(params, name, value)
        self._caching = setup["prefix_caching"]
        self._server = xllamacpp.Server(params)
        super().__init__(f"{self._server.listening_address}/completion", self._asked, _new_tokens)

    def _asked(self, prompt: list[int], num_output_tokens: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": num_output_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": self._caching,
        }

    def close(self) -> None:
        super().close()
        del self._server


def _new_tokens(event: dict[str, Any], count: int) -> list[int]:
    """What it holds back until a character is whole, it never tells the ids of: -1 stands for those."""
    told = event["tokens"]
    return [-1] * (event["tokens_predicted"] - count - len(told)) + told


if __name__ == "__main__":
    serve(LlamaCpp)
