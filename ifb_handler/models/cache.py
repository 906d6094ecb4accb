"""The user's cache folder: what was fetched or converted once and is read from then on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path:
    """IFB_CACHE_DIR, else torchserve-ifb in XDG_CACHE_HOME, else ~/.cache/torchserve-ifb. Not created here."""
    own = os.environ.get("IFB_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchserve-ifb"


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A fresh folder in `parent` (made if need be), removed at the end: on the same file system as what it becomes."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_folder(staged: Path, final: Path) -> None:
    """Rename `staged` to `final` in one step. Where another process was quicker, its folder stands."""
    with suppress(OSError):
        staged.rename(final)
    if not final.is_dir():
        raise OSError(f"{final}: cannot be made from {staged}")
