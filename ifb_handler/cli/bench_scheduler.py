"""`ifb bench scheduler`: what a step costs beside the model, with more and more sequences in it.

An executor that computes nothing stands in for the model: what is left is the engine's own work.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from ifb_handler.cli.bench_replay import queue_job
from ifb_handler.cli.bench_table import machine, show
from ifb_handler.cli.errors import UsageError
from ifb_handler.cli.workloads import Job
from ifb_handler.engine.batch import Batch
from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Vocabulary
from ifb_handler.engine.executor import Executor

_PROMPT_LEN = 32
# In `churn` an answer has so many tokens: a 64th of the batch ends in a step, and as many come in.
_ANSWER_LEN = 64
_SECTIONS = ("scheduling", "sampling", "bookkeeping")


class FreeExecutor(Executor):
    """A model that costs nothing: the same logits for everyone, made once."""

    def __init__(self, num_blocks: int, max_num_seqs: int, vocab_size: int) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = 4096
        self.vocab_size = vocab_size
        self.max_num_batched_tokens = 4096
        self.eos_token_ids = ()
        self._logits = torch.zeros(max_num_seqs, vocab_size)

    def execute(self, batch: Batch) -> torch.Tensor:
        return self.logits_at(batch.sample_tokens)

    def logits_at(self, places: np.ndarray) -> torch.Tensor:
        return self._logits[: len(places)]

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        pass


def scheduler(
    sizes: Annotated[str, typer.Option(help="Running sequences, with commas between.")] = "64,256,1024",
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure; the median is told.")] = 64,
    vocab_size: Annotated[int, typer.Option(min=2, help="Width of the logits to sample from.")] = 4096,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Time a step without its model: scheduling and building the batch, sampling, bookkeeping.

    decode: every sequence makes a token, none comes or goes. churn: with a queue as long as the batch, a 64th of the
    batch ends in every step and is replaced. On one thread.
    """
    try:
        counts = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise UsageError(f"--sizes: {sizes!r} is not numbers with commas between") from None
    if min(counts) < 1:
        raise UsageError(f"--sizes: {min(counts)} is not at least 1")
    told: dict[str, Any] = {"steps": steps, "vocab_size": vocab_size, "machine": machine(), "seconds": {}}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that this thread's CPU time, which a busy machine changes little, is all there is
    try:
        for name in ("decode", "churn"):
            told["seconds"][name] = {str(size): _measure(size, steps, vocab_size, name == "churn") for size in counts}
    finally:
        torch.set_num_threads(threads)
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=2) + "\n")
    _print(told)


def _measure(num_seqs: int, steps: int, vocab_size: int, churn: bool) -> dict[str, float]:
    """Median seconds of a step with `num_seqs` running: by section, in all, and of CPU time."""
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(4096, 2 * num_seqs))
    longest = _PROMPT_LEN + _ANSWER_LEN + 3 * steps
    pages = num_seqs * (longest // config.block_size + 2)
    core = EngineCore(FreeExecutor(pages, num_seqs, vocab_size), config)
    vocabulary = Vocabulary(None)
    source = np.random.default_rng(0)

    def submit(index: int, answer_len: int) -> None:
        prompt = source.integers(0, vocab_size, _PROMPT_LEN).tolist()
        queue_job(core, index, Job(prompt, answer_len), prompt, vocabulary)

    # In churn the first answers end at different times, as they would after a while.
    for i in range(num_seqs):
        submit(i, 1 + i % _ANSWER_LEN if churn else longest - _PROMPT_LEN)
    num_submitted = num_seqs
    for _ in range(num_seqs if churn else 0):
        submit(num_submitted, _ANSWER_LEN)
        num_submitted += 1
    while any(request.num_generated == 0 for request in core.scheduler.running) or not core.scheduler.running:
        core.step()
    measured: list[dict[str, float]] = []
    for _ in range(steps):
        started, cpu = time.perf_counter(), time.thread_time()
        result = core.step()
        whole, cpu = time.perf_counter() - started, time.thread_time() - cpu
        measured.append({**{name: result.record.seconds[name] for name in _SECTIONS}, "step": whole, "cpu": cpu})
        for _ in range(len(result.record.finished) if churn else 0):
            submit(num_submitted, _ANSWER_LEN)
            num_submitted += 1
    core.check()
    return {name: median(one[name] for one in measured) for name in measured[0]}


def _print(told: dict[str, Any]) -> None:
    rows = []
    for name, sizes in told["seconds"].items():
        for count, one in sizes.items():
            times = (f"{one[section] * 1e3:.2f}" for section in ("step", *_SECTIONS, "cpu"))
            rows.append([name, count, *times, f"{one['cpu'] / int(count) * 1e6:.1f}"])
    columns = ["", "sequences", "step, ms", *(f"{name}, ms" for name in _SECTIONS), "CPU, ms", "CPU, µs a sequence"]
    show("A step without its model, median", columns, rows)
