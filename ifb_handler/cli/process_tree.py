"""End a process and everything it started, leaving no orphan; or have them all stand still for a while."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import psutil

# TorchServe's frontend takes about two seconds to close its ports and end its workers.
_POLITE_SECONDS = 15.0
_FORCE_SECONDS = 2.0


def stop_session(session: int) -> None:
    """Stop the processes of a session (the pid of its leader), even where the leader has ended already.

    Frontends (java) are asked first, for they stop their own workers in order; the rest follows, by force in the end.
    """
    processes = _session(session)
    first = [process for process in processes if _is_java(process)] or processes
    _each(first, psutil.Process.terminate)
    psutil.wait_procs(first, timeout=_POLITE_SECONDS)
    # Looked up again, for a worker may just have been restarted.
    rest = [*{*processes, *_session(session)}]
    _each(rest, psutil.Process.terminate)
    _, alive = psutil.wait_procs(rest, timeout=_FORCE_SECONDS)
    _each(alive, psutil.Process.kill)
    psutil.wait_procs(alive, timeout=_FORCE_SECONDS)


def suspend_session(session: int) -> None:
    """Its processes take no processor's time, and see no signal but the last one, until `resume_session`."""
    _each(_session(session), psutil.Process.suspend)


def resume_session(session: int) -> None:
    _each(_session(session), psutil.Process.resume)


def _session(session: int) -> list[psutil.Process]:
    """The session's processes and all below them, which may have opened sessions of their own."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session:
                found |= {process, *process.children(recursive=True)}
    return list(found)


def _is_java(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name().startswith("java")
    return False


def _each(processes: list[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            do(process)
