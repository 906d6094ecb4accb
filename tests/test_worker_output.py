"""What the worker writes for the frontend to parse does not grow with the round trips."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.service import PREDICTION_METRIC

from ifb_handler.torchserve import worker_output

METRICS_YAML = Path(__file__).parents[1] / "config" / "metrics.yaml"


@pytest.fixture
def metrics(caplog: pytest.LogCaptureFixture) -> Iterator[MetricsCacheYamlImpl]:
    """A worker's metrics, and its log at the level that TorchServe sets."""
    filters = list(logging.getLogger().filters)
    caplog.set_level("INFO")
    cache = MetricsCacheYamlImpl(str(METRICS_YAML))
    cache.initialize_cache()
    cache.model_name = "m"
    worker_output.thin_out(cache)
    yield cache
    logging.getLogger().filters[:] = filters


def test_the_time_of_a_call_is_told_once_a_second_and_without_ids(
    metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(worker_output, "time", SimpleNamespace(monotonic=lambda: now))
    for call in range(250):
        now += 0.02
        metrics.request_ids = {index: f"id-{index}" for index in range(64)}
        metrics.add_time(PREDICTION_METRIC, float(call))
    lines = [message for message in caplog.messages if "PredictionTime" in message]
    assert len(lines) in (5, 6)
    # TorchServe keeps the first model's name of a process for all (a default argument that it appends to).
    line = r"\[METRICS\]PredictionTime\.\w+:[0-9.]+\|#ModelName:\w+,Level:Model\|#type:GAUGE\|#hostname:[^,]+,[0-9]+"
    assert all(re.fullmatch(line, message) for message in lines), lines


def test_other_times_are_told_as_ever(metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture) -> None:
    metrics.request_ids = {0: "a", 1: "b"}
    for _ in range(3):
        metrics.add_time("Own", 1.5, idx=1, unit="s")
    lines = [message for message in caplog.messages if "Own.Seconds:1.5" in message]
    assert len(lines) == 3
    assert all(line.endswith(",b") for line in lines)


def test_a_call_that_has_come_is_no_line_and_all_else_is(
    metrics: MetricsCacheYamlImpl, caplog: pytest.LogCaptureFixture
) -> None:
    logging.info("Backend received inference at: %d", 17)
    logging.info("Frontend disconnected.")
    assert caplog.messages == ["Frontend disconnected."]
