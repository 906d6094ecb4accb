"""model-config.yaml -> EngineConfig. Whatever is wrong is an error at load that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.errors import ConfigError

SECTION = "handler"
MODEL_PATH = "model_path"


def read_options(context: Any) -> EngineConfig:
    """The engine's options for the model that TorchServe's `context` describes. Raises ConfigError."""
    config: Mapping[str, Any] = context.model_yaml_config or {}
    _check_mode(config)
    options = config.get(SECTION) or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{SECTION}: {options!r} is not a section of options")
    options = dict(options)
    properties = context.system_properties
    if MODEL_PATH in options:
        path = options.pop(MODEL_PATH)
        if options.pop("model", None) is not None:
            raise ConfigError(f"{MODEL_PATH} and model: give one of them; both say what to serve")
        options["model"] = _model_path(path, Path(properties.get("model_dir")))
    if options.get("device", "auto") == "auto":
        options["device"] = _device(config, properties.get("gpu_id"))
    return EngineConfig.from_mapping(options)


def _check_mode(config: Mapping[str, Any]) -> None:
    if config.get("asyncCommunication"):
        raise ConfigError("asyncCommunication: is not supported; set continuousBatching: true in model-config.yaml")
    if config.get("continuousBatching") is not True:
        raise ConfigError(
            f"continuousBatching: {config.get('continuousBatching')!r} is not true; in-flight batching needs "
            "`continuousBatching: true` at the top level of model-config.yaml"
        )


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
