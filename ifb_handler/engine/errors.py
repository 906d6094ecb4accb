"""What the engine refuses, in words a client can act on. The api room turns each into an HTTP answer."""

from __future__ import annotations


class EngineError(Exception):
    """Any failure that the engine reports on purpose."""


class RequestError(EngineError, ValueError):
    """A request that can never run as it stands: `param` is the field at fault, None when it is the whole request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class QueueFullError(EngineError):
    """The waiting queue has reached `max_num_waiting`; the same request may be sent again later."""


class EngineStoppedError(EngineError):
    """The engine is draining or has stopped and takes no new requests."""


class ConfigError(EngineError, ValueError):
    """An engine option that cannot be used: names the key, its value and what is allowed."""
