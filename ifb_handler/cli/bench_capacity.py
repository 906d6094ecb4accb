"""`ifb bench capacity`: the highest request rate at which latencies still hold, by bisection.

Goodput in the sense of DistServe, capacity in that of Sarathi-Serve: arrivals are Poisson, and a rate holds if 99 of
100 requests have their first token, and 99 of 100 tokens come after the one before, in the time that is allowed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ifb_handler.cli.bench_figures import itls, percentile, ttfts
from ifb_handler.cli.bench_modes import MODES, check_modes
from ifb_handler.cli.bench_replay import Run, replay
from ifb_handler.cli.bench_subject import Subject, workload_named
from ifb_handler.cli.bench_table import machine, show
from ifb_handler.cli.console import phases
from ifb_handler.cli.errors import UsageError
from ifb_handler.cli.options import DEFAULT_MODEL, Model, Settings, choose_model
from ifb_handler.cli.workloads import OFFLINE, Job, poisson
from ifb_handler.engine.core import EngineCore
from ifb_handler.engine.detokenizer import Vocabulary

# A probe of this many times the length of its arrivals has not kept up with them.
_LONGEST = 3.0
_FEWEST_REQUESTS = 8


def capacity(
    p99_ttft: Annotated[float, typer.Option(min=0.001, help="Seconds to the first token that 99 of 100 must keep.")],
    p99_itl: Annotated[float, typer.Option(min=0.1, help="Milliseconds between tokens that 99 of 100 must keep.")],
    model: Model = DEFAULT_MODEL,
    mode: Annotated[str, typer.Option(help=f"With commas between, of: {', '.join(MODES)}.")] = "static,orca,default",
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(OFFLINE)}.")] = "mixed",
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Length of a probe's arrivals; it may take 3 times that.")
    ] = 15,
    start_rate: Annotated[float, typer.Option(min=0.001, help="Requests a second to try first.")] = 1.0,
    precision: Annotated[float, typer.Option(min=0.01, help="Stop when the rate is known to this share.")] = 0.1,
    max_probes: Annotated[int, typer.Option(min=1, help="Stop after so many probes of a mode.")] = 12,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests in the running batch.")] = 32,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="Seeds the requests and their arrivals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Find the highest rate of Poisson arrivals whose p99 time to first token and p99 inter-token latency hold."""
    kind = workload_named(workload)
    if workload not in OFFLINE:
        raise UsageError(f"--workload: {workload!r} is not one of {', '.join(OFFLINE)}")
    names = check_modes(mode.split(","), "--mode")
    choice = choose_model(model, settings, max_num_seqs=max_num_seqs)
    target = Target(p99_ttft, p99_itl / 1e3)
    before = machine()
    found: dict[str, dict[str, Any]] = {}
    with phases() as phase:
        phase(f"Loading {model}")
        subject = Subject(choice, kind.make(kind.num_requests, seed))
        for name in names:

            def probe(rate: float, name: str = name) -> Probe:
                phase(f"{name}: {rate:.2f} requests/s")
                jobs = kind.make(max(_FEWEST_REQUESTS, round(rate * seconds)), seed)
                core = subject.core(MODES[name].options)
                return target.probe(rate, core, poisson(jobs, rate, seed), subject.vocabulary)

            probes = search(probe, start_rate, precision, max_probes)
            holding = [one for one in probes if one.holds]
            best = max(holding, key=lambda one: one.rate, default=None)
            found[name] = {
                "about": MODES[name].about,
                "capacity_requests_per_s": best.rate if best else 0.0,
                "at_capacity": vars(best) if best else None,
                "probes": [vars(one) for one in probes],
            }
    told = {
        "workload": workload,
        "model": subject.model_name,
        "p99_ttft_s": p99_ttft,
        "p99_itl_ms": p99_itl,
        "seconds": seconds,
        "seed": seed,
        "machine": before,
        "max_num_seqs": max_num_seqs,
        "modes": found,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=2) + "\n")
    _print(told)


@dataclass(frozen=True)
class Probe:
    """One run at a rate: its p99s in seconds, as far as it went, and whether both hold."""

    rate: float
    num_requests: int
    seconds: float
    holds: bool
    p99_ttft_s: float
    p99_itl_s: float


@dataclass(frozen=True)
class Target:
    """The p99s that must hold, in seconds."""

    ttft: float
    itl: float

    def probe(self, rate: float, core: EngineCore, jobs: list[Job], vocabulary: Vocabulary) -> Probe:
        """Run the jobs as they arrive, until all have ended or the target is missed for certain."""
        lost = _Lost(self, jobs, _LONGEST * jobs[-1].at + self.ttft)
        run = replay(core, jobs, vocabulary, lost)
        ttft, itl = percentile(ttfts(run), 0.99), percentile(itls(run), 0.99)
        return Probe(
            rate, len(jobs), run.seconds, not lost.given_up and ttft <= self.ttft and itl <= self.itl, ttft, itl
        )


class _Lost:
    """Asked after each step: whether the p99s can no longer hold, whatever comes, or the time is up."""

    def __init__(self, target: Target, jobs: list[Job], most_seconds: float) -> None:
        self._target = target
        self._most_seconds = most_seconds
        num_gaps = sum(job.num_output_tokens - 1 for job in jobs)
        self._late_allowed = len(jobs) - 1 - int(len(jobs) * 0.99)
        self._slow_allowed = num_gaps - 1 - int(num_gaps * 0.99)
        self._seen: dict[int, int] = {}
        self._late: set[int] = set()
        self._num_slow = 0
        self.given_up = False

    def __call__(self, run: Run, now: float) -> bool:
        target = self._target
        for i, times in run.tokens.items():
            if (times[0] if times else now) - run.arrived[i] > target.ttft:
                self._late.add(i)
            new = times[max(0, self._seen.get(i, 0) - 1) :]
            self._num_slow += sum(b - a > target.itl for a, b in itertools.pairwise(new))
            self._seen[i] = len(times)
        self.given_up = (
            len(self._late) > self._late_allowed
            or self._num_slow > max(0, self._slow_allowed)
            or now > self._most_seconds
        )
        return self.given_up


def search(probe: Callable[[float], Probe], rate: float, precision: float, max_probes: int) -> list[Probe]:
    """Double the rate while it holds or halve it until it does, then bisect between, by ratio. -> all probes"""
    probes: list[Probe] = []
    low, high = 0.0, float("inf")
    while len(probes) < max_probes and high > low * (1 + precision):
        probes.append(probe(rate))
        if probes[-1].holds:
            low = rate
        else:
            high = rate
        rate = low * 2 if high == float("inf") else high / 2 if not low else (low * high) ** 0.5
    return probes


def _print(told: dict[str, Any]) -> None:
    rows = []
    for name, mode in told["modes"].items():
        best, probes = mode["at_capacity"], mode["probes"]
        if best is None:
            rows.append([name, f"< {min(one['rate'] for one in probes):.3g}", "", "", str(len(probes))])
        else:
            latencies = f"{best['p99_ttft_s']:.2f}", f"{best['p99_itl_s'] * 1e3:.0f}"
            rows.append([name, f"{best['rate']:.2f}", *latencies, str(len(probes))])
    title = (
        f"{told['workload']} on {told['model']}: most requests/s with p99 TTFT <= {told['p99_ttft_s']:g} s "
        f"and p99 ITL <= {told['p99_itl_ms']:g} ms"
    )
    show(title, ["", "requests/s", "p99 TTFT, s", "p99 ITL, ms", "probes"], rows)
