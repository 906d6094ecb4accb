"""OpenAI's `GET v1/models` and `GET v1/models/{name}`."""

from __future__ import annotations

from typing import Any

from ifb_handler.api.errors import APIError, shown
from ifb_handler.api.served_model import ServedModel


def listing(model: ServedModel) -> dict[str, Any]:
    return {"object": "list", "data": [_card(model, model.name)]}


def card(model: ServedModel, name: str) -> dict[str, Any]:
    """Raises a 404 APIError for a name that is not served."""
    if not model.answers_to(name):
        raise APIError(404, f"model {shown(name)} is not served here; {model.name!r} is", code="model_not_found")
    return _card(model, name)


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "torchserve-ifb",
        "max_model_len": model.max_model_len,
    }
