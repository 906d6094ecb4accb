"""`ifb demo`: the drawing, from steps made by hand, and one whole run as a log shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from ifb_handler.cli.chat import Question, Reply
from ifb_handler.cli.demo import DemoRun
from ifb_handler.cli.errors import CliError
from ifb_handler.cli.timeline import Timeline


def _step(number: int, *, used: int = 0, **states: Any) -> dict[str, Any]:
    """A StepRecord as JSON brings it."""
    empty: dict[str, Any] = {"waiting": [], "prefill": [], "decode": [], "preempted": [], "finished": []}
    return {"step": number, "used_blocks": used, "total_blocks": 10, **empty, **states}


def _run_of_two() -> Timeline:
    timeline = Timeline()
    timeline.add([_step(0, prefill=[["a", 5]], waiting=["b"], used=1)])
    timeline.add([_step(1, decode=["a"], waiting=["b"], used=2), _step(2, decode=["a"], prefill=[["b", 9]], used=5)])
    timeline.add([_step(3, decode=["b"], preempted=["a"], used=10), _step(4, decode=["b"], waiting=["a"])])
    return timeline


def test_each_request_is_a_row_and_each_step_a_column() -> None:
    drawn = _run_of_two().draw({"a": "first"}, 80, plain=True, whole=True).plain.splitlines()
    assert drawn == ["first  Pddx.", "#2     ..Pdd", "pool   12590"]


def test_a_live_picture_shows_the_newest_steps() -> None:
    timeline = Timeline()
    timeline.add([_step(i, decode=["a"] if i % 2 else []) for i in range(101)])
    row, _ = timeline.draw({"a": "only"}, 16, plain=True, whole=False).plain.splitlines()
    assert row == "only  d d d d d "


def test_a_long_run_is_squeezed_into_the_width_and_no_prefill_is_lost() -> None:
    timeline = Timeline()
    timeline.add([_step(i, prefill=[["a", 1]] if i == 37 else [], decode=[] if i == 37 else ["a"]) for i in range(200)])
    row, _ = timeline.draw({}, 46, plain=True, whole=True).plain.splitlines()
    assert len(row) <= 46
    assert row.count("P") == 1


def test_signs_on_a_terminal_stand_where_letters_stand_in_a_log() -> None:
    timeline = _run_of_two()
    letters = timeline.draw({}, 80, plain=True, whole=True).plain.splitlines()
    signs = timeline.draw({}, 80, plain=False, whole=True).plain.splitlines()
    assert [len(line) for line in signs] == [len(line) for line in letters]


def test_a_reply_is_complete_only_with_its_end_and_its_counts() -> None:
    whole = {"text": "x", "finish_reason": "stop", "completion_tokens": 1, "closed": True}
    assert Reply(Question("q", "?", 1, 0), **whole).complete
    for missing in whole:
        assert not Reply(Question("q", "?", 1, 0), **{k: v for k, v in whole.items() if k != missing}).complete
    assert not Reply(Question("q", "?", 1, 0), error="cut off", **whole).complete


def test_the_demo_fails_unless_every_answer_arrived_whole() -> None:
    whole, broken = (Reply(Question(name, "?", 1, 0), "id", "x", 0.0, [1.0], 1, 1, "stop") for name in ("a", "b"))
    whole.closed = True
    DemoRun([whole], "").check()
    with pytest.raises(CliError, match=r"1 of 2 answers did not arrive whole: b \(the stream broke off\)"):
        DemoRun([whole, broken], "").check()


@pytest.mark.timeout(400)
def test_the_demo_runs_and_shows_requests_that_join_and_leave_a_running_batch() -> None:
    command = [sys.executable, "-m", "ifb_handler.cli.main", "demo"]
    environ = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=360, stdin=subprocess.DEVNULL)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "All 10 answers arrived whole." in answer.stdout
    assert re.search(r"\d+ tokens in [\d.]+ s: [\d.]+ tokens/s, TTFT p50", answer.stdout)
    rows = {line.split()[0]: line for line in answer.stdout.splitlines() if re.match(r"\w+ +[.Pdx ]*P[.Pdx ]*$", line)}
    assert len(rows) == 10
    assert [name for name in rows if not re.search(rf"\b{name} done", answer.stdout)] == [], "each is seen to leave"
    # Who came later and asks for less joins while the story is told, and leaves before its end.
    assert rows["capital"].index("P") > rows["story"].index("P")
    assert len(rows["capital"].rstrip()) < len(rows["story"].rstrip())
    waited = [line for line in answer.stdout.splitlines() if re.search(r"waiting [1-9]", line)]
    assert waited, "six at once: the others wait"
