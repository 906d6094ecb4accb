"""`ifb bench`: measurements as commands, with JSON output."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class _Benchmarks(TyperGroup):
    """Imports the benchmarks, and with them torch, only when one of them is asked for."""

    def _group(self) -> Any:
        from ifb_handler.cli.bench_capacity import capacity
        from ifb_handler.cli.bench_compare import compare
        from ifb_handler.cli.bench_peers import peers
        from ifb_handler.cli.bench_perplexity import perplexity
        from ifb_handler.cli.bench_scheduler import scheduler
        from ifb_handler.cli.bench_throughput import throughput

        commands = typer.Typer()
        for command in (throughput, compare, capacity, scheduler, peers, perplexity):
            commands.command()(command)
        return typer.main.get_group(commands)

    def list_commands(self, ctx: Any) -> list[str]:
        return self._group().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._group().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Benchmarks,
    help="Measure the engine: throughput, latency, capacity, one way of batching against another, quality.",
    no_args_is_help=True,
)


@app.callback()
def _bench() -> None:
    """Typer wants a command or this."""
