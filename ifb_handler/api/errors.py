"""What a client is told when a request cannot be served: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from ifb_handler.engine.errors import EngineStoppedError, QueueFullError, RequestError

RETRY_AFTER_SECONDS = 1
# Characters: a message may quote what a client sent, which may be megabytes.
LONGEST_MESSAGE = 1000

_TYPES = {
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class APIError(Exception):
    """status         HTTP status, 400 and above
    message        what is wrong, in words a client can act on
    param          the field of the body at fault, None when it is none of them
    code           a word for programs, such as `model_not_found`
    retry_after    seconds after which the same request may succeed; told in a header and in the body
    headers        HTTP headers beside the content type
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST_MESSAGE else f"{message[: LONGEST_MESSAGE - 3]}..."
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @classmethod
    def of(cls, error: Exception) -> APIError:
        """The answer to any exception. One that is nobody's on purpose becomes a 500 that keeps its details inside."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, RequestError):
            return cls(400, error.message, param=error.param)
        if isinstance(error, QueueFullError):
            return cls(503, str(error), code="queue_full", retry_after=RETRY_AFTER_SECONDS)
        if isinstance(error, EngineStoppedError):
            return cls(503, str(error), code="engine_stopped", retry_after=RETRY_AFTER_SECONDS)
        return cls(500, f"internal error ({type(error).__name__}); the server's log has the details")

    @property
    def phrase(self) -> str:
        """The reason phrase of the status line."""
        return HTTPStatus(self.status).phrase

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        return _TYPES.get(HTTPStatus(self.status), "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | ({} if self.retry_after is None else {"retry_after": self.retry_after})}


def bad_field(param: str, message: str, code: str | None = None) -> APIError:
    """A 400 for the field `param`; the message is prefixed with its name."""
    return APIError(400, f"{param}: {message}", param=param, code=code)


def expired(seconds: float) -> APIError:
    """A request whose time is up. OpenAI's client is told not to send it again by itself: it would take as long."""
    return APIError(
        504,
        f"the answer was not complete after {seconds:g} seconds, the request's timeout",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def shown(value: object) -> str:
    """A client's value in an error message: as JSON has it, cut to a length that a log line bears."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value).__name__)
    return text if len(text) <= 80 else f"{text[:77]}..."
