"""Round trips come when they are of use; what counts here is the clock that the tests set, not the machine's."""

from __future__ import annotations

import pytest

from ifb_handler.torchserve.pace import LAG, LEAD, LONGEST, LONGEST_INTERVAL, SECONDS_PER_CLIENT, SHORTEST, Pace


def test_while_requests_come_a_trip_ends_just_before_the_step() -> None:
    paced = Pace(lambda: 10.12, on_cpu=True)
    paced.opened(9.5)
    assert paced.patience(10.0) == pytest.approx(0.12 - LEAD)
    assert paced.patience(10.11) == SHORTEST, "once, not again and again"


def test_when_none_come_streams_have_their_news_first() -> None:
    paced = Pace(lambda: 10.12, on_cpu=True)
    assert paced.patience(10.0) == pytest.approx(0.12 + LAG)
    paced.opened(5.0)
    assert paced.patience(10.0) == pytest.approx(0.12 + LAG)


def test_it_waits_longest_where_a_new_request_would_have_to_wait_anyway_or_a_step_is_long() -> None:
    full = Pace(lambda: None, on_cpu=True)
    full.opened(10.0)
    assert full.patience(10.0) == LONGEST
    assert Pace(lambda: 99.0, on_cpu=True).patience(10.0) == LONGEST
    assert Pace(lambda: 0.0, on_cpu=True).patience(10.0) == SHORTEST, "nothing runs"


def test_replies_that_say_something_keep_their_distance() -> None:
    paced = Pace(lambda: None, on_cpu=True, min_interval=0.015)
    assert paced.pause(10.0) == 0.0
    paced.told(10.0, 1)
    assert paced.pause(10.005) == pytest.approx(0.010)
    assert paced.pause(10.1) == 0.0


@pytest.mark.parametrize(
    ("num_clients", "seconds"), [(1, 0.015), (5, 0.015), (24, 24 * SECONDS_PER_CLIENT), (500, LONGEST_INTERVAL)]
)
def test_on_a_cpu_replies_to_many_are_rarer_but_no_client_waits_long(num_clients: int, seconds: float) -> None:
    on_cpu, on_gpu = (Pace(lambda: None, on_cpu=each, min_interval=0.015) for each in (True, False))
    for paced in (on_cpu, on_gpu):
        paced.told(10.0, num_clients)
    assert on_cpu.pause(10.0) == pytest.approx(seconds)
    assert on_gpu.pause(10.0) == pytest.approx(0.015)
