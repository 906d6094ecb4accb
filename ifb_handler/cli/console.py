"""What a person sees while a command works: phases with a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

console = Console(highlight=False, soft_wrap=True)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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

    before = {number: signal.signal(number, interrupt) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def no_second_interrupt() -> Iterator[None]:
    """A second Ctrl-C while stopping would leave processes behind; stopping takes seconds, and is bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
