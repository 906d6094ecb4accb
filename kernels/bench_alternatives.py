"""Times what was chosen beside what was not: `python -m ifb_kernels.bench_alternatives`.

The fused operations of a decoder layer: eager torch, torch.compile with dynamic shapes, the native kernels. Attention
over pages: the native kernel, gather + SDPA (the `torch` backend), numba (where it is installed; the package does not
require it) and compiled FlexAttention, each over pages in the layout that suits it and checked against the first before
it is timed. The shapes are a layer of SmolLM2-135M in float32. BENCHMARKS.md has what came out.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ifb_kernels import native
from ifb_kernels.attention_alternatives import FlexBackend, NumbaBackend
from ifb_kernels.backend import AttentionBackend, select_backend
from ifb_kernels.bench import CASES, POOL_BYTES, attention_ms, quickest_ms
from ifb_kernels.rms_norm import rms_norm, rms_norm_reference
from ifb_kernels.rotary_embedding import rotary_embedding, rotary_embedding_reference
from ifb_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from ifb_kernels.synthetic import synthetic_batch

CPU = torch.device("cpu")
TOKENS = (1, 32, 256)
_TOLERANCE = 1e-4


OPERATIONS: dict[str, Callable[[], tuple[Callable[..., Any], ...]]] = {
    "eager": lambda: _REFERENCES,
    "compiled": lambda: tuple(torch.compile(each, dynamic=True, fullgraph=True) for each in _REFERENCES),
    "native": lambda: (rms_norm, rotary_embedding, silu_and_mul),
}
_REFERENCES = (rms_norm_reference, rotary_embedding_reference, silu_and_mul_reference)

ATTENTION: dict[str, Callable[[], AttentionBackend]] = {
    "native": lambda: select_backend(CPU, "cpu"),
    "gather_sdpa": lambda: select_backend(CPU, "torch"),
    "numba": lambda: NumbaBackend(native.library()),
    "flex_attention": FlexBackend,
}


def operations_ms(form: str, repeat: int) -> dict[str, float]:
    """Milliseconds a call at several numbers of tokens; and of what comes before the first result, at all of them."""
    norm, rotate, gate = OPERATIONS[form]()
    figures = {}
    first = 0.0
    for tokens in TOKENS[::-1]:  # what is compiled first must not be the special case of one
        x, residual, weight = torch.randn(tokens, 576), torch.randn(tokens, 576), torch.randn(576)
        q, k, gate_up = torch.randn(tokens, 9, 64), torch.randn(tokens, 3, 64), torch.randn(tokens, 2 * 1536)
        angles, positions = torch.randn(512, 32), torch.arange(tokens)
        actions = {
            "rms_norm and residual": partial(norm, x, weight, 1e-5, residual),
            "rotary_embedding": partial(rotate, q, k, angles, angles, positions),
            "silu_and_mul": partial(gate, gate_up),
        }
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            first += time.perf_counter() - started
            figures[f"{name}, {tokens} tokens"] = round(quickest_ms(action, 20 * repeat), 4)
    return {**figures, "first calls, all": round(first * 1e3)}


def attended_ms(form: str, cases: list[str], repeat: int) -> dict[str, float]:
    """Milliseconds a layer, by case; of FlexAttention also what a step's masks and a shape's first call take."""
    backend, native_backend = ATTENTION[form](), ATTENTION["native"]()
    figures, masks, firsts = {}, [], []
    for case in cases:
        batch = synthetic_batch(CASES[case], num_heads=9, num_kv_heads=3, head_dim=64)
        pages = batch.fill(backend)
        for tensor in pages.tensors():
            tensor.nan_to_num_()
        started = time.perf_counter()
        attended = batch.attend(backend, pages)
        firsts.append((time.perf_counter() - started) * 1e3)
        apart = (attended - batch.attend(native_backend, batch.fill(native_backend))).abs().max().item()
        if not apart < _TOLERANCE:
            raise RuntimeError(f"{form} is {apart} off in {case}")
        layers = max(1, min(30, POOL_BYTES // (2 * batch.keys.nbytes)))
        figures[case] = attention_ms(backend, batch, torch.float32, layers, repeat)["attend_ms"]
        if isinstance(backend, FlexBackend):
            masks.append(quickest_ms(partial(backend.prepare, batch.step), 3))
    if masks:
        figures |= {"masks of a step, at most": round(max(masks), 2), "first call, at most": round(max(firsts))}
    return figures


def ceilings() -> dict[str, float]:
    """What the machine can do at most: products of large float32 matrices, reading memory, and from core to core."""
    square, much = torch.randn(3072, 3072), torch.zeros(2**27)
    product_ms = quickest_ms(lambda: square @ square, 5)
    read_ms = quickest_ms(lambda: much.sum(), 5)
    told = {
        "GFLOP/s": round(2 * square.shape[0] ** 3 / product_ms / 1e6, 1),
        "GB/s": round(much.nbytes / read_ms / 1e6, 1),
    }
    return told if (seconds := handover_seconds()) is None else {**told, "ns from core to core": round(1e9 * seconds)}


def handover_seconds() -> float | None:
    """How long a value is on its way from one core to another, now; None where nobody can tell."""
    library = native.library()
    if library is None or len(os.sched_getaffinity(0)) < 2:
        return None
    told = []
    for _ in range(10):  # the least, for others may have wanted a core
        seconds = ctypes.c_double()
        library.ifb_handover(ctypes.byref(seconds), 20_000)
        told.append(seconds.value)
    return None if math.isnan(told[0]) else min(told)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ifb_kernels.bench_alternatives", description="Times what was chosen beside what was not."
    )
    parser.add_argument("--operations", choices=list(OPERATIONS), help="JSON of this form alone")
    parser.add_argument("--attention", choices=list(ATTENTION), help="JSON of this form alone")
    parser.add_argument("--case", choices=list(CASES), action="append", help="may be repeated (default: all)")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    cases = options.case or list(CASES)
    with torch.inference_mode():
        if options.operations:
            print(json.dumps(operations_ms(options.operations, options.repeat)))
            return
        if options.attention:
            print(json.dumps(attended_ms(options.attention, cases, options.repeat)))
            return
        report = {"threads": torch.get_num_threads(), "ceilings": ceilings()}
    report |= _each_alone(cases, options.repeat)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['threads']} threads, at most", ", ".join(f"{v} {unit}" for unit, v in report["ceilings"].items()))
    for title, forms in (("operations_ms", OPERATIONS), ("attention_ms", ATTENTION)):
        _print_markdown(title, list(forms), report[title])


def _each_alone(cases: list[str], repeat: int) -> dict[str, dict[str, dict[str, float]]]:
    """All forms, each in a process of its own: another's idle OpenMP threads would spin on its cores.

    Nothing that was compiled before is used, so that a first call is one.
    """
    report: dict[str, dict[str, dict[str, float]]] = {}
    for what, forms in (("operations", OPERATIONS), ("attention", ATTENTION)):
        table = report.setdefault(f"{what}_ms", {})
        for form in forms:
            if form == "numba" and importlib.util.find_spec("numba") is None:
                continue
            command = [sys.executable, "-m", __spec__.name, f"--{what}", form, "--repeat", str(repeat)]
            command += [word for case in cases for word in ("--case", case)]
            fresh = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=fresh).stdout
            for name, value in json.loads(said).items():
                table.setdefault(name, {})[form] = value
    return report


def _print_markdown(title: str, columns: list[str], table: dict[str, dict[str, float]]) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{row[c]:g}' if c in row else '' for c in columns)} |")


if __name__ == "__main__":
    main()
