"""The metric lines that the frontend parses: few, well-formed, and right."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from ifb_handler.engine.outputs import EngineStats, FinishReason, RequestOutput, RequestTimes
from ifb_handler.torchserve.metrics import MetricsReporter

METRICS_YAML = Path(__file__).parents[1] / "config" / "metrics.yaml"
# Metric.java's pattern, and its rule for dimensions.
LINE = re.compile(
    r"\[METRICS\]\s*(?P<name>[\w\s]+)\.(?P<unit>[\w\s]+):(?P<value>[0-9\-,.e]+)\|#(?P<dimensions>[^|]*)"
    r"(\|#type:(?P<type>[^|,]+))?\|#hostname:([^,]+),([^,]+)(,(.*))?",
    re.ASCII,
)
NOTHING: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(EngineStats)}
IDLE = EngineStats(**NOTHING | {"total_blocks": 100, "request_success": {"stop": 0, "length": 0}})


def report(stats: list[EngineStats], outputs: list[RequestOutput], caplog: pytest.LogCaptureFixture) -> list[re.Match]:
    """Let a reporter see these numbers, one after the other -> the lines it wrote."""
    caplog.set_level("INFO", "ts.metrics.caching_metric")
    cache = MetricsCacheYamlImpl(str(METRICS_YAML))
    cache.initialize_cache()
    reporter = MetricsReporter(lambda: stats[0], cache, "m")
    reporter.close()
    caplog.clear()
    for output in outputs:
        reporter.finished(output)
    for each in stats:
        reporter._report(each)
    lines = [LINE.fullmatch(message) for message in caplog.messages if message.startswith("[METRICS]")]
    assert all(lines), caplog.messages
    return lines


def values(lines: list[re.Match], name: str) -> list[float]:
    return [float(line["value"]) for line in lines if line["name"] == name]


def test_gauges_are_written_when_they_change_and_counters_by_what_was_added(caplog: pytest.LogCaptureFixture) -> None:
    busy = dataclasses.replace(
        IDLE,
        num_requests_running=3,
        num_requests_waiting=2,
        used_blocks=25,
        prompt_tokens=70,
        generation_tokens=9,
        request_success={"stop": 1, "length": 0},
    )
    later = dataclasses.replace(IDLE, prompt_tokens=70, generation_tokens=12, request_success={"stop": 2, "length": 1})
    lines = report([IDLE, busy, busy, later], [], caplog)
    assert values(lines, "ifb_num_requests_running") == [3, 0]
    assert values(lines, "ifb_num_requests_waiting") == [2, 0]
    assert values(lines, "ifb_kv_cache_usage_perc") == [0.25, 0]
    assert values(lines, "ifb_prompt_tokens") == [70]
    assert values(lines, "ifb_generation_tokens") == [9, 3]
    by_reason = [(line["dimensions"], line["value"]) for line in lines if line["name"] == "ifb_request_success"]
    label = "ModelName:m,Level:Model,finished_reason:"
    assert by_reason == [(f"{label}stop", "1"), (f"{label}stop", "1"), (f"{label}length", "1")]


def test_nothing_is_written_while_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    assert report([IDLE, IDLE, IDLE], [], caplog) == []


def test_a_finished_request_is_one_observation_of_each_time(caplog: pytest.LogCaptureFixture) -> None:
    times = RequestTimes(arrived=10.0, scheduled=10.5, first_token=11.0, finished=13.0)
    done = RequestOutput("r", num_generated_tokens=5, finish_reason=FinishReason.LENGTH, times=times)
    never_ran = RequestOutput("s", finish_reason=FinishReason.ABORT, times=RequestTimes(arrived=10.0, finished=11.0))
    lines = report([IDLE], [done, never_ran], caplog)
    assert values(lines, "ifb_request_queue_time_seconds") == [0.5]
    assert values(lines, "ifb_time_to_first_token_seconds") == [1.0]
    assert values(lines, "ifb_inter_token_latency_seconds") == [0.5]
    assert values(lines, "ifb_e2e_request_latency_seconds") == [3.0, 1.0]


def test_every_metric_that_is_written_is_listed_in_metrics_yaml(caplog: pytest.LogCaptureFixture) -> None:
    listed = {
        (metric["name"], kind, len(metric["dimensions"]))
        for kind, metrics in yaml.safe_load(METRICS_YAML.read_text())["model_metrics"].items()
        for metric in metrics
        if metric["name"].startswith("ifb_")
    }
    busy = EngineStats(**{name: value or 1 for name, value in NOTHING.items()} | {"request_success": {"stop": 1}})
    times = RequestTimes(arrived=1.0, scheduled=2.0, first_token=3.0, finished=4.0)
    done = RequestOutput("r", num_generated_tokens=2, finish_reason=FinishReason.STOP, times=times)
    lines = report([IDLE, busy], [done], caplog)
    written = {(line["name"], line["type"].lower(), line["dimensions"].count(":")) for line in lines}
    assert written == listed
