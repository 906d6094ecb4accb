"""A measured system as a process: its driver script, told what to run a line at a time, watched for memory and time.

While it is not asked for anything it stands still, with all that it started: what an idle system does now and then (a
queue that is polled, a heartbeat) would be charged to the one whose turn it is.
"""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ifb_handler.cli.console import no_second_interrupt
from ifb_handler.cli.errors import CliError
from ifb_handler.cli.process_tree import resume_session, stop_session, suspend_session
from ifb_handler.cli.workloads import Job

_LAST_WORDS = 300
_END_SECONDS = 20.0


@dataclass(frozen=True)
class PeerRun:
    """What became of a run's jobs, in seconds from its start.

    arrived         by job
    times           by job, when each token of its answer was there
    tokens          by job
    prompt_tokens   of all jobs, what was said before included
    peak_bytes      most memory that the driver and all that it started had until now; 0 where the system does not tell
    """

    seconds: float
    arrived: list[float]
    times: list[list[float]]
    tokens: list[list[int]]
    prompt_tokens: int
    peak_bytes: int


class PeerProcess:
    """A context manager. CliError where the driver does not start, ends, or takes longer than `timeout` seconds."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout: float, log: Path | None = None
    ) -> None:
        self._name = name
        self._timeout = timeout
        self._log = log.open("w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
            start_new_session=True,  # a Ctrl-C reaches this command alone, which then stops the others
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The end of its stdin asks it to end; what has not ended soon is made to."""
        with no_second_interrupt():
            resume_session(self._process.pid)
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            stop_session(self._process.pid)
            self._process.wait()
            self._log.close()

    def start(self, setup: Mapping[str, Any]) -> None:
        """Load the model."""
        self._ask(setup)

    def run(self, jobs: Sequence[Job], vocab_size: int) -> PeerRun:
        told = self._ask(
            [
                {
                    "prompt": [token % vocab_size for token in job.prompt_token_ids],
                    "num_output_tokens": job.num_output_tokens,
                    "at": job.at,
                    "follows": job.follows,
                    "beside": job.beside,
                }
                for job in jobs
            ]
        )
        answers = told["answers"]
        return PeerRun(
            told["seconds"],
            [answer["arrived"] for answer in answers],
            [answer["times"] for answer in answers],
            [answer["tokens"] for answer in answers],
            sum(answer["prompt_tokens"] for answer in answers),
            self._peak_bytes(),
        )

    def _ask(self, question: Any) -> dict[str, Any]:
        resume_session(self._process.pid)
        try:
            return self._answer(question)
        finally:
            suspend_session(self._process.pid)

    def _answer(self, question: Any) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(question) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            line = self._lines.get(timeout=self._timeout)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            raise CliError(f"{self._name}: no answer within {self._timeout:.0f} s") from None
        if line is None:
            self._process.wait()
            raise CliError(f"{self._name}: {self._last_words()}")
        return json.loads(line)

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        self._log.seek(0)
        said = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        # Errors stand at the left and are what is read; what libraries say at exit comes after them.
        errors = [line for line in said if line.split(":")[0].endswith(("Error", "Exception"))]
        return (errors or said or [f"exit status {self._process.returncode}"])[-1][:_LAST_WORDS]

    def _peak_bytes(self) -> int:
        peak = 0
        with suppress(psutil.Error, OSError):
            driver = psutil.Process(self._process.pid)
            for process in (driver, *driver.children(recursive=True)):
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        peak += int(line.split()[1]) << 10
        return peak
