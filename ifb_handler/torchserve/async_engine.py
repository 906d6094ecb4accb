"""An engine for a process that must not end: when its thread has died, another is built in its place.

In the asyncCommunication mode TorchServe starts a worker that has ended again, but calls it UNLOADING from then on, and
leaves the clients of the first one waiting.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import EngineStoppedError
from ifb_handler.engine.outputs import EngineStats

logger = logging.getLogger(__name__)


class RebuiltEngine:
    """What an Engine offers, by whichever engine there is. While there is none, requests are refused (503).

    build          builds an engine; what it raises the first time is raised here
    on_hopeless    is called when no other engine could be built: after a CUDA error that stays, for instance
    """

    def __init__(self, build: Callable[[], Engine], on_hopeless: Callable[[], None]) -> None:
        self._build = build
        self._on_hopeless = on_hopeless
        self._lock = threading.Lock()
        self._closed = False
        self._engine: Engine | None = build()
        self._last_stats = self._engine.stats()

    def __getattr__(self, name: str) -> Any:
        engine = self._engine
        if engine is None:
            raise EngineStoppedError("the engine has died and is being built again; send the request again later")
        return getattr(engine, name)

    @property
    def is_healthy(self) -> bool:
        engine = self._engine
        return engine is not None and engine.is_healthy

    def next_opening(self) -> float | None:
        engine = self._engine
        return None if engine is None else engine.next_opening()

    def is_waiting(self, request_id: str) -> bool:
        engine = self._engine
        return engine is not None and engine.is_waiting(request_id)

    def stats(self) -> EngineStats:
        """The engine's; while there is none, the last ones with nothing running."""
        engine = self._engine
        if engine is not None:
            return engine.stats()
        return dataclasses.replace(self._last_stats, num_requests_running=0, num_requests_waiting=0, used_blocks=0)

    def cancel(self, request_id: str) -> None:
        engine = self._engine
        if engine is not None:
            engine.cancel(request_id)

    def rebuild(self) -> None:
        """Replace an engine that has died, on a thread of its own. Nothing happens while that is under way."""
        with self._lock:
            dead = self._engine
            if dead is None or dead.is_healthy or self._closed:
                return
            self._last_stats = dead.stats()
            self._engine = None
        threading.Thread(target=self._replace, name="ifb-rebuild", daemon=True).start()

    def _replace(self) -> None:
        logger.error("the engine has died; another is built in its place")
        gc.collect()  # the dead one's weights and pool must go first: there is no room for two
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            engine = self._build()
        except Exception:
            logger.exception("no other engine could be built")
            self._on_hopeless()
            return
        with self._lock:
            self._engine = engine
            closed = self._closed
        if closed:
            engine.shutdown()

    def shutdown(self) -> None:
        with self._lock:
            self._closed = True
            engine = self._engine
        if engine is not None:
            engine.shutdown()
