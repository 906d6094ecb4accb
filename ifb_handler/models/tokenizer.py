"""The model's tokenizer, as a fast tokenizer of `transformers`, chat template included.

Converting the vocabulary of a GGUF file takes seconds and 200 MB. It is done once: the converted tokenizer is kept in
the cache folder. `transformers` is imported here only, inside functions, and only its tokenizer part.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from ifb_handler.models.cache import cache_folder, publish_folder, staging_folder
from ifb_handler.models.errors import ModelError
from ifb_handler.models.memory import release_freed_memory
from ifb_handler.models.source import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(files: ModelFiles, override: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of `files`, or of `override`: a folder, a tokenizer.json, a GGUF file or a hub id.

    Raises ModelError when there is none that can be loaded.
    """
    source = files.path if override is None else Path(override).expanduser()
    try:
        if source.is_file():
            if source.suffix.lower() == ".gguf":
                return _from_folder(_converted(source))
            if source.name == "tokenizer.json" and (source.parent / "tokenizer_config.json").exists():
                return _from_folder(source.parent)
            return _from_json(source)
        return _from_folder(source if override is None or source.is_dir() else override)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"tokenizer: none can be loaded from {str(source)!r}: {error}") from error
    finally:
        release_freed_memory()


def _from_folder(source: Path | str) -> PreTrainedTokenizerFast:
    """From a folder or a hub id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"tokenizer: {str(source)!r} has no tokenizer.json and none can be made from it")
    return tokenizer


def _from_json(path: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(path))


def _converted(gguf: Path) -> Path:
    """The folder of the tokenizer that was converted from the file `gguf`, now or before."""
    folder = cache_folder() / "tokenizers" / _key(gguf)
    if folder.is_dir():
        return folder
    with staging_folder(folder.parent) as staging:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tokenizer.save_pretrained(staging / "tokenizer")
        publish_folder(staging / "tokenizer", folder)
    return folder


def _key(gguf: Path) -> str:
    """Differs for another file, a changed file, and another `transformers`, which may convert otherwise."""
    stat = gguf.stat()
    told = f"{gguf.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{version('transformers')}"
    return f"{gguf.stem}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
