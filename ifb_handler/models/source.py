"""Where a model's files are: the embedded default, a folder, a GGUF file, or a repository of the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ifb_handler.models.errors import ModelError
from ifb_handler.models.progress import Progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# What is fetched of a hub repository: configuration, tokenizer and safetensors; not other formats of the same weights.
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt")
_HUB_LEAVES = ("original/*", "onnx/*", "consolidated*")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: `path` is a Hugging Face folder, or a GGUF file. `name` is what answers call it."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def resolve(model: str, progress: Progress | None = None) -> ModelFiles:
    """Find the files of `model`, fetching them if needed; no weights are read.

    `model` is an embedded model's name (`smollm2-135m`), a folder with a config.json, a GGUF file, or a hub id such as
    `HuggingFaceTB/SmolLM2-135M-Instruct`. A path that exists wins over a hub id. Raises ModelError saying what was
    looked for.
    """
    from ifb_handler.models import embedded

    if model in embedded.MODELS:
        return ModelFiles(model, embedded.fetch(embedded.MODELS[model], progress))
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(path.resolve().name, _checked_folder(path))
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model: {model!r} is a file, but not a .gguf file; of safetensors, give the folder")
        return ModelFiles(path.stem, path)
    if _HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return ModelFiles(model, _checked_folder(_fetch_from_hub(model)))
    raise ModelError(
        f"model: {model!r} is not an embedded model ({', '.join(embedded.MODELS)}), nor a folder or a GGUF file that "
        "exists, nor a hub id of the form organisation/name"
    )


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        ggufs = ", ".join(sorted(p.name for p in folder.glob("*.gguf")))
        hint = f"; it holds {ggufs}: give the file itself" if ggufs else ""
        raise ModelError(f"model: the folder {str(folder)!r} has no config.json{hint}")
    return folder


def _fetch_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_LEAVES)))
    except GatedRepoError as error:
        raise ModelError(
            f"model: {model!r} is gated; accept its terms on the hub and log in (`hf auth login`)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"model: {model!r} is neither a folder here nor a public repository of the hub") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model: {model!r} is not a folder here, is not in the hub's cache, and the hub cannot be reached"
        ) from error
    except OSError as error:
        raise ModelError(
            f"model: {model!r} is not a folder here, and fetching it from the hub failed: {error}"
        ) from error
