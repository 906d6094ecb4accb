"""What a step takes is learnt from the steps."""

from __future__ import annotations

import pytest

from ifb_handler.engine.step_time import StepTime


def seen(*steps: tuple[int, float]) -> StepTime:
    time = StepTime()
    for num_tokens, seconds in steps:
        time.observe(num_tokens, seconds)
    return time


def test_the_fit_is_the_line_that_the_steps_lie_on() -> None:
    line = seen(*((size, 0.02 + 0.001 * size) for size in (1, 5, 9, 30) * 10))
    assert line.fit() == pytest.approx((0.02, 0.001))
    assert line.seconds_per_token > 0.001


def test_steps_of_one_size_say_nothing_of_the_slope_and_a_ridge_takes_it_for_none() -> None:
    same = seen(*[(8, 0.03)] * 20)
    assert same.variance == pytest.approx(0.0, abs=1e-6)
    fixed, per_token = same.fit(ridge=0.5)
    assert (fixed, per_token) == pytest.approx((0.03, 0.0), abs=1e-6)


def test_neither_part_is_ever_negative() -> None:
    assert seen(*[(1, 0.04), (9, 0.02)] * 10).fit()[1] == 0.0
    assert seen(*[(5, 0.01), (9, 0.05)] * 10).fit()[0] == pytest.approx(0.0)


def test_one_step_that_takes_for_ever_is_forgotten_soon() -> None:
    steps = [(1 + i % 8, 0.02 + 0.001 * (1 + i % 8)) for i in range(80)]
    accident = seen(*steps[:40], (4, 60.0), *steps[40:])
    fixed, per_token = accident.fit()
    assert fixed + 4 * per_token == pytest.approx(0.024, rel=0.2)
