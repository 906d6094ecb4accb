"""`ifb bench`, each command at a tiny size: what it counts is right. Of times only their order is asserted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import write_tiny_llama
from typer.testing import CliRunner

from ifb_handler.cli.bench import app
from ifb_handler.cli.bench_capacity import Probe, Target, _Lost, search
from ifb_handler.cli.bench_figures import percentile
from ifb_handler.cli.bench_modes import MODES
from ifb_handler.cli.bench_replay import Run
from ifb_handler.cli.bench_steps import step_figures
from ifb_handler.cli.errors import UsageError
from ifb_handler.cli.workloads import TURNS, WORKLOADS, Job, longest, poisson, turn_of
from ifb_handler.engine.outputs import StepRecord
from ifb_kernels import native
from ifb_kernels.bench_alternatives import attended_ms, handover_seconds, operations_ms


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_model_len=4096)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(command: str, told: Path, *arguments: str, model: Path | None = None) -> dict[str, Any]:
    """What the command writes with --json."""
    chosen = [] if model is None else ["--model", str(model), "--set", "num_threads=1"]
    answer = CliRunner().invoke(app, [command, *arguments, *chosen, "--json", str(told)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return json.loads(told.read_text())


def test_compare_measures_every_mode_on_the_same_requests(model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "modes.png"
    png = ["--png", str(picture)] if _has_matplotlib() else []
    arguments = ["--num-requests", "32", "--max-num-seqs", "8", "--modes", ",".join(MODES), *png]
    modes = bench("compare", tmp_path / "told.json", *arguments, model=model)["modes"]
    assert list(modes) == list(MODES)
    tokens = sum(job.num_output_tokens for job in WORKLOADS["exponential"].make(32, 0))
    for name, mode in modes.items():
        assert mode["output_tokens"] == tokens
        assert mode["prefill_tokens"] == mode["prompt_tokens"], "nobody computes a prompt twice, nobody shares"
        assert mode["preemptions"] == 0, "the pool holds the longest answer of every row"
        assert 0 < mode["ttft_s"]["p50"] <= mode["ttft_s"]["p99"] <= mode["seconds"]
        assert 0 < mode["itl_s"]["p50"] <= mode["itl_s"]["p99"] <= mode["itl_s"]["max"]
        assert (mode["mean_padding_rows"] > 0) == (name == "static")
        assert mode["mean_useful_rows"] + mode["mean_padding_rows"] <= 8
        assert mode["kv_never_written"] <= mode["kv_unwritten"] < 1
        if MODES[name].options.get("kv_reservation") == "max_length":
            assert mode["kv_never_written"] > 0.5
        else:
            assert mode["kv_never_written"] < 0.04
    assert modes["default"]["output_tokens_per_step"] > 1.5 * modes["static"]["output_tokens_per_step"]
    if png:
        assert picture.read_bytes().startswith(b"\x89PNG")


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'torchserve-ifb\[bench\]'"):
        CliRunner().invoke(app, ["compare", "--model", "missing", "--png", "x.png"], catch_exceptions=False)


def test_a_pool_too_small_for_all_preempts_where_it_may_and_only_there(model: Path, tmp_path: Path) -> None:
    arguments = ["--workload", "mixed", "--num-requests", "16", "--max-num-seqs", "8"]
    small = ["--modes", "orca,trt-no-evict,trt-max-util", "--set", "num_gpu_blocks_override=40"]
    modes = bench("compare", tmp_path / "told.json", *arguments, *small, model=model)["modes"]
    assert modes["orca"]["preemptions"] == modes["trt-no-evict"]["preemptions"] == 0
    assert modes["trt-max-util"]["preemptions"] > 0
    assert modes["trt-max-util"]["prefill_tokens"] > modes["trt-max-util"]["prompt_tokens"]
    assert modes["trt-max-util"]["mean_useful_rows"] > modes["orca"]["mean_useful_rows"]


def test_a_common_prefix_is_computed_once(model: Path, tmp_path: Path) -> None:
    arguments = ["--workload", "shared_prefix", "--num-requests", "12"]
    modes = bench("compare", tmp_path / "told.json", *arguments, model=model)["modes"]
    assert modes["sarathi"]["prefill_tokens"] == modes["sarathi"]["prompt_tokens"]
    assert modes["default"]["prefill_tokens"] < 600 + 12 * (32 + 16)
    known = modes["default"]["prefill_tokens"] + modes["default"]["cached_prompt_tokens"]
    assert known == modes["default"]["prompt_tokens"]


def test_the_work_of_a_conversation_grows_with_its_length_and_not_with_its_square(model: Path, tmp_path: Path) -> None:
    modes = bench(
        "compare", tmp_path / "told.json", "--workload", "chat", "--num-requests", str(2 * TURNS), model=model
    )["modes"]
    whole = [2 * (48 + turn * (48 + 24)) for turn in range(TURNS)]
    assert modes["sarathi"]["prefill_tokens_by_turn"] == whole
    for work in modes["default"]["prefill_tokens_by_turn"]:
        assert work <= 2 * (48 + 24 + 16)


def test_long_prompts_come_while_answers_are_written_and_chunks_keep_the_steps_short(
    model: Path, tmp_path: Path
) -> None:
    arguments = ["--workload", "long_arrivals", "--num-requests", "6", "--modes", "orca,default"]
    modes = bench("compare", tmp_path / "told.json", *arguments, model=model)["modes"]
    for mode in modes.values():
        assert mode["prefill_tokens"] == 5 * 32 + 2000
        assert mode["output_tokens"] == 5 * 192 + 4
    # Sixteen tokens in, the prompt takes one step or several; all answers go on at each of them.
    assert modes["orca"]["steps"] == 192
    assert modes["default"]["steps"] == 192


def test_capacity_finds_a_rate_that_holds_beneath_one_that_does_not(model: Path, tmp_path: Path) -> None:
    arguments = ["--p99-ttft", "0.05", "--p99-itl", "1000", "--workload", "exponential", "--seconds", "0.3"]
    limits = ["--mode", "default", "--start-rate", "64", "--max-probes", "4", "--max-num-seqs", "2"]
    told = bench("capacity", tmp_path / "told.json", *arguments, *limits, model=model)
    mode = told["modes"]["default"]
    assert 1 <= len(mode["probes"]) <= 4
    held = [probe["rate"] for probe in mode["probes"] if probe["holds"]]
    assert mode["capacity_requests_per_s"] == max(held, default=0.0)
    for probe in mode["probes"]:
        assert probe["num_requests"] == max(8, round(probe["rate"] * 0.3))
        assert not probe["holds"] or probe["p99_ttft_s"] <= 0.05


@pytest.mark.parametrize(("true", "start"), [(7.3, 1.0), (7.3, 100.0), (0.2, 1.0)])
def test_the_search_brackets_a_rate_from_either_side(true: float, start: float) -> None:
    probes = search(lambda rate: Probe(rate, 0, 0.0, rate <= true, 0.0, 0.0), start, precision=0.1, max_probes=30)
    best = max(probe.rate for probe in probes if probe.holds)
    assert best <= true <= best * 1.1
    assert len(search(lambda rate: Probe(rate, 0, 0.0, True, 0.0, 0.0), 1.0, 0.1, max_probes=5)) == 5


def test_a_probe_is_given_up_when_its_target_is_missed_for_certain() -> None:
    jobs = [Job([1], 300, at=0.0) for _ in range(2)]  # 598 gaps: 5 may be late
    run = Run(jobs, arrived={0: 0.0, 1: 0.0}, tokens={0: [0.1], 1: [0.1]})
    lost = _Lost(Target(ttft=1.0, itl=0.5), jobs, most_seconds=1e9)
    for late in range(6):
        assert not lost(run, run.tokens[0][-1])
        run.tokens[0] += [run.tokens[0][-1] + 0.6] if late < 5 else []
    run.tokens[0].append(run.tokens[0][-1] + 0.4)
    assert not lost(run, run.tokens[0][-1])
    run.tokens[1].append(5.0)
    assert lost(run, 5.0)
    waiting = Run(jobs, arrived={0: 0.0, 1: 0.0}, tokens={0: [0.1], 1: []})
    assert not _Lost(Target(1.0, 0.5), jobs, 1e9)(waiting, 0.9)
    assert _Lost(Target(1.0, 0.5), jobs, 1e9)(waiting, 1.1), "who has waited too long need not be waited for"
    assert _Lost(Target(1.0, 0.5), jobs, 0.5)(waiting, 0.9), "the time is up"


def test_scheduler_times_steps_of_each_size(tmp_path: Path) -> None:
    told = bench("scheduler", tmp_path / "told.json", "--sizes", "4,64", "--steps", "8", "--vocab-size", "50")
    for sizes in told["seconds"].values():
        assert list(sizes) == ["4", "64"]
        for one in sizes.values():
            assert sum(one[name] for name in ("scheduling", "sampling", "bookkeeping")) > 0
            assert 0 < one["cpu"] < math.inf
        # Sixteen times the sequences: linear would be at most 16, and quadratic 256.
        assert sizes["64"]["cpu"] < 60 * sizes["4"]["cpu"]


def test_throughput_runs_a_workload_on_the_engine(model: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    arguments = ["throughput", "--model", str(model), "--workload", "exponential", "--num-requests", "6"]
    arguments += ["--set", "speculative_method=ngram", "--steps"]
    answer = CliRunner().invoke(app, [*arguments, "--json", str(told)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    figures = json.loads(told.read_text())
    kinds = figures["steps"]["kinds"]
    assert sum(kind["count"] for kind in kinds.values()) == figures["steps"]["count"]
    assert all(kind in answer.output for kind in kinds)
    assert figures["output_tokens"] == sum(job.num_output_tokens for job in WORKLOADS["exponential"].make(6, 0))
    assert 0 <= figures["accepted_tokens"] <= figures["draft_tokens"]


def test_throughput_may_be_of_sampled_answers(model: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    arguments = ["throughput", "--model", str(model), "--workload", "exponential", "--num-requests", "3"]
    arguments += ["--seed", "-1", "--temperature", "0.8", "--top-p", "0.9", "--json", str(told)]
    answer = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    figures = json.loads(told.read_text())
    assert (figures["temperature"], figures["top_p"]) == (0.8, 0.9)
    assert figures["output_tokens"] == sum(job.num_output_tokens for job in WORKLOADS["exponential"].make(3, -1))


def test_steps_are_told_apart_by_their_decode_rows_or_their_prompt_tokens() -> None:
    def record(prompt_tokens: list[int], num_decode: int) -> StepRecord:
        prefill = tuple((f"p{i}", count) for i, count in enumerate(prompt_tokens))
        decode = tuple(f"d{i}" for i in range(num_decode))
        return StepRecord(0, 0.0, 0.5, (), prefill, decode, (), (), 1, 2, {"gemm": 0.25, "attention": 0.125})

    steps = [record([], 1), record([], 2), record([], 4), record([30, 34], 0), record([65], 31), record([], 200)]
    figures = step_figures(steps)
    assert {name: kind["count"] for name, kind in figures["kinds"].items()} == {
        "decode 1": 1,
        "decode 2 to 4": 2,
        "decode 129 and more": 1,
        "prefill 1 to 64": 1,
        "prefill 65 to 128": 1,
    }
    assert figures["kinds"]["decode 2 to 4"]["mean_tokens"] == 3.0
    assert figures["kinds"]["prefill 65 to 128"]["mean_tokens"] == 96.0
    assert all(kind["ms"] == {"gemm": 250, "attention": 125, "other": 125} for kind in figures["kinds"].values())
    assert figures["share"] == {"gemm": 0.5, "attention": 0.25, "other": 0.25}


def test_what_was_not_chosen_is_checked_and_timed() -> None:
    operations = operations_ms("eager", repeat=1)
    attention = attended_ms("gather_sdpa", ["decode_1x2000"], repeat=1)
    assert {name.split(",")[0] for name in operations} >= {"rms_norm and residual", "rotary_embedding", "silu_and_mul"}
    assert list(attention) == ["decode_1x2000"]
    assert min(*operations.values(), *attention.values()) >= 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare", "--workload", "mixd"], "mixd"),
        (["compare", "--modes", "default,orcas"], "orcas"),
        (["capacity", "--p99-ttft", "1", "--p99-itl", "50", "--workload", "chat"], "chat"),
        (["throughput", "--workload", "long_arrivals"], "long_arrivals"),
        (["scheduler", "--sizes", "64,many"], "64,many"),
        (["scheduler", "--sizes", "0"], "0 is not at least 1"),
    ],
)
def test_a_wrong_choice_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_workload_that_the_model_cannot_hold_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"request of 2004 tokens; model and pool hold at most 1024"):
        bench("compare", tmp_path / "x", "--workload", "long_arrivals", "--set", "max_model_len=1024", model=model)


def test_workloads_are_the_same_for_the_same_seed() -> None:
    for workload in WORKLOADS.values():
        jobs = workload.make(workload.num_requests, 3)
        assert jobs == workload.make(workload.num_requests, 3) != workload.make(workload.num_requests, 4)
        assert len(jobs) == workload.num_requests
        assert all(1 <= job.num_output_tokens <= job.limit for job in jobs)


def test_a_conversation_grows_by_what_was_said() -> None:
    jobs = WORKLOADS["chat"].make(TURNS + 2, 0)
    assert [turn_of(jobs, i) for i in range(len(jobs))] == [*range(TURNS), 0, 1]
    assert longest(jobs) == [72 * (1 + turn) for turn in (*range(TURNS), 0, 1)]


def test_poisson_arrivals_at_two_rates_differ_in_their_scale_only() -> None:
    jobs = WORKLOADS["mixed"].make(400, 0)
    slow, fast = poisson(jobs, 2.0, seed=1), poisson(jobs, 8.0, seed=1)
    assert [job.at for job in slow] == pytest.approx([4 * job.at for job in fast])
    assert slow[-1].at == pytest.approx(400 / 2.0, rel=0.2)
    assert sorted(slow, key=lambda job: job.at) == slow


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(100), 0.99) == 99
    assert percentile(range(101), 0.5) == 50
    assert percentile([], 0.5) == 0.0


def test_perplexity_is_that_of_the_text_and_float32_agrees_with_itself(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one two three four five six seven " * 8)
    arguments = ["--model", str(model), "--dtype", "float32", "--text", str(text)]
    same = bench("perplexity", tmp_path / "same.json", *arguments)
    assert same["perplexity"] == pytest.approx(same["float32_perplexity"], rel=1e-6)
    assert same["greedy_tokens_equal"] == 1
    assert same["tokens"] > 10
    int8 = bench("perplexity", tmp_path / "int8.json", *arguments, "--quantization", "int8")
    assert int8["float32_perplexity"] == pytest.approx(same["perplexity"], rel=1e-6)
    assert int8["perplexity"] == pytest.approx(same["perplexity"], rel=0.05)
    assert int8["weight_mib"] < same["weight_mib"]


def test_the_way_from_core_to_core_is_nanoseconds_long() -> None:
    if native.library() is None or len(os.sched_getaffinity(0)) < 2:
        assert handover_seconds() is None
    else:
        assert 1e-9 < handover_seconds() < 1e-3
