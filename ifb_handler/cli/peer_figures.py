"""The figures of runs side by side: what is compared is what ran one after the other, in the same round."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ifb_handler.cli.bench_figures import percentile
from ifb_handler.cli.errors import CliError
from ifb_handler.cli.peer_process import PeerRun
from ifb_handler.cli.workloads import Job


def check_whole(name: str, run: PeerRun, jobs: Sequence[Job]) -> None:
    """CliError if an answer does not have the length that was asked for."""
    for index, (tokens, job) in enumerate(zip(run.tokens, jobs, strict=True)):
        if len(tokens) != job.num_output_tokens:
            raise CliError(f"{name}: job {index} has {len(tokens)} tokens, not {job.num_output_tokens}")


def run_figures(run: PeerRun) -> dict[str, Any]:
    """One run, for JSON. Offline, the time to first token includes the wait for a place in the batch."""
    tokens = sum(map(len, run.tokens))
    first = [times[0] - at for times, at in zip(run.times, run.arrived, strict=True)]
    between = [b - a for times in run.times for a, b in itertools.pairwise(times)]
    return {
        "seconds": run.seconds,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / run.seconds,
        "ttft_s": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "itl_s": {"p50": percentile(between, 0.5), "p99": percentile(between, 0.99)},
        "peak_mib": run.peak_bytes / (1 << 20),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": median(values), "max": max(values)}


def equal_tokens(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of tokens that are the same at the same place of the same answer."""
    pairs = [pair for mine, other in zip(tokens, others, strict=True) for pair in zip(mine, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def same_until(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference of their answer."""
    same = 0
    for mine, other in zip(tokens, others, strict=True):
        same += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=True)))
    return same / sum(map(len, tokens))


def compared(
    rounds: Sequence[Mapping[str, PeerRun]], name: str, bases: Sequence[str], reference: str
) -> dict[str, Any]:
    """What one subject came to, over the rounds in which it ran.

    times_faster    for each of `bases`: how many times its output tokens a second are this subject's, round by round
    equal_tokens, same_until_difference   with the answers of `reference`, worst round
    """
    ran = [one for one in rounds if name in one]
    each = [run_figures(one[name]) for one in ran]
    both = [one for one in ran if reference in one]
    return {
        "runs": each,
        "output_tokens_per_s": spread([run["output_tokens_per_s"] for run in each]),
        "ttft_s": {at: spread([run["ttft_s"][at] for run in each]) for at in ("p50", "p99")},
        "itl_s": {at: spread([run["itl_s"][at] for run in each]) for at in ("p50", "p99")},
        "peak_mib": max(run["peak_mib"] for run in each),
        "times_faster": {
            base: spread([_rate(one[base]) / _rate(one[name]) for one in ran if base in one])
            for base in bases
            if any(base in one for one in ran)
        },
        "equal_tokens": min((equal_tokens(one[name].tokens, one[reference].tokens) for one in both), default=None),
        "same_until_difference": min(
            (same_until(one[name].tokens, one[reference].tokens) for one in both), default=None
        ),
    }


def _rate(run: PeerRun) -> float:
    return sum(map(len, run.tokens)) / run.seconds
