"""This engine: alone in Python, or with `http` behind TorchServe. `options` are the engine's own."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from peer_protocol import Client, serve
from stream_client import StreamClient


class Alone:
    def __init__(self, setup: dict[str, Any]) -> None:
        from ifb_handler.engine.engine import Engine
        from ifb_handler.engine.mailbox import Mailbox

        options = _options(setup)
        self._engine = Engine(options.pop("model"), **options)
        self._mailbox = Mailbox()
        self._jobs: dict[str, int] = {}
        self._num_requests = 0

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        from ifb_handler.engine.request import GenerationRequest
        from ifb_handler.engine.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        self._num_requests += 1
        request_id = str(self._num_requests)
        self._jobs[request_id] = index
        self._engine.submit(GenerationRequest(request_id, prompt, params), self._mailbox)

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        outputs = self._mailbox.collect(seconds)
        now = time.monotonic()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [(self._jobs[output.request_id], output.token_ids, now) for output in outputs if output.token_ids]

    def close(self) -> None:
        self._engine.check()
        self._engine.shutdown()


class OverHttp(StreamClient):
    def __init__(self, setup: dict[str, Any]) -> None:
        from ifb_handler.cli.java import find_java
        from ifb_handler.cli.options import ModelChoice
        from ifb_handler.cli.ports import Ports
        from ifb_handler.cli.serve import archive_to_serve
        from ifb_handler.cli.server import ServerOptions, TorchServe

        options = _options(setup)
        self._running = ExitStack()
        with ExitStack() as starting:
            choice = ModelChoice(options.pop("model"), options)
            archive, name = starting.enter_context(archive_to_serve(None, choice, None))
            server = TorchServe(ServerOptions(archive, name, Ports.from_first(0, "127.0.0.1"), find_java()))
            starting.enter_context(server)
            server.wait_ready(lambda phase: None)
            self._running = starting.pop_all()
        super().__init__(server.model_url, self._asked, lambda event, count: event["token_ids"])

    def _asked(self, prompt: list[int], num_output_tokens: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }

    def close(self) -> None:
        super().close()
        self._running.close()


def _options(setup: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": setup["model"] or setup["hf_folder"],
        "dtype": setup["dtype"],
        "max_num_seqs": setup["max_num_seqs"],
        "max_num_batched_tokens": setup["max_num_batched_tokens"],
        "enable_prefix_caching": setup["prefix_caching"],
        "cpu_kv_cache_gib": setup["kv_cache_gib"],
        "num_threads": setup["threads"],
        **setup["options"],
    }


def _load(setup: dict[str, Any]) -> Client:
    return OverHttp(setup) if "http" in sys.argv[1:] else Alone(setup)


if __name__ == "__main__":
    serve(_load)
