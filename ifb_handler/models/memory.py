"""Hands freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys


def release_freed_memory() -> None:
    """Return the holes in the C heap to the system: with glibc, which keeps them; elsewhere nothing is done.

    Loading interleaves short-lived buffers with weights that stay, and a tokenizer is read through a parse tree many
    times its size: without this the holes, some 45 and 30 MB, would count as the process's memory for ever.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
