"""model-config.yaml's keys, as TorchServe's context hands them over, become engine options or an error with a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ts.context import Context

from ifb_handler.engine.config import EngineConfig
from ifb_handler.engine.errors import ConfigError
from ifb_handler.handler import IFBHandler
from ifb_handler.torchserve.options import FRONTEND_COUNTS, read_options


def context(handler: Any = None, model_dir: Path = Path("/models"), gpu: int | None = None, **top: Any) -> Context:
    config = {"continuousBatching": True, "handler": handler, **top}
    return Context("m", str(model_dir), None, 64, gpu, "0.12.0", model_yaml_config=config)


def test_without_a_handler_section_every_option_has_its_default() -> None:
    assert read_options(context()) == EngineConfig()


def test_every_engine_option_is_a_key_of_the_handler_section() -> None:
    options = {
        "model": "somewhere/else",
        "dtype": "bfloat16",
        "max_num_seqs": 7,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 9,
        "cpu_kv_cache_gib": 2,
        "seed": 5,
    }
    assert read_options(context(options)) == EngineConfig(**options)


@pytest.mark.parametrize(
    ("handler", "named"),
    [
        ({"max_num_seq": 7}, "max_num_seq: .*max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs: 'many'"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0"),
        ({"dtype": "float8"}, "dtype: 'float8'"),
        ({"model": "a", "model_path": "b"}, "model_path and model"),
        ({"model_path": 5}, "model_path: 5"),
        ({"model_path": "not/there"}, "model_path: 'not/there' does not exist"),
        ({"speculative_method": "draft_model", "speculative_model": ""}, "speculative_model: ''"),
        (["max_num_seqs"], "handler"),
    ],
)
def test_a_key_that_cannot_be_used_is_an_error_that_names_it(handler: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options(context(handler))


def test_a_relative_model_path_starts_in_the_archive_and_an_absolute_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "archive" / "weights").mkdir(parents=True)
    (tmp_path / "model.gguf").touch()
    inside = read_options(context({"model_path": "weights"}, tmp_path / "archive"))
    assert inside.model == str(tmp_path / "archive" / "weights")
    outside = read_options(context({"model_path": str(tmp_path / "model.gguf")}, tmp_path / "archive"))
    assert outside.model == str(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("device", "gpu", "device_type", "expected"),
    [
        (None, None, "gpu", "auto"),
        (None, None, "cpu", "cpu"),
        (None, 1, "gpu", "cuda:1"),
        ("cpu", 1, "gpu", "cpu"),
        ("cuda:0", None, "cpu", "cuda:0"),
    ],
)
def test_the_device_is_torchserves_unless_the_options_name_one(
    device: str | None, gpu: int | None, device_type: str, expected: str
) -> None:
    handler = {"device": device} if device else {}
    assert read_options(context(handler, gpu=gpu, deviceType=device_type)).device == expected


@pytest.mark.parametrize(
    "top", [{"continuousBatching": False}, {"continuousBatching": None}, {"asyncCommunication": True}]
)
def test_without_a_mode_or_with_two_the_model_does_not_load(
    top: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="continuousBatching: true"):
        IFBHandler().initialize(context(**top))
    assert any("m cannot be served: ConfigError" in message for message in caplog.messages)


@pytest.mark.parametrize("key", FRONTEND_COUNTS)
@pytest.mark.parametrize("value", ["lots", "8", 1.5, True, 0, None])
def test_a_key_of_torchserves_that_is_no_count_is_an_error_that_names_it(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: {value!r} is not an integer"):
        read_options(context(**{key: value}))
    assert read_options(context(**{key: 1})) == EngineConfig()


def test_several_workers_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    read_options(context(maxWorkers=2))
    assert "maxWorkers: 2" in caplog.text
