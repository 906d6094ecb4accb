"""The entry point that TorchServe loads; torch-model-archiver is given this file as --handler."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ifb_handler.torchserve.async_bridge import AsyncBridge

logger = logging.getLogger(__name__)

# Time for the reply of the last round trip to leave.
EXIT_DELAY_SECONDS = 0.5


class IFBHandler:
    """In-flight batching behind TorchServe's `continuousBatching: true`, or else `asyncCommunication: true`.

    TorchServe calls `handle` over and over with the ids of all live requests. The engine runs on a thread of its own;
    a call hands it what is new, cancels what is gone, and returns what has been generated since the last call.
    With asyncCommunication it is called once for each request, and a bridge of ours makes the round trips.
    """

    async_bridge: AsyncBridge | None = None

    def initialize(self, context: Any) -> None:
        """Load the model and start the engine. Raises on what cannot be served, and says so in one line of the log."""
        # TorchServe gives a worker two minutes to come up but startupTimeout to load: the heavy imports belong here.
        from ifb_handler.api.served_model import ServedModel
        from ifb_handler.engine.engine import Engine
        from ifb_handler.torchserve import message_reader, worker_output
        from ifb_handler.torchserve.async_bridge import AsyncBridge
        from ifb_handler.torchserve.async_engine import RebuiltEngine
        from ifb_handler.torchserve.metrics import MetricsReporter
        from ifb_handler.torchserve.options import is_asynchronous, read_options
        from ifb_handler.torchserve.round_trip import RoundTrip

        try:
            options = read_options(context)
            build = partial(Engine.from_config, options)
            engine = RebuiltEngine(build, _restart_worker) if is_asynchronous(context) else build()
        except Exception as error:
            logger.error("%s cannot be served: %s: %s", context.model_name, type(error).__name__, error)
            raise
        model = ServedModel.of(engine, aliases=(context.model_name,))
        atexit.register(engine.shutdown)
        # With asyncCommunication TorchServe copies the context for every request: what it copies must not change.
        metrics = MetricsReporter(engine.stats, copy.deepcopy(context.metrics), context.model_name)
        if isinstance(engine, RebuiltEngine):
            self.async_bridge = AsyncBridge(engine, model, metrics.finished)
            return
        self.round_trip = RoundTrip(engine, model, metrics.finished, _restart_worker)
        message_reader.install()
        worker_output.thin_out(context.metrics)
        if (batch_size := context.system_properties.get("batch_size") or 0) < options.max_num_seqs:
            logger.warning(
                "batchSize %d is below max_num_seqs %d: TorchServe lets in fewer requests than could run; raise it",
                batch_size,
                options.max_num_seqs,
            )

    def preprocess(self, data: list[dict[str, Any]], context: Any) -> None:
        """Submit the requests that are new, cancel those whose clients have hung up."""
        self.round_trip.take_in(data, context)

    def inference(self) -> None:
        """Collect what the engine has generated; wait for it, but only for milliseconds."""
        self.round_trip.collect()

    def postprocess(self, context: Any) -> list[bytes | None]:
        """Tell each client what is new for it."""
        return self.round_trip.replies(context)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[bytes | None] | Awaitable[NoReturn]:
        """One round trip. Never raises: an exception would end every live request."""
        if self.async_bridge is not None:
            return self.async_bridge.receive(data, context)
        with self.round_trip.call():
            try:
                self.preprocess(data, context)
                self.inference()
                return self.postprocess(context)
            except Exception:
                logger.exception("the round trip failed")
                return self.round_trip.give_up(context)


def _restart_worker() -> None:
    """The engine has died: end this process, so that TorchServe starts a new one, rather than be READY while dead."""
    logger.error("the engine has died; the worker ends, and TorchServe starts another")
    threading.Timer(EXIT_DELAY_SECONDS, os._exit, (1,)).start()
