"""What a person sees while a command works: phases with a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

console = Console(highlight=False, soft_wrap=True)


@contextmanager
def phases() -> Iterator[Callable[[str], None]]:
    """Yields a function to call with each phase as it begins; the one before it is then over."""
    if not console.is_terminal:
        yield lambda phase: console.print(f"{phase} ...", markup=False)
        return
    with console.status("") as status:
        yield lambda phase: status.update(f"{phase} ...")


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal all raise KeyboardInterrupt, so that `with` blocks clean up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
