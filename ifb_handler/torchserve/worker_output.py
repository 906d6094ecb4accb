"""The lines that TorchServe's side of the worker writes at every call, thinned out: the frontend reads and parses each.

Under continuousBatching a call is a round trip, dozens a second, and the time of one is the wait for the engine.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from ts.metrics.metric_cache_abstract import MetricCacheAbstract
from ts.service import PREDICTION_METRIC

_EACH_CALL = "Backend received inference at: %d"
PERIOD_SECONDS = 1.0


def thin_out(metrics: MetricCacheAbstract) -> None:
    """No line for a call that has come, and the time of a call once a second, without the ids of all that were live.

    metrics    `context.metrics`
    """
    logging.getLogger().addFilter(_is_no_call)
    metrics.add_time = _SeldomTime(metrics)


def _is_no_call(record: logging.LogRecord) -> bool:
    return record.msg != _EACH_CALL


class _SeldomTime:
    """What stands for `add_time` of these metrics."""

    def __init__(self, metrics: MetricCacheAbstract) -> None:
        self._metrics = metrics
        self._add_time = metrics.add_time
        self._next = 0.0

    def __call__(self, name: str, value: float, *more: Any, **named: Any) -> None:
        if name == PREDICTION_METRIC:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + PERIOD_SECONDS
            self._metrics.request_ids = {}
        self._add_time(name, value, *more, **named)
