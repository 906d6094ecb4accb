"""The benchmarks' tables on a terminal, or in a log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_LOG_WIDTH = 200


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column to the left, numbers to the right. What is no terminal is taken to be wide."""
    table = Table(title=title, box=None, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=_LOG_WIDTH)).print(table)


def machine() -> dict[str, float | int | None]:
    """What a reader of measured times should know: above `cpus`, the load has slowed them."""
    return {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}
