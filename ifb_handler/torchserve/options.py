"""model-config.yaml -> EngineConfig. Whatever is wrong is an error at load that names the key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.errors import ConfigError

logger = logging.getLogger(__name__)

SECTION = "handler"
MODEL_PATH = "model_path"
ASYNC = "asyncCommunication"
MODES = ("continuousBatching", ASYNC)
# With asyncCommunication a client that has hung up is not seen, so that there every request has an end (seconds).
ASYNC_REQUEST_TIMEOUT = 600.0
# TorchServe's own keys that say how it is served: with a value that it cannot use it goes on with its default.
FRONTEND_COUNTS = ("batchSize", "maxBatchDelay", "minWorkers", "maxWorkers", "responseTimeout", "jobQueueSize")


def read_options(context: Any) -> EngineConfig:
    """The engine's options for the model that TorchServe's `context` describes. Raises ConfigError."""
    config: Mapping[str, Any] = context.model_yaml_config or {}
    asynchronous = is_asynchronous(context)
    _check_frontend(config)
    options = config.get(SECTION) or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{SECTION}: {options!r} is not a section of options")
    options = dict(options)
    if asynchronous:
        options.setdefault("request_timeout", ASYNC_REQUEST_TIMEOUT)
    properties = context.system_properties
    if MODEL_PATH in options:
        path = options.pop(MODEL_PATH)
        if options.pop("model", None) is not None:
            raise ConfigError(f"{MODEL_PATH} and model: give one of them; both say what to serve")
        options["model"] = _model_path(path, Path(properties.get("model_dir")))
    draft = options.get("speculative_model")
    if isinstance(draft, str) and draft:
        packed = Path(properties.get("model_dir")) / Path(draft).expanduser()
        options["speculative_model"] = str(packed) if packed.exists() else draft
    if options.get("device", "auto") == "auto":
        options["device"] = _device(config, properties.get("gpu_id"))
    return EngineConfig.from_mapping(options)


def is_asynchronous(context: Any) -> bool:
    """Whether the model is served by `asyncCommunication: true`, not by `continuousBatching: true`. Raises ConfigError
    when it is neither or both."""
    config: Mapping[str, Any] = context.model_yaml_config or {}
    chosen = [mode for mode in MODES if config.get(mode) not in (None, False)]
    if len(chosen) != 1 or config[chosen[0]] is not True:
        given = ", ".join(f"{mode}: {config.get(mode)!r}" for mode in MODES)
        raise ConfigError(
            f"{given}: one of them must be true, at the top level of model-config.yaml; `continuousBatching: true` is "
            "the usual one, `asyncCommunication: true` is for gRPC clients that want each token"
        )
    batch_size = context.system_properties.get("batch_size")
    if chosen == [ASYNC] and batch_size != 1:
        raise ConfigError(f"batchSize: {batch_size} is not 1, as asyncCommunication needs it")
    return chosen == [ASYNC]


def _check_frontend(config: Mapping[str, Any]) -> None:
    for key in FRONTEND_COUNTS:
        value = config.get(key)
        if key in config and (type(value) is not int or value < 1):
            raise ConfigError(f"{key}: {value!r} is not an integer of at least 1")
    if (workers := config.get("maxWorkers", 1)) > 1:
        logger.warning("maxWorkers: %d: each worker loads the model again and batches for itself; use 1", workers)


def _model_path(path: object, model_dir: Path) -> str:
    """A folder or GGUF file; a relative path starts in the model's own directory (what the archive unpacked to)."""
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{MODEL_PATH}: {path!r} is not a path")
    full = model_dir / Path(path).expanduser()
    if not full.exists():
        raise ConfigError(f"{MODEL_PATH}: {path!r} does not exist (looked for {full})")
    return str(full)


def _device(config: Mapping[str, Any], gpu_id: int | None) -> str:
    """The GPU that TorchServe has assigned to this worker, if it has."""
    if gpu_id is not None and gpu_id >= 0:
        return f"cuda:{gpu_id}"
    return "cpu" if config.get("deviceType") == "cpu" else "auto"
