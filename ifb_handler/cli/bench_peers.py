"""`ifb bench peers`: one workload on this engine and on its peers, side by side on one machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ifb_handler.cli.bench_table import machine, show
from ifb_handler.cli.console import console, phases, stop_signals_interrupt
from ifb_handler.cli.errors import CliError, UsageError
from ifb_handler.cli.options import DEFAULT_MODEL, Model, Settings, choose_model
from ifb_handler.cli.peer_figures import check_whole, compared
from ifb_handler.cli.peer_process import PeerProcess, PeerRun
from ifb_handler.cli.peer_subjects import (
    OURS,
    PEERS,
    VARIANTS,
    Subject,
    hf_folder,
    install,
    is_installed,
    subject_named,
)
from ifb_handler.cli.peer_workloads import PEER_WORKLOADS, arriving, warm_up
from ifb_handler.cli.workloads import Job, longest
from ifb_handler.models.cache import cache_folder

_ARRIVALS = ("offline", "poisson")
_DTYPES = ("float32", "bfloat16", "float16")
_CONTEXT_STEP = 256
# Far from the seeds that anyone asks for: no prompt of the warm-up is found in a cache.
_WARM_UP_SEED = 1_000_003


def peers(
    names: Annotated[
        str,
        typer.Option(
            "--peers",
            help=f"With commas between: ours[-VARIANT][-http], {', '.join(PEERS)}. VARIANT: {', '.join(VARIANTS)}.",
        ),
    ] = f"{OURS},{OURS}-http,{','.join(PEERS)}",
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(PEER_WORKLOADS)}.")] = "mixed",
    arrivals: Annotated[str, typer.Option(help="offline (all at once) or poisson.")] = "offline",
    rate: Annotated[float | None, typer.Option(min=0.001, help="Arrivals a second, with --arrivals poisson.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Rounds; in each, every system runs the workload once.")] = 3,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests in all.", show_default="the workload's")
    ] = None,
    model: Model = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Of ours, vLLM and transformers; the others keep their own.")] = "float32",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests in the running batch.")] = 32,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of a step.", show_default="each system's own")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each.", show_default="one a core")] = None,
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="KV cache of each.")] = 2,
    settings: Settings = None,
    venvs: Annotated[
        Path | None,
        typer.Option(help="Folder with a virtual environment a peer, by its name.", show_default="peers in the cache"),
    ] = None,
    make_venvs: Annotated[
        bool, typer.Option("--install", help="Make the environments that are missing, with pip (gigabytes).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seeds the requests and their arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that loading, or a run, may take.")] = 900,
    logs: Annotated[Path | None, typer.Option(help="Keep what each system says in this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Run the same greedy requests on this engine and on its peers, taking turns so that the machine's drift cancels.

    Each system loads the same weights once, in a process of its own, and warms up; while one runs, the others stand
    still. Answers are checked for their length and compared with the first system's. A peer without an environment in
    --venvs is left out and named.
    """
    if workload not in PEER_WORKLOADS:
        raise UsageError(f"--workload: {workload!r} is not one of {', '.join(PEER_WORKLOADS)}")
    if arrivals not in _ARRIVALS:
        raise UsageError(f"--arrivals: {arrivals!r} is not one of {', '.join(_ARRIVALS)}")
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype: {dtype!r} is not one of {', '.join(_DTYPES)}")
    if (arrivals == "poisson") != (rate is not None):
        raise UsageError("--rate: is given with --arrivals poisson, and only then")
    kind = PEER_WORKLOADS[workload]
    count = num_requests or kind.num_requests
    engine_options = choose_model(model, settings).options
    subjects = [subject_named(name.strip(), engine_options) for name in names.split(",")]
    if len({subject.name for subject in subjects}) < len(subjects):
        raise UsageError(f"--peers: {names!r} has a name twice")
    for subject in subjects:
        if subject.is_ours:
            choose_model(model, None, **{"dtype": dtype, **subject.options})

    def jobs_of_round(number: int) -> list[Job]:
        # Where prefixes are cached, a round must not find the prompts of the one before it.
        own_seed = seed + number if kind.prefix_caching else seed
        jobs = kind.make(count, own_seed)
        return jobs if rate is None else arriving(jobs, rate, own_seed)

    all_rounds = [jobs_of_round(number) for number in range(runs)]
    before = machine()
    left_out: dict[str, str] = {}
    rounds: list[dict[str, PeerRun]] = []
    with stop_signals_interrupt(), phases() as phase, ExitStack() as stack:
        phase(f"Finding {model}")
        weights = Weights(model)
        most = max(max(longest(jobs)) for jobs in all_rounds)
        if most > weights.max_model_len:
            raise UsageError(
                f"--workload: {workload} has a request of {most} tokens; {model} takes {weights.max_model_len}"
            )
        setup = {
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": min(-(-most // _CONTEXT_STEP) * _CONTEXT_STEP, weights.max_model_len),
            "kv_cache_gib": kv_cache_gib,
            "prefix_caching": kind.prefix_caching,
            "threads": threads or os.cpu_count() or 1,
        }
        bench = _Bench(weights, setup, venvs or cache_folder() / "peers", make_venvs, timeout, logs, phase)
        running: dict[str, PeerProcess] = {}

        def attempt(subject: Subject, do: Callable[[], None]) -> None:
            """What fails on a peer is told of it; what fails on ours is a failure."""
            try:
                do()
            except CliError as error:
                if subject.is_ours:
                    raise
                left_out[subject.name] = str(error)
                running.pop(subject.name, None)

        def start(subject: Subject) -> None:
            process = stack.enter_context(bench.process(subject))
            phase(f"{subject.name}: loading")
            process.start(bench.setup(subject))
            phase(f"{subject.name}: warming up")
            process.run(warm_up(kind, min(count, max_num_seqs), _WARM_UP_SEED), weights.vocab_size)
            running[subject.name] = process

        def measure(subject: Subject, jobs: list[Job], told: dict[str, PeerRun]) -> None:
            phase(f"{workload}, round {len(rounds)} of {runs}: {subject.name}")
            run = running[subject.name].run(jobs, weights.vocab_size)
            check_whole(subject.name, run, jobs)
            told[subject.name] = run

        for subject in subjects:
            attempt(subject, partial(start, subject))
        for jobs in all_rounds:
            rounds.append({})
            for subject in subjects:
                if subject.name in running:
                    attempt(subject, partial(measure, subject, jobs, rounds[-1]))
    measured = [subject for subject in subjects if all(subject.name in one for one in rounds)]
    bases = [subject.name for subject in measured if subject.is_ours] or [subject.name for subject in measured[:1]]
    told = {
        "workload": workload,
        "arrivals": arrivals,
        "rate": rate,
        "model": weights.name,
        "num_requests": count,
        "seed": seed,
        "machine": before,
        **setup,
        "compared_with": measured[0].name if measured else None,
        "systems": {
            subject.name: {"about": subject.about, **compared(rounds, subject.name, bases, measured[0].name)}
            for subject in measured
        },
        "left_out": left_out,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=2) + "\n")
    _print(told)


class Weights:
    """The model's files in the forms that systems load. ModelError or CliError where they cannot be had."""

    def __init__(self, model: str) -> None:
        from ifb_handler.models.loading import open_checkpoint
        from ifb_handler.models.source import resolve

        files = resolve(model)
        config = open_checkpoint(files).config
        self.name = files.name
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_model_len
        self.gguf = files.path if files.is_gguf else None
        self._folder = None if files.is_gguf else files.path

    @property
    def own(self) -> Path:
        """As they were given."""
        return self.gguf or self._folder  # type: ignore[return-value]

    def folder(self) -> Path:
        """As a Hugging Face folder, converted at the first call."""
        if self._folder is None:
            self._folder = hf_folder(self.own)
        return self._folder


@dataclass(frozen=True)
class _Bench:
    """How a system is brought up; CliError where it cannot be."""

    weights: Weights
    common: Mapping[str, Any]
    venvs: Path
    make_venvs: bool
    timeout: float
    logs: Path | None
    phase: Callable[[str], None]

    def process(self, subject: Subject) -> PeerProcess:
        peer = subject.peer
        if peer is not None:
            if peer.needs == "gguf" and self.weights.gguf is None:
                raise CliError(f"loads a GGUF file only, and {self.weights.name} is none")
            if self.make_venvs and not is_installed(peer, self.venvs):
                self.phase(f"{subject.name}: installing {' '.join(peer.requirements)}")
                install(peer, self.venvs)
        command = subject.command(self.venvs)
        if command is None:
            raise CliError(f"not found: no environment {self.venvs / peer.venv}; --install makes it")  # type: ignore[union-attr]
        log = None
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            log = self.logs / f"{subject.name}.log"
        return PeerProcess(subject.name, command, subject.environment(self.venvs), self.timeout, log)

    def setup(self, subject: Subject) -> dict[str, Any]:
        folder = subject.peer is not None and subject.peer.needs == "hf"
        return {
            **self.common,
            "model": str(self.weights.own),
            "hf_folder": str(self.weights.folder()) if folder else None,
            "options": dict(subject.options),
        }


def _print(told: dict[str, Any]) -> None:
    systems: dict[str, dict[str, Any]] = told["systems"]
    bases = list(dict.fromkeys(base for one in systems.values() for base in one["times_faster"]))
    columns = ["", "output tokens/s", *(f"{base} is faster" for base in bases), "TTFT p50 / p99, s"]
    columns += ["ITL p50 / p99, ms", "peak MiB", f"tokens as {told['compared_with']}"]
    rows: list[Sequence[str]] = []
    for name, one in systems.items():
        first, between, equal = one["ttft_s"], one["itl_s"], one["equal_tokens"]
        rows.append(
            [
                name,
                _spread(one["output_tokens_per_s"], "{:.1f}"),
                *(_spread(one["times_faster"][base], "{:.2f}x") for base in bases),
                f"{first['p50']['median']:.2f} / {first['p99']['median']:.2f}",
                f"{between['p50']['median'] * 1e3:.1f} / {between['p99']['median'] * 1e3:.1f}",
                f"{one['peak_mib']:.0f}",
                f"{equal:.1%}",
            ]
        )
    arrivals = told["arrivals"] if told["rate"] is None else f"poisson, {told['rate']:g}/s"
    num_rounds = max((len(one["runs"]) for one in systems.values()), default=0)
    title = (
        f"{told['workload']} ({arrivals}) on {told['model']}: {told['num_requests']} requests, {told['max_num_seqs']} "
        f"at once, {told['threads']} threads, {num_rounds} rounds: median (lowest - highest)"
    )
    if rows:
        show(title, columns, rows)
    for name, why in told["left_out"].items():
        console.print(f"{name}: {why}", markup=False)


def _spread(values: dict[str, float], form: str) -> str:
    median, lowest, highest = (form.format(values[key]) for key in ("median", "min", "max"))
    return f"{median} ({lowest} - {highest})"
