"""A real TorchServe with the embedded model, on free ports of 127.0.0.1, for the tests that need one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ifb_handler.cli.java import find_java
from ifb_handler.cli.ports import Ports
from ifb_handler.cli.server import ServerOptions, TorchServe
from ifb_handler.torchserve.archive import build_archive

NAME = "m"


class Served:
    """The running server, as its clients and its operator see it."""

    def __init__(self, server: TorchServe, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.url = server.model_url
        self.bare_url = server.model_url.rpartition("/")[0]
        self.metrics_url = server.metrics_url
        self.grpc_address = f"127.0.0.1:{server.options.ports.grpc_inference}"
        self.ping_url = f"{server.url}/ping"
        self.management_url = f"http://127.0.0.1:{server.options.ports.management}/models/{NAME}"

    def worker(self) -> dict[str, Any]:
        return httpx.get(self.management_url, trust_env=False).json()[0]["workers"][0]

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}/{path}", timeout=60, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def stats(self) -> dict[str, Any]:
        return self.get("engine/stats")

    def is_idle(self) -> bool:
        stats = self.stats()
        return (stats["num_requests_running"], stats["num_requests_waiting"], stats["used_blocks"]) == (0, 0, 0)

    def metrics(self) -> dict[str, float]:
        """What Prometheus reads: series, as written, without TorchServe's own three labels."""
        series = {}
        for line in httpx.get(self.metrics_url, trust_env=False).text.splitlines():
            if line.startswith("ifb_"):
                name, _, value = line.rpartition(" ")
                metric, _, labels = name.rstrip(",}").partition("{")
                own = [label for label in labels.split(",") if label.split("=")[0] in ("finished_reason", "le")]
                series[metric + "".join(f"[{label}]" for label in own)] = float(value)
        return series


@contextmanager
def torchserve(folder: Path, asynchronous: bool = False, **options: Any) -> Iterator[Served]:
    """Archive the embedded model with these engine options, start TorchServe, and stop it with all its processes."""
    options = {"model": "smollm2-135m", "device": "cpu", **options}
    archive = build_archive(NAME, options, folder, asynchronous=asynchronous)
    server_options = ServerOptions(
        archive, NAME, Ports.from_first(0, "127.0.0.1"), find_java(), log_folder=folder / "logs", startup_seconds=300
    )
    with TorchServe(server_options) as server:
        server.wait_ready(lambda phase: None)
        yield Served(server, asynchronous)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def read_events(lines: Iterator[str]) -> Iterator[Any]:
    """The bodies of server-sent events; ends at [DONE], which must come."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")
