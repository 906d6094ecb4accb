"""`ifb bench`: measurements as commands, with JSON output."""

from __future__ import annotations

import typer

from ifb_handler.cli.bench_capacity import capacity
from ifb_handler.cli.bench_compare import compare
from ifb_handler.cli.bench_scheduler import scheduler
from ifb_handler.cli.bench_throughput import throughput

app = typer.Typer(
    help="Measure the engine: throughput, latency, capacity, and one way of batching against another.",
    no_args_is_help=True,
)
for command in (throughput, compare, capacity, scheduler):
    app.command()(command)
