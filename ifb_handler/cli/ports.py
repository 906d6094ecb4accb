"""The five ports of one TorchServe, checked before it starts."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from ifb_handler.cli.errors import UsageError

# TorchServe's own defaults are 8080, 8081, 8082, 7070 and 7071; one number moves all five.
DEFAULT_PORT = 8080
_GRPC_OFFSET = 7070 - DEFAULT_PORT


@dataclass(frozen=True)
class Ports:
    inference: int
    management: int
    metrics: int
    grpc_inference: int
    grpc_management: int

    @classmethod
    def from_first(cls, port: int, host: str) -> Ports:
        """`port`, the next two for management and metrics, and two for gRPC 1010 below; 0 means five free ports."""
        if port == 0:
            return cls(*_free_ports(5, host))
        ports = cls(port, port + 1, port + 2, port + _GRPC_OFFSET, port + _GRPC_OFFSET + 1)
        if ports.grpc_inference < 1 or ports.metrics > 65535:
            raise UsageError(f"--port: {port} is not from {1 - _GRPC_OFFSET} to 65533, or 0 for any free ports")
        ports._check_free(host)
        return ports

    def _check_free(self, host: str) -> None:
        for purpose, port in asdict(self).items():
            with socket.socket() as probe:
                # As servers do: a port whose last connections are only waiting to be forgotten counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    raise UsageError(
                        f"port {port} ({purpose.replace('_', ' ')}) on {host} cannot be used: {error.strerror}. "
                        "Choose others with --port N, or --port 0 for any free ones."
                    ) from None


def _free_ports(count: int, host: str) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]
