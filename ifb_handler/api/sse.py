"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import json
from typing import Any

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = "data: [DONE]\n\n"

# Made once: `json.dumps` makes one at each call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def event(body: dict[str, Any]) -> str:
    return f"data: {compact(body)}\n\n"


def compact(body: dict[str, Any]) -> str:
    """JSON on one line, text as UTF-8 rather than escaped. Raises ValueError for a number that JSON has no form for."""
    return _ENCODER.encode(body)
