"""The `ifb` command."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from ifb_handler.cli.archive import archive
from ifb_handler.cli.bench import app as bench_app
from ifb_handler.cli.demo import demo
from ifb_handler.cli.errors import CliError
from ifb_handler.cli.serve import serve
from ifb_handler.engine.errors import ConfigError, EngineError
from ifb_handler.models.errors import ModelError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(serve)
app.command()(archive)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchserve-ifb {version('torchserve-ifb')} (TorchServe {version('torchserve')})")
        raise typer.Exit


@app.callback()
def _ifb(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """In-flight batching of language models on TorchServe.

    `ifb demo` shows it at work on the embedded model; `ifb serve` serves it, or any other model, until Ctrl-C.
    """


def main() -> None:
    """Run the command; failures are one line on stderr. Exit status: 0, 1 for a failure, 2 for wrong usage."""
    try:
        app()
    except (CliError, EngineError, ModelError) as error:
        status = error.exit_status if isinstance(error, CliError) else 2 if isinstance(error, ConfigError) else 1
        print(f"ifb: {error}", file=sys.stderr)
        sys.exit(status)


if __name__ == "__main__":
    main()
