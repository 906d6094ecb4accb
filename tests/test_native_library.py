"""The native library builds itself once, and can be done without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ifb_kernels import native

BUILD = """
import logging
logging.basicConfig(level=logging.INFO)
import torch
from ifb_kernels.backend import select_backend
from ifb_kernels.rms_norm import rms_norm
from ifb_kernels.synthetic import synthetic_batch
backend = select_backend(torch.device("cpu"))
batch = synthetic_batch([(1, 40), (20, 20)], num_heads=2, num_kv_heads=1, head_dim=16)
reference = select_backend(torch.device("cpu"), "reference")
expected = batch.attend(reference, batch.fill(reference))
torch.testing.assert_close(batch.attend(backend, batch.fill(backend)), expected, rtol=0, atol=2e-6)
rms_norm(torch.ones(200, 1000), torch.ones(1000), 1e-5)
print("backend:", backend.name)
"""


def start(script: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "IFB_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_build_at_once_leave_one_library(tmp_path: Path) -> None:
    processes = [start(BUILD, tmp_path) for _ in range(2)]
    for process in processes:
        output, log = process.communicate(timeout=300)
        assert process.returncode == 0, log
        assert output == "backend: cpu\n", log
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize("compiler", ["/nonexistent", "false"])
def test_without_a_working_compiler_plain_torch_takes_over_and_says_so(tmp_path: Path, compiler: str) -> None:
    process = start(BUILD, tmp_path, CXX=compiler)
    output, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    assert output == "backend: torch\n"
    assert log.count("native CPU kernels are not available, plain torch takes their place") == 1
    assert compiler in log
    assert list(tmp_path.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(BUILD, tmp_path / "file" / "cache", TMPDIR=str(tmp_path))
    output, log = process.communicate(timeout=300)
    assert process.returncode == 0, log
    assert output == "backend: cpu\n"
    assert "no cache folder for native kernels" in log
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_librarys_name_tells_sources_flags_and_compiler_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = native._fingerprint(["g++"])
    assert native._fingerprint(["g++"]) == plain
    assert native._fingerprint(["g++", "-g"]) != plain
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O2"))
    assert native._fingerprint(["g++"]) != plain
