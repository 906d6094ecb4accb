"""What an operator may ask of the engine: is it well, what has it counted, what did its last steps do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ifb_handler.api.errors import APIError, bad_field, shown
from ifb_handler.api.fields import Fields

if TYPE_CHECKING:
    from ifb_handler.engine.engine import Engine


def health(engine: Engine) -> dict[str, Any]:
    """Raises a 503 APIError when the engine's thread has died."""
    stats = engine.stats()
    if not engine.is_healthy:
        raise APIError(503, "the engine has stopped; the worker must be restarted", code="engine_stopped")
    return {
        "status": "ok",
        "model": engine.model_name,
        "num_requests_running": stats.num_requests_running,
        "num_requests_waiting": stats.num_requests_waiting,
        "used_blocks": stats.used_blocks,
        "total_blocks": stats.total_blocks,
        "kv_cache_usage_perc": stats.kv_cache_usage_perc,
    }


def stats(engine: Engine) -> dict[str, Any]:
    """EngineStats, field by field."""
    now = engine.stats()
    return dataclasses.asdict(now) | {"kv_cache_usage_perc": now.kv_cache_usage_perc}


def steps(engine: Engine, after: str, fields: Fields) -> dict[str, Any]:
    """The latest StepRecords with a number above `after`: the path's last segment, or a field of the body."""
    value: Any = after or fields.get("after", -1)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise bad_field("after", f"{shown(value)} is not a step's number") from None
    return {"steps": [dataclasses.asdict(record) for record in engine.steps(number)]}
