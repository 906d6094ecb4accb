"""Read TorchServe's console: has the worker started, has it died, and of what."""

from __future__ import annotations

import re
import threading
from collections import deque
from dataclasses import dataclass

# The pattern of config/log4j2.xml: time, level, thread, logger, message.
_LINE = re.compile(r"^\S+ \[(?P<level>\w+) *\] (?P<thread>\S+) (?P<logger>\S+) - (?P<message>.*)$")
_LOAD_FAILED = re.compile(r"Failed to load model \S+, exception (?P<reason>.+)")
# The last line of a traceback, and what may stand before the class's own name.
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(?P<text>\w*(?:Error|Exception|Interrupt|Exit)\b.*)$")
_KEPT_LINES = 2000
# Warns that it looked for a worker before there was one.
_COLLECTOR = "org.pytorch.serve.metrics.MetricCollector"


@dataclass(frozen=True)
class LogLine:
    """One console line. `level` is empty for lines that did not go through log4j (the JVM's own, stack traces)."""

    text: str
    level: str = ""
    logger: str = ""
    message: str = ""

    @property
    def from_worker(self) -> bool:
        """Whether the Python worker wrote it (on stdout, or on stderr as level WARN)."""
        return self.logger == "MODEL_LOG"


class WorkerLog:
    """The newest lines, and the two events in them that a start waits for."""

    def __init__(self) -> None:
        self.worker_started = threading.Event()
        self.worker_died = threading.Event()
        self._lines: deque[LogLine] = deque(maxlen=_KEPT_LINES)

    def add(self, text: str) -> LogLine:
        match = _LINE.match(text)
        line = LogLine(text, match["level"], match["logger"], match["message"]) if match else LogLine(text)
        self._lines.append(line)
        if line.from_worker and line.message == "Torch worker started.":
            self.worker_started.set()
        elif line.message.startswith(("Retry worker:", "Failed to load model:")) and not line.from_worker:
            self.worker_died.set()
        return line

    def failure(self) -> str:
        """Why the model did not load, in the worker's words where it left any, else TorchServe's."""
        lines = list(self._lines)
        said = [line.message for line in lines if line.from_worker]
        for message in said:
            if match := _LOAD_FAILED.match(message):
                return f"the model could not be loaded: {match['reason']}"
        for message in reversed(said):
            if match := _EXCEPTION.match(message):
                return f"the model could not be loaded: {match['text']}"
        # Of Java's stack traces, the line after the message names the cause.
        texts = [line.message or line.text for line in lines]
        errors = [
            f"{line.message}: {texts[i + 1]}" if texts[i + 1 : i + 2] and not lines[i + 1].level else line.message
            for i, line in enumerate(lines)
            if not line.from_worker and line.level in ("WARN", "ERROR", "FATAL") and line.logger != _COLLECTOR
        ]
        last = errors[:3] or [text for text in texts if text.strip()][-5:] or ["it said nothing"]
        return "TorchServe could not start: " + "\n".join(last)
