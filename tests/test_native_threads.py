"""Helpers of the native kernels: every task is done once, whoever calls, and a caller never needs them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ifb_kernels import native

KERNELS = Path(native.__file__).parent
STRESS = Path(__file__).parent / "native_threads_stress.cpp"


def built(folder: Path, *flags: str) -> Path | None:
    """None where the machine's compiler cannot."""
    try:
        compiler = native._compiler()
        program = folder / "stress"
        sources = [str(STRESS), str(KERNELS / "native_threads.cpp")]
        native._run([*compiler, *native._FLAGS, *flags, f"-I{KERNELS}", *sources, "-o", str(program)])
    except native.NativeBuildError:
        return None
    return program


def test_every_task_is_done_once_for_callers_at_the_same_time_and_in_forked_processes(tmp_path: Path) -> None:
    program = built(tmp_path)
    if program is None:
        pytest.skip("there is no C++ compiler")
    done = subprocess.run([program, "5000", "5"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_the_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    program = built(tmp_path, "-fsanitize=thread", "-g")
    if program is None:
        pytest.skip("there is no C++ compiler with a thread sanitizer")
    done = subprocess.run([program, "1500", "0"], capture_output=True, text=True, timeout=120, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this system")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


COMPUTE = """
import os
import torch
from ifb_kernels.finite_argmax import finite_argmax
torch.set_num_threads(2)
values = torch.randn(64, 20_000)
expected = values.argmax(1).tolist()
assert finite_argmax(values).tolist() == expected
"""


def run(script: str) -> str:
    if native.library() is None:
        pytest.skip("there is no native library")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_helper_leaves_signals_to_pythons_threads() -> None:
    told = run(
        COMPUTE + "for task in os.listdir('/proc/self/task'):\n"
        "    status = dict(line.split(':', 1) for line in open(f'/proc/self/task/{task}/status'))\n"
        "    if status['Name'].strip() == 'ifb-helper':\n"
        "        print(status['SigBlk'])\n"
    )
    blocked = [int(mask, 16) for mask in told.split()]
    assert len(blocked) == 1, "one helper beside the thread that calls"
    for number in (signal.SIGINT, signal.SIGTERM):
        assert blocked[0] >> (number - 1) & 1


def test_a_forked_process_computes_without_its_parents_helpers() -> None:
    run(
        COMPUTE + "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(finite_argmax(values).tolist() != expected)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
