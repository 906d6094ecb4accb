"""What loading and serving take of main memory, as the peak resident memory of a process of its own shows it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ifb_handler.models.linear import QUANTIZATIONS
from ifb_handler.models.memory import release_startup_code
from ifb_handler.models.source import resolve

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells a process's peak")

# The weights, and what loading them may take beyond torch itself. The tied embedding's rows are kept a second time, for
# lookups, in the file's 8 bits: 30 MB.
MOST_WEIGHT_BYTES = {None: 127e6, "int8": 166e6, "int8_weight_only": 127e6, "int4_weight_only": 127e6}
MOST_TO_LOAD = 100e6

LOADING = """
import torch
from ifb_handler.models.loading import load_model
from ifb_handler.models.source import resolve
from ifb_kernels.backend import select_backend

cpu = torch.device("cpu")
options = dict(dtype="float32", device=cpu, backend=select_backend(cpu))
before = peak()
model = load_model(resolve("smollm2-135m"), quantization={quantization!r}, **options)
print(model.weight_bytes, peak() - before)
"""
SERVING = """
import random
from ifb_handler.engine.engine import Engine
from ifb_handler.engine.sampling_params import SamplingParams

source = random.Random(0)
prompts = [[source.randint(100, 40_000) for _ in range(source.randint(16, 256))] for _ in range(32)]
params = [SamplingParams(max_tokens=source.randint(4, 24), ignore_eos=True, temperature=i % 2) for i in range(32)]
with Engine("smollm2-135m", quantization={quantization!r}, max_num_seqs=32, cpu_kv_cache_gib=0.25) as engine:
    engine.generate(prompts, params)
    print(engine.weight_bytes + engine.pool_bytes, peak())
"""


def run(code: str) -> list[int]:
    """The integers that `code` prints; in it `peak()` is the most memory that the process has had so far, in bytes."""
    resolve("smollm2-135m")
    peak = "lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024"
    said = subprocess.run([sys.executable, "-c", f"peak = {peak}\n{code}"], capture_output=True, text=True, check=True)
    return [int(word) for word in said.stdout.split()]


@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS])
def test_loading_takes_the_weights_and_little_more(quantization: str | None) -> None:
    weight_bytes, taken = run(LOADING.format(quantization=quantization))
    assert weight_bytes < MOST_WEIGHT_BYTES[quantization]
    assert taken < weight_bytes + MOST_TO_LOAD


def test_loading_floats_takes_them_once() -> None:
    floats = "from ifb_handler.models.gguf_file import GGUFFile; GGUFFile.grouped = lambda self, name: None"
    weight_bytes, taken = run(floats + LOADING.format(quantization=None))
    assert 565e6 < weight_bytes < 573e6
    assert taken < weight_bytes + 60e6


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="a GPU's torch is larger")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_engine_at_work_takes_its_weights_its_pool_and_300_mb(quantization: str | None) -> None:
    weights_and_pool, peak = run(SERVING.format(quantization=quantization))
    assert peak < weights_and_pool + 300e6


def test_code_that_was_let_go_runs_again() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator)
    before = torch.linalg.svdvals(x)
    release_startup_code()
    assert torch.equal(torch.linalg.svdvals(x), before)
