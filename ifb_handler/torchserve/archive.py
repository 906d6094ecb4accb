"""Pack a servable archive with the stock `torch-model-archiver`: handler file, model-config.yaml, perhaps weights."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml

from ifb_handler.torchserve.options import ASYNC_REQUEST_TIMEOUT

ArchiveFormat = Literal["no-archive", "mar"]
MODEL_VERSION = "1.0"
CONFIG_FILE = "model-config.yaml"

# Where packed weights lie inside the archive, apart from the handler's own files.
WEIGHTS_FOLDER = "weights"
# What a Hugging Face folder needs to be loaded; other frameworks' copies of the weights stay behind.
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Most live requests the frontend hands over, unless the batch alone is larger: see batchSize in the template.
_MIN_BATCH_SIZE = 256
# The archiver's own rule (a leading letter or digit is also what a URL segment wants).
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")


class ArchiveError(Exception):
    """An archive that cannot be written; the message is meant for a person."""


def model_config_template() -> str:
    """The text of config/model-config.yaml: every key at its default, with a comment."""
    return resources.files("ifb_handler.config").joinpath(CONFIG_FILE).read_text(encoding="utf-8")


def render_model_config(options: Mapping[str, object], asynchronous: bool = False) -> str:
    """The template with `options` (engine options and `model_path`) filled in; comments and order stay.

    Frontend keys that follow from engine options (batchSize, deviceType) are set too. `asynchronous`: served by
    asyncCommunication, not continuousBatching. ArchiveError: a key that the template does not have.
    """
    text = model_config_template()
    if asynchronous:
        options = {"request_timeout": ASYNC_REQUEST_TIMEOUT, **options}
    if "model_path" in options:
        text = _replace_line(text, "  model", f"  model_path: {_scalar(options['model_path'])}")
    for key, value in options.items():
        if key != "model_path":
            text = _replace_line(text, f"  {key}", f"  {key}: {_scalar(value)}")
    running = options.get("max_num_seqs")
    if asynchronous:
        text = _replace_line(text, "continuousBatching", "asyncCommunication: true")
        text = _replace_line(text, "batchSize", "batchSize: 1")
    elif isinstance(running, int) and 2 * running > _MIN_BATCH_SIZE:
        text = _replace_line(text, "batchSize", f"batchSize: {2 * running}")
    if options.get("device") == "cpu":
        text = _replace_line(text, "deviceType", "deviceType: cpu")
    return text


def default_archive_name(model: str) -> str:
    """A name for TorchServe from a model's name, hub id or path: `org/Model v1` gives `Model-v1`."""
    last = Path(model).name if not model.endswith(".gguf") else Path(model).stem
    return re.sub(r"[^A-Za-z0-9_\-.]+", "-", last).strip("-._") or "model"


def build_archive(
    name: str,
    options: Mapping[str, object],
    export_path: Path,
    *,
    archive_format: ArchiveFormat = "no-archive",
    weights: Path | None = None,
    asynchronous: bool = False,
    force: bool = False,
) -> Path:
    """Write `export_path/name` (a folder) or `export_path/name.mar` and return its path.

    options     engine options that differ from their defaults; `model_path` refers to weights outside the archive
    weights     a Hugging Face folder or a GGUF file to pack; sets `model_path` to its place in the archive
    force       replace an archive of the same name

    Raises ArchiveError for a bad name, an existing archive without `force`, or what the archiver reports.
    """
    if not _NAME.fullmatch(name):
        raise ArchiveError(f"name: {name!r} is not letters, digits, '_', '-' and '.', beginning with a letter or digit")
    target = export_path / (f"{name}.mar" if archive_format == "mar" else name)
    if target.exists():
        _remove_archive(target, force)
    export_path.mkdir(parents=True, exist_ok=True)
    # The archiver copies into TMPDIR/name, removing what is there; packed weights need the room of the target's disk.
    with tempfile.TemporaryDirectory(prefix=".ifb-archive-", dir=export_path) as scratch:
        options = dict(options)
        extra = []
        if weights is not None:
            options.pop("model", None)
            options["model_path"] = _stage_weights(weights, Path(scratch, "extra"))
            extra = ["--extra-files", str(Path(scratch, "extra"))]
        config = Path(scratch, CONFIG_FILE)
        config.write_text(render_model_config(options, asynchronous), encoding="utf-8")
        temporary = Path(scratch, "tmp")
        temporary.mkdir()
        # zip-store is a .mar too: weights hardly compress, and deflating gigabytes takes minutes.
        stock_format = "zip-store" if archive_format == "mar" else "no-archive"
        command = [sys.executable, "-m", "model_archiver.model_packaging", "--model-name", name]
        command += ["--version", MODEL_VERSION, "--handler", str(handler_file()), "--config-file", str(config)]
        command += ["--archive-format", stock_format, "--export-path", str(export_path), *extra]
        environ = {**os.environ, "TMPDIR": str(temporary)}
        answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if answer.returncode != 0 or not target.exists():
        lines = answer.stderr.strip().splitlines() or ["no message"]
        raise ArchiveError(f"torch-model-archiver failed: {lines[-1]}")
    return target


def handler_file() -> Path:
    """The file to give to `torch-model-archiver --handler`. It is found without being imported."""
    spec = importlib.util.find_spec("ifb_handler.handler")
    if spec is None or spec.origin is None:
        raise ArchiveError("ifb_handler/handler.py is missing from this installation")
    return Path(spec.origin)


def archive_model_name(archive: Path) -> str:
    """The model name in the manifest of a folder or a .mar; ArchiveError when `archive` is neither."""
    try:
        if archive.is_dir():
            manifest = Path(archive, "MAR-INF", "MANIFEST.json").read_bytes()
        else:
            with zipfile.ZipFile(archive) as packed:
                manifest = packed.read("MAR-INF/MANIFEST.json")
        return str(json.loads(manifest)["model"]["modelName"])
    except FileNotFoundError:
        raise ArchiveError(f"{archive} does not exist or has no MAR-INF/MANIFEST.json") from None
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ArchiveError(f"{archive} is not an archive that TorchServe can load: {error}") from None


def _remove_archive(target: Path, force: bool) -> None:
    """Make room for a new archive, and never remove a folder that is something else."""
    if not force:
        raise ArchiveError(f"{target} exists; --force replaces it, --name chooses another name")
    if target.is_file():
        target.unlink()
    elif Path(target, "MAR-INF", "MANIFEST.json").is_file():
        shutil.rmtree(target)
    else:
        raise ArchiveError(f"{target} is not an archive, so it is left alone; choose another --name or --export-path")


def _stage_weights(weights: Path, extra: Path) -> str:
    """Links under `extra` to what the archive is to hold, for --extra-files; the packed weights' path inside it."""
    folder = extra / WEIGHTS_FOLDER
    folder.mkdir(parents=True)
    if weights.is_file():
        (folder / weights.name).symlink_to(weights.resolve())
        return f"{WEIGHTS_FOLDER}/{weights.name}"
    files = sorted({file for pattern in _CHECKPOINT_FILES for file in weights.glob(pattern)})
    if not files:
        raise ArchiveError(f"{weights} holds no checkpoint (none of {', '.join(_CHECKPOINT_FILES)})")
    for file in files:
        (folder / file.name).symlink_to(file.resolve())
    return WEIGHTS_FOLDER


def _replace_line(text: str, key: str, line: str) -> str:
    """`text` with the one line `key: ...` replaced."""
    replaced, count = re.subn(rf"^{re.escape(key)}:.*$", lambda _: line, text, flags=re.MULTILINE)
    if count != 1:
        raise ArchiveError(f"{key.strip()}: not an option in {CONFIG_FILE}'s template")
    return replaced


def _scalar(value: object) -> str:
    """`value` as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True).split("\n...")[0].strip()
