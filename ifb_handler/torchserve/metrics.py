"""The engine's numbers as TorchServe metrics, which it serves to Prometheus on its metrics port.

A metric is a line on the worker's stdout that the frontend parses, so lines are gathered up and written at most once
a second, and none while nothing changes. The frontend's parser allows letters, digits and underscores in a name, so
vLLM's `vllm:num_requests_running` is `ifb_num_requests_running` here. A name must be listed in metrics.yaml
(`metrics_config`), with these dimensions in this order; the frontend drops what is not listed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ts.metrics.metric_cache_errors import MetricsCacheKeyError
from ts.metrics.metric_type_enum import MetricTypes

from ifb_handler.engine.outputs import EngineStats, RequestOutput, RequestTimes

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
LEVEL = "Model"
DIMENSIONS = ["ModelName", "Level"]

_GAUGES: dict[str, Callable[[EngineStats], float]] = {
    "ifb_num_requests_running": lambda stats: stats.num_requests_running,
    "ifb_num_requests_waiting": lambda stats: stats.num_requests_waiting,
    "ifb_kv_cache_usage_perc": lambda stats: stats.kv_cache_usage_perc,
}
_COUNTERS: dict[str, Callable[[EngineStats], int]] = {
    "ifb_num_preemptions": lambda stats: stats.num_preemptions,
    "ifb_prompt_tokens": lambda stats: stats.prompt_tokens,
    "ifb_generation_tokens": lambda stats: stats.generation_tokens,
    "ifb_prefix_cache_queries": lambda stats: stats.prefix_cache_queries,
    "ifb_prefix_cache_hits": lambda stats: stats.prefix_cache_hits,
    "ifb_spec_decode_num_draft_tokens": lambda stats: stats.spec_decode_num_draft_tokens,
    "ifb_spec_decode_num_accepted_tokens": lambda stats: stats.spec_decode_num_accepted_tokens,
}
_SUCCESS = "ifb_request_success"
# vLLM observes the inter-token latency of every token; a line a token is too dear here, so it is a request's mean.
_TIMES: dict[str, Callable[[RequestTimes, int], float | None]] = {
    "ifb_time_to_first_token_seconds": lambda times, tokens: _between(times.arrived, times.first_token),
    "ifb_inter_token_latency_seconds": lambda times, tokens: _mean_gap(times, tokens),
    "ifb_e2e_request_latency_seconds": lambda times, tokens: _between(times.arrived, times.finished),
    "ifb_request_queue_time_seconds": lambda times, tokens: _between(times.arrived, times.scheduled),
}


class MetricsReporter:
    """stats         called for the engine's numbers, from the reporter's thread
    cache         `context.metrics`, TorchServe's MetricsCache
    model_name    as registered with TorchServe
    """

    def __init__(self, stats: Callable[[], EngineStats], cache: Any, model_name: str) -> None:
        self._stats = stats
        self._cache = cache
        self._model_name = model_name
        self._finished: list[tuple[RequestTimes, int]] = []
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, int] = {}
        self._successes: dict[str, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ifb-metrics", daemon=True)
        self._thread.start()

    def finished(self, output: RequestOutput) -> None:
        """A request's last output. From any one thread; costs nothing until the next report."""
        self._finished.append((output.times, output.num_generated_tokens))

    def close(self) -> None:
        """Stop after one last report."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._report(self._stats())
            except Exception:
                logger.exception("metrics could not be reported")
            if self._closed.is_set():
                return
            self._closed.wait(PERIOD_SECONDS)

    def _report(self, stats: EngineStats) -> None:
        for name, of in _GAUGES.items():
            value = round(of(stats), 6)
            if value != self._gauges.get(name):
                self._gauges[name] = value
                self._emit(name, MetricTypes.GAUGE, value)
        for name, of in _COUNTERS.items():
            self._count(name, of(stats), self._counters, name)
        for reason, total in stats.request_success.items():
            self._count(_SUCCESS, total, self._successes, str(reason), {"finished_reason": str(reason)})
        finished, self._finished = self._finished, []
        for times, tokens in finished:
            for name, between in _TIMES.items():
                if (seconds := between(times, tokens)) is not None:
                    self._emit(name, MetricTypes.HISTOGRAM, round(seconds, 6))

    def _count(
        self, name: str, total: int, seen: dict[str, int], key: str, dimensions: dict[str, str] | None = None
    ) -> None:
        """Emit what was added since the last report; the first time even 0, so that the series exists.

        A total below the last one is that of a new engine.
        """
        before = seen.get(key, 0)
        if total != seen.get(key):
            self._emit(name, MetricTypes.COUNTER, total - before if total >= before else total, dimensions)
            seen[key] = total

    def _emit(self, name: str, kind: MetricTypes, value: float, dimensions: dict[str, str] | None = None) -> None:
        more = dimensions or {}
        try:
            metric = self._cache.get_metric(name, kind)
        except MetricsCacheKeyError:  # not in metrics.yaml; with model_metrics_auto_detect the frontend takes it anyway
            metric = self._cache.add_metric_to_cache(name, "count", [*DIMENSIONS, *more], kind)
        metric.add_or_update(value, [self._model_name, LEVEL, *more.values()])


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _mean_gap(times: RequestTimes, tokens: int) -> float | None:
    seconds = _between(times.first_token, times.finished)
    return seconds / (tokens - 1) if seconds is not None and tokens > 1 else None
