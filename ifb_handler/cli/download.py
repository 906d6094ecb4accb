"""Find a model's files before anything is started, with a progress bar while they come."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ifb_handler.cli.console import console

if TYPE_CHECKING:
    from ifb_handler.models.source import ModelFiles

_SECONDS_BETWEEN_LINES = 5.0


def find_model(model: str) -> ModelFiles:
    """The model's files, downloaded if need be. ModelError when the name, folder, file or network is at fault."""
    from ifb_handler.models.source import resolve

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        told: dict[str, float] = {}

        def progress(done: int, total: int, what: str) -> None:
            if console.is_terminal:
                if what not in tasks:
                    tasks[what] = bars.add_task(what)
                bars.update(tasks[what], completed=done, total=total or None)
                return
            # On a log: a line at the beginning, every few seconds, and one at the end.
            whole = total > 0 and done >= total
            if told.get(what, 0.0) < (math.inf if whole else time.monotonic() - _SECONDS_BETWEEN_LINES):
                told[what] = math.inf if whole else time.monotonic()
                share = f" of {total / 1e6:.0f}" if total else ""
                console.print(f"{what}: {done / 1e6:.0f}{share} MB", markup=False)

        return resolve(model, progress=progress)


def check_model(model: str) -> None:
    """As `find_model`, but what would have to be fetched is taken at its word."""
    from ifb_handler.models import embedded

    fetched = model in embedded.MODELS or re.fullmatch(r"\w[\w.-]*/[\w.-]+", model)
    if not fetched or Path(model).exists():
        find_model(model)
