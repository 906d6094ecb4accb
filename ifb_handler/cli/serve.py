"""`ifb serve`: TorchServe in the foreground on one model, stopped by Ctrl-C."""

from __future__ import annotations

import json
import shlex
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ifb_handler.cli import options
from ifb_handler.cli.console import console, phases, stop_signals_interrupt
from ifb_handler.cli.download import find_model
from ifb_handler.cli.errors import CliError, UsageError
from ifb_handler.cli.java import find_java
from ifb_handler.cli.ports import DEFAULT_PORT, Ports
from ifb_handler.cli.server import ServerOptions, TorchServe
from ifb_handler.cli.worker_log import LogLine
from ifb_handler.torchserve.archive import ArchiveError, archive_model_name, build_archive, default_archive_name

_LOCAL_HOSTS = ("127.0.0.1", "localhost")


def serve(
    archive: Annotated[
        Path | None,
        typer.Argument(
            help="A folder or .mar that `ifb archive` wrote. Without it one is made for this run.", show_default=False
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    name: options.Name = None,
    port: Annotated[
        int,
        typer.Option(
            help="Where clients call; management and metrics take the next two ports, gRPC port - 1010 and "
            "the one after. 0: any free ones."
        ),
    ] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address for clients. Management stays on 127.0.0.1.")] = "127.0.0.1",
    token_auth: Annotated[
        bool | None,
        typer.Option(
            "--token-auth/--no-token-auth",
            show_default="no on 127.0.0.1, yes elsewhere",
            help="Ask clients for TorchServe's token.",
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(help="Keep TorchServe's logs in this folder.", show_default="only those of a failure"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show TorchServe's own log lines.")] = False,
    asynchronous: options.Asynchronous = False,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    settings: options.Settings = None,
) -> None:
    """Serve a model with TorchServe until Ctrl-C.

    Prints a curl line and the base_url for OpenAI clients when the model answers.
    """
    engine = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "device": device,
    }
    if archive is not None and (model != options.DEFAULT_MODEL or settings or asynchronous or any(engine.values())):
        raise UsageError("an archive brings its own model and engine options: give the archive or the options")
    choice = options.choose_model(model, settings, **engine)
    java = find_java()
    ports = Ports.from_first(port, host)
    if token_auth is None:
        token_auth = host not in _LOCAL_HOSTS
    with stop_signals_interrupt():
        try:
            with archive_to_serve(archive, choice, name, asynchronous) as (path, model_name):
                served = ServerOptions(path, model_name, ports, java, host, token_auth, logs)
                _serve_until_stopped(served, verbose)
        except KeyboardInterrupt:
            console.print("Stopped.")


@contextmanager
def archive_to_serve(
    archive: Path | None, choice: options.ModelChoice, name: str | None, asynchronous: bool = False
) -> Iterator[tuple[Path, str]]:
    """The archive and its name in URLs; one made for this run is removed again."""
    try:
        if archive is not None:
            yield archive, name or archive_model_name(archive)
            return
        find_model(choice.model)
        name = name or default_archive_name(choice.model)
        with tempfile.TemporaryDirectory(prefix="ifb-archive-") as store:
            yield build_archive(name, choice.handler_options, Path(store), asynchronous=asynchronous), name
    except ArchiveError as error:
        raise CliError(str(error)) from None


def _serve_until_stopped(served: ServerOptions, verbose: bool) -> None:
    ready = threading.Event()

    def show(line: LogLine) -> None:
        if verbose or (ready.is_set() and line.level in ("WARN", "ERROR", "FATAL")):
            console.print(line.text, markup=False)

    with TorchServe(served, on_line=show) as server:
        with phases() as begin:
            server.wait_ready(begin)
        ready.set()
        _say_ready(server)
        server.wait()


def _say_ready(server: TorchServe) -> None:
    token = server.token()
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": True}
    curl = ["curl", "-N", f"{server.model_url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    curl += ["-H", f"Authorization: Bearer {token}"] if token else []
    curl += ["-d", json.dumps(body)]
    key = f'"{token}"' if token else '"none"'
    lines = [
        f"Ready: {server.options.model_name} at {server.url}",
        "",
        f"  {shlex.join(curl)}",
        "",
        f'  OpenAI(base_url="{server.model_url}/v1", api_key={key})',
        "",
        f"  metrics    {server.metrics_url}",
        f"  logs       {server.log_folder}",
        "",
        "Ctrl-C stops it.",
    ]
    console.print("\n".join(lines), markup=False)
