"""How `ifb bench peers` talks to the script that drives a system: JSON, a line at a time, on stdin and stdout.

First comes the set-up; the script loads its model and answers `{"ready": {...}}`. Each further line is a list of jobs;
the answer is what became of them. What libraries print to stdout goes to stderr. The end of stdin is the end.

A set-up has
    model, hf_folder    the GGUF file, and the same weights as a Hugging Face folder; either may be null
    dtype               float32, bfloat16 or float16, for systems that leave the choice
    max_num_seqs, max_num_batched_tokens, max_model_len, kv_cache_gib, prefix_caching, threads, options
A job has
    prompt              token ids
    num_output_tokens   length of its answer, whatever the model says
    at                  seconds from the start before which it does not arrive
    follows             null, or the job whose prompt and answer come before `prompt`, and which must have ended
    beside              null, or [job, tokens]: that job's answer must have so many tokens
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

# Most seconds to wait for news when nothing else is due.
_LONGEST_WAIT = 60.0


class Client(Protocol):
    """A system with its model loaded."""

    def submit(self, index: int, prompt: list[int], num_output_tokens: int) -> None:
        """Ask for a greedy answer of that length; end-of-sequence does not end it."""

    def collect(self, seconds: float) -> list[tuple[int, list[int], float]]:
        """New tokens, as (job, token ids, time.monotonic() when they were there). Called while jobs are running.

        May take as long as a step of the system does, and waits `seconds` at most where there is nothing to do.
        """

    def close(self) -> None:
        """Leave no process behind."""


def serve(load: Callable[[dict[str, Any]], Client]) -> None:
    """The script's main: load, then run what comes until stdin ends."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    client = load(json.loads(sys.stdin.readline()))
    try:
        _tell(told, {"ready": {"python": sys.version.split()[0]}})
        for line in sys.stdin:
            _tell(told, run(client, json.loads(line)))
    finally:
        client.close()


def _tell(told: Any, answer: dict[str, Any]) -> None:
    told.write(json.dumps(answer) + "\n")
    told.flush()


def run(client: Client, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Submit the jobs as they fall due and collect until all have ended; times in seconds from the start."""
    prompts: dict[int, list[int]] = {}
    tokens: list[list[int]] = [[] for _ in jobs]
    times: list[list[float]] = [[] for _ in jobs]
    arrived: list[float | None] = [None] * len(jobs)
    waiting = list(range(len(jobs)))
    num_live = 0
    start = time.monotonic()

    def released(index: int) -> bool:
        follows, beside = jobs[index]["follows"], jobs[index]["beside"]
        if follows is not None and len(tokens[follows]) < jobs[follows]["num_output_tokens"]:
            return False
        return beside is None or len(tokens[beside[0]]) >= beside[1]

    while waiting or num_live:
        now = time.monotonic() - start
        next_at = _LONGEST_WAIT + now
        for index in list(waiting):
            job = jobs[index]
            if not released(index):
                continue
            if job["at"] > now:
                next_at = min(next_at, job["at"])
                continue
            waiting.remove(index)
            follows = job["follows"]
            before = [] if follows is None else prompts[follows] + tokens[follows]
            prompts[index] = before + job["prompt"]
            # By the clock where the clock decides, however long the step before it took.
            arrived[index] = job["at"] if follows is None and job["beside"] is None else now
            client.submit(index, prompts[index], job["num_output_tokens"])
            num_live += 1
        wait = max(0.0, next_at - (time.monotonic() - start))
        if not num_live:
            time.sleep(wait)
            continue
        for index, new, at in client.collect(wait):
            tokens[index] += new
            times[index] += [at - start] * len(new)
            if len(tokens[index]) > jobs[index]["num_output_tokens"]:
                raise RuntimeError(f"job {index}: more tokens than the {jobs[index]['num_output_tokens']} asked for")
            num_live -= len(tokens[index]) == jobs[index]["num_output_tokens"]
    return {
        "seconds": max((at for each in times for at in each), default=0.0),
        "answers": [
            {"arrived": arrived[i], "times": times[i], "tokens": tokens[i], "prompt_tokens": len(prompts[i])}
            for i in range(len(jobs))
        ],
    }
