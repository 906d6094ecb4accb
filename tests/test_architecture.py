"""The house: imports point down, the code is clean, and nothing of ours hides a published package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_point_down() -> None:
    run(sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())")


@pytest.mark.parametrize("command", [("check",), ("format", "--check")])
def test_ruff_is_content(command: tuple[str, ...]) -> None:
    run(sys.executable, "-m", "ruff", *command, ".")


def test_the_kernels_folder_is_not_importable_under_the_name_of_a_published_package(tmp_path: Path) -> None:
    code = "import importlib.util as u; assert u.find_spec('ifb_kernels'); assert u.find_spec('kernels') is None"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_quick_because_torch_is_left_for_later(tmp_path: Path) -> None:
    code = "import sys, ifb_handler, ifb_handler.handler; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_answers_without_importing_torch(tmp_path: Path) -> None:
    code = "import sys, ifb_handler.cli.main; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
