"""Hands memory that is not needed any more back to the system. Each does nothing where the system is not Linux."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator


def release_freed_memory() -> None:
    """Return the holes in the C heap to the system: with glibc, which keeps them.

    Loading interleaves short-lived buffers with weights that stay, and a tokenizer is read through a parse tree many
    times its size: without this the holes, some 45 and 30 MB, would count as the process's memory for ever.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def release_startup_code() -> None:
    """Let go of the code that has run so far; what is needed again comes back from the page cache as it is touched.

    Linking torch and registering its operators runs through 70 MB of its libraries, of which serving needs 15.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop in _untouched_code():
        advise(start, stop - start, mmap.MADV_DONTNEED)


_CODE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ [1-9]\d*\s+/")


def _untouched_code() -> Iterator[tuple[int, int]]:
    """The addresses of each mapping of a file's code that is as it is in the file.

    Where somebody has written to a page of it (a debugger's breakpoint), it is in none: dropped, it would be lost.
    """
    try:
        with open("/proc/self/smaps") as file:
            mappings = re.split(r"^(?=[0-9a-f]+-)", file.read(), flags=re.MULTILINE)
    except OSError:
        return
    for mapping in mappings:
        code = _CODE.match(mapping)
        if code and re.search(r"^Anonymous: +0 kB$", mapping, re.M) and not re.search(r"^Swap: +[1-9]", mapping, re.M):
            yield int(code[1], 16), int(code[2], 16)
