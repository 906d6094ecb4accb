"""What keeps an engine from starting is named: the checkpoint's fault or the option's, not what fails because of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_checkpoint_gguf import random_tensors, write_gguf
from tiny_llama import write_tiny_llama

from ifb_handler.engine.engine import Engine
from ifb_handler.engine.errors import ConfigError
from ifb_handler.models.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_threads", 100_000, rf"100000 is more than this machine's {os.cpu_count()} cores"),
        ("num_gpu_blocks_override", 2**31 - 1, r"asks for .* GiB on cpu, which has "),
        ("swap_space", 2.0**20, r"asks for .* GiB on cpu, which has "),
    ],
)
def test_an_option_beyond_the_machine_is_refused_by_its_name(
    folder: Path, option: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: {message}"):
        Engine(str(folder), device="cpu", **{option: value})


def test_a_truncated_gguf_file_is_said_to_be_incomplete(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", random_tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length, message in ((100, "cannot be read as GGUF"), (len(whole) // 2, "the file is incomplete")):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=message) as error:
            Engine(str(cut))
        assert "tokenizer" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("num_attention_heads", 0), ("num_hidden_layers", "2"), ("hidden_size", -64)]
)
def test_a_count_in_config_json_that_is_none_is_refused_by_its_key(
    folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match=f"^{key}: {value!r} is not a whole number of at least 1"):
        Engine(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: cannot be read as JSON"):
        Engine(str(tmp_path))
