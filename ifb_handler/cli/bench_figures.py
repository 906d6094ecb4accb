"""The figures of a replayed run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from statistics import mean
from typing import Any

from ifb_handler.cli.bench_replay import ReplayedStep, Run
from ifb_handler.cli.workloads import turn_of


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of them do not exceed, one of them; 0.0 of none."""
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def ttfts(run: Run) -> list[float]:
    """Seconds from arrival to first token."""
    return [times[0] - run.arrived[i] for i, times in run.tokens.items() if times]


def itls(run: Run) -> list[float]:
    """Seconds between two tokens of an answer, of all answers."""
    return [b - a for times in run.tokens.values() for a, b in itertools.pairwise(times)]


def figures(run: Run) -> dict[str, Any]:
    """All that `ifb bench compare` tells, for JSON.

    saturated_output_tokens_per_s    while requests were waiting; None if none ever was
    mean_useful_rows                 rows a step that computed for a request, and not padding
    prefill_tokens                   computed in prefill, also those computed again
    kv_never_written, kv_unwritten   share of the reserved token places that were not written before they were given
                                     back, and that were not written yet; mean over the steps
    """
    steps, tokens = run.steps, sum(map(len, run.tokens.values()))
    full = [step for step in steps if step.num_waiting]
    between = itls(run)
    told = {
        "seconds": run.seconds,
        "steps": len(steps),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / run.seconds,
        "saturated_output_tokens_per_s": _rate(run, full[-1].ended) if full else None,
        "output_tokens_per_step": tokens / len(steps),
        "mean_useful_rows": mean(len(step.prefill) + len(step.decode) for step in steps),
        "mean_padding_rows": mean(len(step.padding) for step in steps),
        "prompt_tokens": sum(len(run.jobs[i].prompt_token_ids) for i in run.tokens),
        "prefill_tokens": sum(sum(step.prefill.values()) for step in steps),
        "cached_prompt_tokens": sum(run.cached.values()),
        "ttft_s": {"p50": percentile(ttfts(run), 0.5), "p99": percentile(ttfts(run), 0.99), "mean": mean(ttfts(run))},
        "itl_s": {
            "p50": percentile(between, 0.5),
            "p99": percentile(between, 0.99),
            "max": max(between, default=0.0),
        },
        "kv_never_written": _share(steps, "never_written"),
        "kv_unwritten": _share(steps, "unwritten"),
        "kv_peak_reserved": max(step.reserved / step.total for step in steps),
        "preemptions": sum(step.preempted for step in steps),
    }
    by_turn = _prefill_by_turn(run)
    return {**told, "prefill_tokens_by_turn": by_turn} if len(by_turn) > 1 else told


def _rate(run: Run, until: float) -> float:
    return sum(time <= until for times in run.tokens.values() for time in times) / until


def _share(steps: list[ReplayedStep], name: str) -> float:
    return mean(getattr(step, name) / step.reserved if step.reserved else 0.0 for step in steps)


def _prefill_by_turn(run: Run) -> list[int]:
    turns = [turn_of(run.jobs, i) for i in range(len(run.jobs))]
    work = [0] * (max(turns) + 1)
    for step in run.steps:
        for i, count in step.prefill.items():
            work[turns[i]] += count
    return work
