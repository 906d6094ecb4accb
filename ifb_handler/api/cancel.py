"""`POST v1/cancel`: end another request by its id, for a client whose hang-up TorchServe does not see."""

from __future__ import annotations

from ifb_handler.api.errors import APIError, bad_field, shown
from ifb_handler.api.fields import Fields, text


def read(fields: Fields) -> str:
    """The id in `request_id`. Raises a 400 APIError."""
    named = text(fields, "request_id")
    if not named:
        raise bad_field("request_id", f"{shown(named)} is not a request's id: x-request-id, or an answer's id")
    return named


def cancelled() -> APIError:
    """What the client of a cancelled request is told, if it is still there."""
    return APIError(409, "the request was cancelled through v1/cancel", code="cancelled")


def report(named: str, count: int) -> dict[str, object]:
    """The answer: how many live requests had that id. None is no error: it may just have ended."""
    return {"request_id": named, "cancelled": count}
