"""One TorchServe as a child process: its own working folder, started, watched until ready, stopped without orphans."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from ifb_handler.cli.console import no_second_interrupt
from ifb_handler.cli.errors import CliError
from ifb_handler.cli.java import Java
from ifb_handler.cli.ports import Ports
from ifb_handler.cli.process_tree import stop_session
from ifb_handler.cli.worker_log import LogLine, WorkerLog

# TorchServe makes a Unix socket in its temporary folder, and the path of one holds at most 107 bytes.
_LONGEST_FOLDER = 85
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ServerOptions:
    """What to serve and where. `archive` is a folder or a .mar; `log_folder` None keeps the logs of a failure only."""

    archive: Path
    model_name: str
    ports: Ports
    java: Java
    host: str = "127.0.0.1"
    token_auth: bool = False
    log_folder: Path | None = None
    startup_seconds: float = 1800.0


class TorchServe:
    """A context manager: started on entry, stopped on exit with every process it started.

    on_line     called with each line that TorchServe or the worker logs, from a thread of its own
    """

    def __init__(self, options: ServerOptions, on_line: Callable[[LogLine], None] | None = None) -> None:
        self.options = options
        self._on_line = on_line
        self._log = WorkerLog()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://{self.options.host}:{self.options.ports.inference}"

    @property
    def model_url(self) -> str:
        """The model's own address; `/v1` after it is an OpenAI client's base_url."""
        return f"{self.url}/predictions/{self.options.model_name}/1.0"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.host}:{self.options.ports.metrics}/metrics"

    def token(self, kind: str = "inference") -> str | None:
        """The key that clients send (`inference` or `management`); None when token authorization is off."""
        if not self.options.token_auth:
            return None
        return str(json.loads(Path(self._folder, "key_file.json").read_text())[kind]["key"])

    def __enter__(self) -> TorchServe:
        self._folder = _working_folder()
        try:
            self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        if self.options.log_folder is None and isinstance(value, CliError):
            # The logs are the evidence; the rest (sockets, links, keys) goes.
            for other in self._folder.iterdir():
                if other.name != "logs":
                    shutil.rmtree(other) if other.is_dir() else other.unlink()
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def log_folder(self) -> Path:
        return (self.options.log_folder or Path(self._folder, "logs")).absolute()

    def wait_ready(self, on_phase: Callable[[str], None]) -> None:
        """Return when the worker answers requests. `on_phase` is told of each phase as it begins.

        Raises CliError, with the worker's own error, when the model does not load or TorchServe ends.
        """
        deadline = time.monotonic() + self.options.startup_seconds
        phase = None
        while not self._worker_is_ready():
            if self._log.worker_died.is_set() or self.returncode is not None:
                # What the dying worker said may still be on its way through the frontend.
                time.sleep(0.5)
                raise CliError(f"{self._log.failure()}\nLogs: {self.log_folder}")
            if time.monotonic() > deadline:
                raise CliError(
                    f"the model was not ready after {self.options.startup_seconds:.0f} s\nLogs: {self.log_folder}"
                )
            now = "loading the model" if self._log.worker_started.is_set() else "starting TorchServe"
            if now != phase:
                phase = now
                on_phase(phase)
            time.sleep(_POLL_SECONDS)

    def wait(self) -> None:
        """Return never, or raise CliError when TorchServe ends by itself (KeyboardInterrupt ends the wait)."""
        while self.returncode is None:
            time.sleep(_POLL_SECONDS)
        raise CliError(f"TorchServe ended by itself.\nLogs: {self.log_folder}")

    @property
    def returncode(self) -> int | None:
        """TorchServe's exit status once it has ended by itself."""
        return self._process.poll() if self._process else None

    def _start(self) -> None:
        options = self.options
        archive = options.archive.resolve()
        temporary = self._folder / "tmp"
        temporary.mkdir()
        self.log_folder.mkdir(parents=True, exist_ok=True)
        properties = self._folder / "config.properties"
        properties.write_text(_properties(options, archive.parent))
        log_config = self._folder / "log4j2.xml"
        log_config.write_text(resources.files("ifb_handler.config").joinpath("log4j2.xml").read_text())
        command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
        command += ["--ts-config", str(properties), "--log-config", str(log_config)]
        command += ["--model-store", str(archive.parent), "--models", f"{options.model_name}={archive.name}"]
        environ = options.java.environment(os.environ)
        environ.pop("TS_CONFIG_FILE", None)
        environ |= {"TMPDIR": str(temporary), "TEMP": str(temporary)}
        environ |= {"LOG_LOCATION": str(self.log_folder), "METRICS_LOCATION": str(self.log_folder)}
        # Its own session: Ctrl-C reaches this process alone, which then stops the others in order.
        self._process = subprocess.Popen(
            command, cwd=self._folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True, name="torchserve-log").start()

    def _read(self, console: IO[str]) -> None:
        for text in console:
            line = self._log.add(text.rstrip("\n"))
            if self._on_line is not None:
                self._on_line(line)

    def _worker_is_ready(self) -> bool:
        url = f"http://127.0.0.1:{self.options.ports.management}/models/{self.options.model_name}"
        try:
            token = self.token("management")
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answer = httpx.get(url, headers=headers, timeout=5.0, trust_env=False)
            return any(worker["status"] == "READY" for worker in answer.json()[0]["workers"])
        except (httpx.HTTPError, OSError, ValueError, LookupError, TypeError):
            return False  # not listening yet, or an error body: the next poll, or the log, tells more

    def _stop(self) -> None:
        """End TorchServe and its workers: politely first, then by force. No process that it started is left."""
        if self._process is None:
            return
        with no_second_interrupt():
            stop_session(self._process.pid)
            self._process.wait()


def _working_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="ifb-")
    if len(folder) > _LONGEST_FOLDER and os.path.isdir("/tmp"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="ifb-", dir="/tmp")
    return Path(folder)


def _properties(options: ServerOptions, model_store: Path) -> str:
    """config/config.properties with this server's addresses, ports and paths."""
    config = resources.files("ifb_handler.config")
    ports, host = options.ports, options.host
    changes: Mapping[str, object] = {
        "inference_address": f"http://{host}:{ports.inference}",
        "management_address": f"http://127.0.0.1:{ports.management}",
        "metrics_address": f"http://{host}:{ports.metrics}",
        "grpc_inference_address": host,
        "grpc_inference_port": ports.grpc_inference,
        "grpc_management_port": ports.grpc_management,
        "disable_token_authorization": str(not options.token_auth).lower(),
        "model_store": model_store,
        "metrics_config": config / "metrics.yaml",
    }
    text = config.joinpath("config.properties").read_text()
    for key, value in changes.items():
        text, count = re.subn(rf"^{key}=.*$", lambda _, k=key, v=value: f"{k}={v}", text, flags=re.MULTILINE)
        assert count == 1, key
    return text
