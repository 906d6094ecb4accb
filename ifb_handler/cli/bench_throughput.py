"""`ifb bench throughput`: a workload offline, all requests at once, on the engine alone."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ifb_handler.cli.bench_figures import percentile
from ifb_handler.cli.bench_steps import show_kinds, step_figures
from ifb_handler.cli.bench_table import show
from ifb_handler.cli.errors import UsageError
from ifb_handler.cli.options import Settings, choose_model
from ifb_handler.cli.workloads import OFFLINE, WORKLOADS, Job

if TYPE_CHECKING:
    from ifb_handler.engine.engine import Engine
    from ifb_handler.engine.outputs import RequestOutput, StepRecord
    from ifb_handler.engine.sampling_params import SamplingParams


def throughput(
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(OFFLINE)}.")] = "mixed",
    model: Annotated[str, typer.Option(help="Name, folder, GGUF file or hub id.")] = "smollm2-135m",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 64,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests in the running batch.")] = 32,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Token budget of a step.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8, int8_weight_only or int4_weight_only.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Times to run the workload; the median run is reported.")] = 1,
    seed: Annotated[int, typer.Option(help="Seeds the workload.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of a temperature above 0.")] = 1.0,
    steps: Annotated[bool, typer.Option("--steps", help="Show where the time of each kind of step goes.")] = False,
    settings: Settings = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Run a workload offline, all requests at once and with end-of-sequence ignored, on the engine alone."""
    from ifb_handler.engine.engine import Engine
    from ifb_handler.engine.sampling_params import SamplingParams

    if workload not in OFFLINE:
        raise UsageError(f"--workload: {workload!r} is not one of {', '.join(OFFLINE)}")
    jobs = WORKLOADS[workload].make(num_requests, seed)
    named = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "dtype": dtype,
        "quantization": quantization,
    }
    choice = choose_model(model, settings, **named)
    with Engine(choice.model, **choice.options) as engine:
        warm = Job(jobs[0].prompt_token_ids[:16], 4)
        params = SamplingParams(temperature=temperature, top_p=top_p, ignore_eos=True)
        _run(engine, [warm], params, "warm-up")
        measured = [_run(engine, jobs, params, f"run {i}") for i in range(runs)]
        measured.sort(key=lambda run: run["output_tokens_per_s"])
        figures = measured[len(measured) // 2]
        figures = {
            "workload": workload,
            "model": engine.model_name,
            "num_requests": num_requests,
            "max_num_seqs": max_num_seqs,
            "quantization": quantization,
            "seed": seed,
            "temperature": temperature,
            "top_p": top_p,
            "runs_output_tokens_per_s": [round(r["output_tokens_per_s"], 2) for r in measured],
            **figures,
            "memory": _memory(engine),
        }
        engine.check()
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    _print(figures)
    if steps:
        show_kinds(figures["steps"])


def _run(engine: Engine, jobs: list[Job], sampling: SamplingParams, salt: str) -> dict[str, Any]:
    """`salt` keeps what an earlier run has left in the prefix cache from this one."""
    from ifb_handler.engine.mailbox import Mailbox
    from ifb_handler.engine.request import GenerationRequest

    last_step = max((record.step for record in engine.steps()), default=-1)
    mailbox = Mailbox()
    started = time.monotonic()
    for i, job in enumerate(jobs):
        params = replace(sampling, max_tokens=job.num_output_tokens, seed=i)
        prompt = [token % engine.vocab_size for token in job.prompt_token_ids]
        engine.submit(GenerationRequest(f"bench-{i}", prompt, params, cache_salt=salt), mailbox)
    before = engine.stats()
    between: list[float] = []
    heard: dict[str, float] = {}
    last: dict[str, RequestOutput] = {}
    records: dict[int, StepRecord] = {}
    num_live = len(jobs)
    while num_live:
        for output in mailbox.collect():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            now, count = time.monotonic(), len(output.token_ids)
            if output.request_id in heard:  # tokens that come together share the time since the last
                between += [(now - heard[output.request_id]) / count] * count
            heard[output.request_id] = now
            last[output.request_id] = output
            num_live -= output.finished
        new = engine.steps(after=max(records, default=last_step))
        records.update((record.step, record) for record in new)
    seconds = time.monotonic() - started
    for i, job in enumerate(jobs):
        if last[f"bench-{i}"].num_generated_tokens != job.num_output_tokens:
            raise RuntimeError(f"bench-{i}: {last[f'bench-{i}']} is not whole")
    tokens = sum(job.num_output_tokens for job in jobs)
    first = [output.times.first_token - output.times.arrived for output in last.values()]
    after = engine.stats()
    return {
        "seconds": seconds,
        "prompt_tokens": sum(len(job.prompt_token_ids) for job in jobs),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "ttft_s": _percentiles(first),
        "itl_s": _percentiles(between),
        "draft_tokens": after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
        "accepted_tokens": after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens,
        "steps": step_figures(list(records.values())),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def _memory(engine: Engine) -> dict[str, float]:
    """MiB: the process's peak, the weights, the configured pool, and what is left of the peak without the two."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    mib = 1 << 20
    return {
        "peak_mib": peak / mib,
        "weights_mib": engine.weight_bytes / mib,
        "pool_mib": engine.pool_bytes / mib,
        "beside_weights_and_pool_mib": (peak - engine.weight_bytes - engine.pool_bytes) / mib,
    }


def _print(figures: dict[str, Any]) -> None:
    ttft, itl, steps, memory = figures["ttft_s"], figures["itl_s"], figures["steps"], figures["memory"]
    rows = [
        ("output tokens/s", f"{figures['output_tokens_per_s']:.1f}"),
        ("whole job", f"{figures['seconds']:.1f} s"),
        ("TTFT p50 / p99", f"{ttft['p50']:.2f} / {ttft['p99']:.2f} s"),
        ("inter-token latency p50 / p99", f"{itl['p50'] * 1e3:.0f} / {itl['p99'] * 1e3:.0f} ms"),
        ("steps, mean rows", f"{steps['count']}, {steps['mean_rows']:.1f}"),
        *((f"  step: {name}", f"{share:.1%}") for name, share in sorted(steps["share"].items(), key=lambda i: -i[1])),
        ("draft tokens, accepted", f"{figures['draft_tokens']}, {figures['accepted_tokens']}"),
        ("peak memory", f"{memory['peak_mib']:.0f} MiB"),
        ("  weights, pool", f"{memory['weights_mib']:.0f}, {memory['pool_mib']:.0f} MiB"),
    ]
    show(f"{figures['workload']} on {figures['model']}, {figures['num_requests']} requests", ["", ""], rows)
