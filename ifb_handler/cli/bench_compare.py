"""`ifb bench compare`: one model, one trace, every way of batching it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ifb_handler.cli.bench_figures import figures
from ifb_handler.cli.bench_modes import MODES, check_modes
from ifb_handler.cli.bench_replay import Run, replay
from ifb_handler.cli.bench_subject import Subject, workload_named
from ifb_handler.cli.bench_table import machine, show
from ifb_handler.cli.console import phases
from ifb_handler.cli.options import DEFAULT_MODEL, Model, Settings, choose_model
from ifb_handler.cli.workloads import WORKLOADS

# Those that the workload tells apart.
_MODES_FOR = {
    "long_arrivals": ("orca", "vllm-early", "default"),
    "shared_prefix": ("sarathi", "sglang", "default"),
    "chat": ("sarathi", "sglang", "default"),
}
_ALL_BUT_ONE = tuple(name for name in MODES if name != "sarathi")  # where no prompts are alike it is `default`


def compare(
    model: Model = DEFAULT_MODEL,
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(WORKLOADS)}.")] = "exponential",
    modes: Annotated[
        str | None,
        typer.Option(
            help=f"With commas between, of: {', '.join(MODES)}.", show_default="those the workload tells apart"
        ),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=2, help="Requests in all.", show_default="the workload's")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests in the running batch.")] = 32,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="A step's token budget in the modes that cut prompts.", show_default="256 on a CPU"),
    ] = None,
    settings: Settings = None,
    seed: Annotated[int, typer.Option(help="Seeds the workload.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw who was in the batch at each step; needs matplotlib.")
    ] = None,
) -> None:
    """Run the same requests in the way of static batching, Orca, vLLM, TensorRT-LLM, SGLang and this engine.

    The weights are loaded once. Unless `num_gpu_blocks_override` says otherwise, the KV pool holds the longest answer
    of every row, so that static batching and Orca are held back by their schedule and not by memory.
    """
    if png_file is not None:
        from ifb_handler.cli.timeline_plot import require_matplotlib

        require_matplotlib()
    kind = workload_named(workload)
    names = check_modes(modes.split(",") if modes else list(_MODES_FOR.get(workload, _ALL_BUT_ONE)), "--modes")
    jobs = kind.make(num_requests or kind.num_requests, seed)
    choice = choose_model(model, settings, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    before = machine()
    runs: dict[str, Run] = {}
    with phases() as phase:
        phase(f"Loading {model}")
        subject = Subject(choice, jobs)
        for name in names:
            phase(f"{workload}, {len(jobs)} requests: {name}")
            core = subject.core(MODES[name].options)
            runs[name] = replay(core, jobs, subject.vocabulary)
            core.check()
    told = {
        "workload": workload,
        "model": subject.model_name,
        "num_requests": len(jobs),
        "seed": seed,
        "machine": before,
        "max_num_seqs": max_num_seqs,
        "pool_tokens": subject.pool_tokens,
        "modes": {
            name: {"about": MODES[name].about, "granularity": MODES[name].granularity, **figures(run)}
            for name, run in runs.items()
        },
    }
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=2) + "\n")
    if png_file is not None:
        from ifb_handler.cli.timeline_plot import draw

        draw(runs, f"{workload} on {subject.model_name}, {len(jobs)} requests", png_file)
    _print(told)


def _print(told: dict[str, Any]) -> None:
    modes: dict[str, dict[str, Any]] = told["modes"]
    each = list(modes.values())
    rows: list[Sequence[str]] = []

    def row(name: str, form: Callable[[dict[str, Any]], str]) -> None:
        rows.append([name, *map(form, each)])

    row("scheduled by", lambda m: m["granularity"])
    row("useful rows a step", lambda m: f"{m['mean_useful_rows']:.1f}")
    row("  padding rows", lambda m: f"{m['mean_padding_rows']:.1f}")
    rows.append(["output tokens/s", *_relative(modes, "output_tokens_per_s")])
    if "static" in modes and all(m["saturated_output_tokens_per_s"] for m in each):
        rows.append(["  while requests wait", *_relative(modes, "saturated_output_tokens_per_s")])
    row("TTFT p50, s", lambda m: f"{m['ttft_s']['p50']:.2f}")
    row("TTFT p99, s", lambda m: f"{m['ttft_s']['p99']:.2f}")
    for name in ("p50", "p99", "max"):
        row(f"ITL {name}, ms", lambda m, name=name: f"{m['itl_s'][name] * 1e3:.0f}")
    row("KV never written", lambda m: f"{m['kv_never_written']:.1%}")
    row("  not yet written", lambda m: f"{m['kv_unwritten']:.1%}")
    row("prefill tokens", lambda m: f"{m['prefill_tokens']}")
    for turn in range(len(each[0].get("prefill_tokens_by_turn", ()))):
        row(f"  turn {turn + 1}", lambda m, turn=turn: f"{m['prefill_tokens_by_turn'][turn]}")
    row("preemptions", lambda m: f"{m['preemptions']}")
    row("steps", lambda m: f"{m['steps']}")
    title = (
        f"{told['workload']} on {told['model']}: {told['num_requests']} requests, at most {told['max_num_seqs']} "
        f"in a batch, KV pool of {told['pool_tokens']} tokens"
    )
    show(title, ["", *modes], rows)


def _relative(modes: dict[str, dict[str, Any]], name: str) -> Sequence[str]:
    """Each mode's rate, and what it is to static batching's, if that was run."""
    static = modes.get("static", {}).get(name)
    return [f"{m[name]:.1f}" + (f" ({m[name] / static:.2f}x)" if static else "") for m in modes.values()]
