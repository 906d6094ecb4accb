"""`ifb serve` as a person uses it: started, asked with the line it prints, stopped, and nothing left behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from ifb_handler.torchserve.archive import build_archive

pytestmark = pytest.mark.timeout(300)


@contextmanager
def _serving(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`ifb serve` on free ports, with a temporary folder of its own under `folder`; never left running."""
    (folder / "t").mkdir()
    command = [sys.executable, "-m", "ifb_handler.cli.main", "serve", "--port", "0", *arguments]
    environ = {**os.environ, "NO_COLOR": "1", "TMPDIR": str(folder / "t")}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def _read_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """The lines up to the first that begins so; the test fails when there is none."""
    lines = []
    for line in process.stdout or ():
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    raise AssertionError("\n".join(lines))


def _stopped(process: subprocess.Popen[str], number: int) -> tuple[int, str, list[psutil.Process]]:
    """Signal it: its exit status, its last words, and which of its processes outlive it."""
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2, "TorchServe's launcher and frontend should run"
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said, psutil.wait_procs(started, timeout=5)[1]


def _lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.glob("*.log"))


def test_ctrl_c_stops_a_server_that_answered_and_leaves_nothing(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with _serving("--max-num-seqs", "4", "--logs", str(logs), folder=tmp_path) as process:
        said = _read_until(process, "Ctrl-C")
        assert any(line.startswith("Ready: smollm2-135m at http://127.0.0.1:") for line in said)
        curl = shlex.split(next(line for line in said if line.strip().startswith("curl ")))
        url, body = curl[2], curl[-1]
        headers = dict(curl[i + 1].split(": ", 1) for i, word in enumerate(curl) if word == "-H")
        before = _lines(logs)
        answer = httpx.post(url, headers=headers, content=body, timeout=60, trust_env=False)
        assert answer.status_code == 200
        events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert len(events) > 20
        # One line in the access log; none for each of the dozens of round trips.
        assert _lines(logs) - before <= 5
        base_url = re.search(r'base_url="([^"]+)"', "\n".join(said))[1]  # type: ignore[index]
        assert httpx.get(f"{base_url}/models", trust_env=False).json()["data"][0]["id"] == "smollm2-135m"
        metrics = next(line.split()[1] for line in said if line.strip().startswith("metrics"))
        assert _eventually(lambda: "ifb_generation_tokens" in httpx.get(metrics, trust_env=False).text)
        status, last, alive = _stopped(process, signal.SIGINT)
    assert (status, last.split("\n")[-2], alive) == (0, "Stopped.", [])
    assert list((tmp_path / "t").iterdir()) == []


def test_with_tokens_only_who_has_one_is_answered(tmp_path: Path) -> None:
    with _serving("--token-auth", folder=tmp_path) as process:
        said = "\n".join(_read_until(process, "Ctrl-C"))
        base_url, key = re.search(r'base_url="([^"]+)", api_key="([^"]+)"', said).groups()  # type: ignore[union-attr]
        assert f"Authorization: Bearer {key}" in said
        assert httpx.get(f"{base_url}/models", trust_env=False).status_code == 400
        with_key = httpx.get(f"{base_url}/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
        assert with_key.status_code == 200
        status, _, alive = _stopped(process, signal.SIGTERM)
    assert (status, alive) == (0, [])


def test_a_start_can_be_stopped_while_the_model_loads(tmp_path: Path) -> None:
    with _serving(folder=tmp_path) as process:
        _read_until(process, "loading the model")
        status, last, alive = _stopped(process, signal.SIGTERM)
    assert (status, last.split("\n")[-2], alive) == (0, "Stopped.", [])
    assert list((tmp_path / "t").iterdir()) == []


def test_an_archive_that_does_not_load_tells_the_workers_own_error(tmp_path: Path) -> None:
    written = build_archive("broken", {}, tmp_path)
    config = written / "model-config.yaml"
    config.write_text(config.read_text().replace("max_num_seqs:", "max_num_seqz:"))
    with _serving(str(written), folder=tmp_path) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "did you mean 'max_num_seqs'?" in said
    assert "Traceback" not in said
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())] == []
    logs = Path(re.search(r"^Logs: (.+)$", said, re.MULTILINE)[1])  # type: ignore[index]
    assert "max_num_seqz" in (logs / "model_log.log").read_text()
    shutil.rmtree(logs.parent)


def _eventually(condition: object, seconds: float = 20.0) -> bool:
    """Metrics are reported once a second, so what was counted is not there at once."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.2)
    return False
