"""What a client is told when a request cannot be served: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError

RETRY_AFTER_SECONDS = "1"


class APIError(Exception):
    """status    HTTP status, 400 and above
    message   what is wrong, in words a client can act on
    param     the field of the body at fault, None when it is none of them
    code      a word for programs, such as `model_not_found`
    headers   HTTP headers beside the content type
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @classmethod
    def of(cls, error: Exception) -> APIError:
        """The answer to any exception. One that is nobody's on purpose becomes a 500 that keeps its details inside."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, RequestError):
            return cls(400, error.message, param=error.param)
        if isinstance(error, QueueFullError):
            return cls(503, str(error), code="queue_full", headers={"retry-after": RETRY_AFTER_SECONDS})
        if isinstance(error, EngineStoppedError):
            return cls(503, str(error), code="engine_stopped", headers={"retry-after": RETRY_AFTER_SECONDS})
        return cls(500, f"internal error ({type(error).__name__}); the server's log has the details")

    @property
    def phrase(self) -> str:
        """The reason phrase of the status line."""
        return HTTPStatus(self.status).phrase

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return "overloaded_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self) -> str:
        return json.dumps(self.body())


def bad_field(param: str, message: str) -> APIError:
    """A 400 for the field `param`; the message is prefixed with its name."""
    return APIError(400, f"{param}: {message}", param=param)


def shown(value: object) -> str:
    """A client's value in an error message: as JSON has it, cut to a length that a log line bears."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    return text if len(text) <= 80 else f"{text[:77]}..."
