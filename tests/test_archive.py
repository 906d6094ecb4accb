"""Archives: what is written into them, and that TorchServe serves what the stock archiver and `ifb archive` write."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
import yaml

from ifb_handler.cli.java import find_java
from ifb_handler.cli.ports import Ports
from ifb_handler.cli.server import ServerOptions, TorchServe
from ifb_handler.engine.config import EngineConfig
from ifb_handler.models.source import resolve
from ifb_handler.torchserve import archive

ROOT = Path(__file__).parents[1]
ARCHIVER = [sys.executable, "-m", "model_archiver.model_packaging"]  # what `torch-model-archiver` runs


def test_the_template_lists_every_engine_option_at_its_default() -> None:
    listed = yaml.safe_load(archive.model_config_template())["handler"]
    assert listed == {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def test_chosen_options_are_filled_in_and_the_comments_stay() -> None:
    text = archive.render_model_config({"max_num_seqs": 8, "dtype": "bfloat16", "gpu_memory_utilization": 1e-5})
    filled = yaml.safe_load(text)
    assert filled["handler"]["max_num_seqs"] == 8
    assert filled["handler"]["dtype"] == "bfloat16"
    assert filled["handler"]["gpu_memory_utilization"] == 1e-5
    assert filled["continuousBatching"] is True
    assert text.count("#") == archive.model_config_template().count("#")


@pytest.mark.parametrize("name", ["no", "null", "123", "a: b", "a #b", "it's", 'say "x"', "two\nlines", "Modèle"])
def test_any_text_comes_out_of_the_config_as_it_went_in(name: str) -> None:
    text = archive.render_model_config({"served_model_name": name})
    assert yaml.safe_load(text)["handler"]["served_model_name"] == name


def test_weights_by_path_take_the_place_of_the_models_name() -> None:
    options = yaml.safe_load(archive.render_model_config({"model_path": "/models/some model"}))["handler"]
    assert options["model_path"] == "/models/some model"
    assert "model" not in options


def test_a_batch_larger_than_the_frontends_limit_raises_that_limit() -> None:
    limit = yaml.safe_load(archive.model_config_template())["batchSize"]
    assert yaml.safe_load(archive.render_model_config({"max_num_seqs": limit}))["batchSize"] > limit
    assert yaml.safe_load(archive.render_model_config({"max_num_seqs": 2}))["batchSize"] == limit


def test_an_option_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(archive.ArchiveError, match="max_num_seqz"):
        archive.render_model_config({"max_num_seqz": 8})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("org/Some Model", "Some-Model"),
        ("/models/file.v2.gguf", "file.v2"),
        ("./folder/", "folder"),
        ("/models/模型", "model"),
    ],
)
def test_the_archives_name_comes_from_the_models(model: str, name: str) -> None:
    assert archive.default_archive_name(model) == name


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a b", "..", "é"])
def test_a_name_that_torchserve_cannot_use_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(archive.ArchiveError, match="name"):
        archive.build_archive(name, {}, tmp_path)


def test_an_archive_is_replaced_only_when_asked_and_a_strange_folder_never(tmp_path: Path) -> None:
    written = archive.build_archive("m", {"max_num_seqs": 4}, tmp_path)
    with pytest.raises(archive.ArchiveError, match="--force"):
        archive.build_archive("m", {}, tmp_path)
    (written / "left-over").touch()
    archive.build_archive("m", {"max_num_seqs": 5}, tmp_path, force=True)
    assert sorted(path.name for path in written.iterdir()) == ["MAR-INF", "handler.py", "model-config.yaml"]
    assert yaml.safe_load((written / "model-config.yaml").read_text())["handler"]["max_num_seqs"] == 5
    (tmp_path / "mine").mkdir()
    with pytest.raises(archive.ArchiveError, match="left alone"):
        archive.build_archive("mine", {}, tmp_path, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "mine"]


def test_a_checkpoint_folder_is_packed_without_other_formats_of_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "checkpoint"
    weights.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (weights / name).write_text(name)
    written = archive.build_archive("m", {"model_path": str(weights)}, tmp_path, archive_format="mar", weights=weights)
    with zipfile.ZipFile(written) as packed:
        names = {name for name in packed.namelist() if name.startswith("weights/")}
        config = yaml.safe_load(packed.read("model-config.yaml"))
    assert names == {"weights/config.json", "weights/tokenizer.json", "weights/model.safetensors"}
    assert config["handler"]["model_path"] == "weights"
    assert archive.archive_model_name(written) == "m"


def test_a_folder_without_a_checkpoint_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(archive.ArchiveError, match="holds no checkpoint"):
        archive.build_archive("m", {}, tmp_path, weights=tmp_path / "empty")


def test_what_is_no_archive_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "text.mar").write_text("not a zip")
    for path in (tmp_path, tmp_path / "text.mar", tmp_path / "missing"):
        with pytest.raises(archive.ArchiveError, match=path.name):
            archive.archive_model_name(path)


def test_torchserve_serves_a_folder_that_the_stock_archiver_wrote(tmp_path: Path) -> None:
    """The command line of README, on the files of this repository."""
    command = [*ARCHIVER, "--model-name", "stock", "--version", "1.0", "--handler", "ifb_handler/handler.py"]
    command += ["--config-file", "config/model-config.yaml", "--archive-format", "no-archive"]
    subprocess.run([*command, "--export-path", str(tmp_path)], cwd=ROOT, check=True)
    assert _answer(tmp_path / "stock", "stock") == _CAPITAL


def test_torchserve_serves_a_mar_that_the_stock_archiver_packed_with_weights(tmp_path: Path) -> None:
    weights = resolve("smollm2-135m").path
    config = tmp_path / "model-config.yaml"
    config.write_text(archive.render_model_config({"model_path": weights.name}))
    command = [*ARCHIVER, "--model-name", "packed", "--version", "1.0", "--handler", "ifb_handler/handler.py"]
    command += ["--config-file", str(config), "--extra-files", str(weights), "--export-path", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert _answer(tmp_path / "packed.mar", "packed") == _CAPITAL


def test_torchserve_serves_a_mar_that_ifb_archive_packed_with_weights(tmp_path: Path) -> None:
    weights = resolve("smollm2-135m").path
    written = archive.build_archive(
        "ours", {"model": "smollm2-135m", "max_num_seqs": 4}, tmp_path, archive_format="mar", weights=weights
    )
    assert _answer(written, "ours") == _CAPITAL


# The embedded model in float32, greedy.
_CAPITAL = "The capital of France is Paris."


def _answer(path: Path, name: str) -> str:
    """Serve the archive, ask one question, stop."""
    options = ServerOptions(path, name, Ports.from_first(0, "127.0.0.1"), find_java(), startup_seconds=300)
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    with TorchServe(options) as server:
        server.wait_ready(print)
        answer = httpx.post(f"{server.model_url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]
