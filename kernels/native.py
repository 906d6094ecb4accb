"""The native CPU library: compiled on first use from the C++ beside this file, kept in a cache, called by ctypes.

The machine's own compiler makes it (`$CXX`, else g++, clang++ or c++), for the machine's own instruction set. The file
is named for everything that shapes it (sources, flags, compiler, processor, torch), so a stale one is never loaded, and
it is moved into place in one step, so that processes may build it at the same time.

The cache folder is `$IFB_CACHE_DIR`, else `$XDG_CACHE_HOME/torchserve-ifb`, else `~/.cache/torchserve-ifb`. Without a
compiler `library()` is None, and every caller has a plain torch path.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SOURCES = (
    "native_attention.cpp",
    "native_kv_cache_write.cpp",
    "native_decoder_ops.cpp",
    "native_linear.cpp",
    "native_linear_int8.cpp",
    "native_linear_grouped.cpp",
    "native_decoder.cpp",
    "native_argmax.cpp",
    "native_draw.cpp",
    "native_q8_0.cpp",
    "native_handover.cpp",
    "native_threads.cpp",
)
_HEADERS = (
    "native_vector.h",
    "native_dot.h",
    "native_linear.h",
    "native_multiply.h",
    "native_softmax.h",
    "native_operations.h",
    "native_threads.h",
)
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC")
_BUILD_TIMEOUT_SECONDS = 300

# DataType in native_vector.h.
DATA_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
PAGE_TYPES = {**DATA_TYPES, torch.int8: 3, torch.uint8: 4}  # the last are the codes of kv_quantization.py

_POINTER, _INT64, _INT, _FLOAT = c_void_p, c_int64, c_int, c_float
_SIGNATURES = {
    "ifb_handover": (_POINTER, _INT64),
    "ifb_paged_attention": (
        *(_POINTER, _POINTER, _INT64, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT64),
        *(_INT, _INT, _INT, _INT, _INT, _INT, _FLOAT, _INT, _INT, _INT),
    ),
    "ifb_kv_cache_write": (
        *(_POINTER, _INT64, _POINTER, _INT64, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT, _INT, _INT, _INT),
    ),
    "ifb_rms_norm": (*(_POINTER, _POINTER, _POINTER, _INT64, _POINTER, _INT64, _INT64, _INT64, _FLOAT, _INT, _INT),),
    "ifb_rotary_embedding": (
        *(_POINTER, _INT64, _INT, _POINTER, _INT64, _INT, _POINTER, _POINTER, _POINTER, _INT64),
        *(_INT, _INT, _INT, _INT),
    ),
    "ifb_linear_panel": (_POINTER,),
    "ifb_linear_pack": (_POINTER, _POINTER, _INT64, _INT64, _INT64, _INT, _INT),
    "ifb_linear": (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT),
    "ifb_linear_int8_pack": (_POINTER, _POINTER, _INT64, _INT64, _INT),
    "ifb_linear_int8": (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT),
    "ifb_linear_grouped": (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT),
    "ifb_decoder_layers": (_POINTER, _POINTER),
    "ifb_finite_argmax": (_POINTER, _POINTER, _INT64, _INT64, _INT64, _INT),
    "ifb_draw_tokens": (
        *(_POINTER, _POINTER, _INT64, _INT64, _POINTER, _INT64),
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT),
    ),
    "ifb_widen_q8_0": (_POINTER, _POINTER, _INT64),
    "ifb_silu_and_mul": (_POINTER, _POINTER, _INT64, _INT64, _INT64, _INT, _INT),
}


class NativeBuildError(Exception):
    """The library could not be compiled or loaded; the text says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None (said once in the log) where it cannot be had. Built by the first call."""
    try:
        return _load(_cached_or_built())
    except NativeBuildError as error:
        logger.warning("native CPU kernels are not available, plain torch takes their place (slower): %s", error)
        return None


def library_for(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The library if it serves these tensors (in main memory, of one supported dtype), else None."""
    dtype = tensors[0].dtype
    if dtype not in DATA_TYPES or any(tensor.dtype != dtype or not tensor.is_cpu for tensor in tensors):
        return None
    return library()


def cache_dir() -> Path:
    """The folder that keeps compiled libraries, made if need be."""
    override = os.environ.get("IFB_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(override) if override else Path(base) / "torchserve-ifb"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _cached_or_built() -> Path:
    compiler = _compiler()
    name = f"ifb_kernels-{_fingerprint(compiler)}.so"
    try:
        folder = cache_dir()
        if (folder / name).exists():
            return folder / name
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:
        folder = Path(tempfile.mkdtemp(prefix="torchserve-ifb-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning("no cache folder for native kernels (%s): this process builds its own", error)
    _build(compiler, folder / name)
    return folder / name


def _compiler() -> list[str]:
    """The compiler's command line. Raises NativeBuildError if there is none."""
    chosen = os.environ.get("CXX")
    candidates = [chosen] if chosen else ["g++", "clang++", "c++"]
    for candidate in candidates:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise NativeBuildError(f"no C++ compiler: none of {', '.join(candidates)} was found (install g++, or set CXX)")


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for name in (*_SOURCES, *_HEADERS):
        digest.update((folder / name).read_bytes())
    built_for = (_FLAGS, compiler, _run([*compiler, "--version"]), _processor(), torch.__version__)
    digest.update(repr(built_for).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join(sorted(set(kept)))


def _build(compiler: list[str], target: Path) -> None:
    """Compile and link into `target`, through a folder beside it and one rename."""
    started = time.monotonic()
    logger.info("compiling native CPU kernels with %s (once; kept as %s)", shlex.join(compiler), target)
    sources = [str(Path(__file__).parent / name) for name in _SOURCES]
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        objects = [os.path.join(scratch, f"{Path(source).stem}.o") for source in sources]
        for source, compiled in zip(sources, objects, strict=True):
            _run([*compiler, *_FLAGS, "-c", source, "-o", compiled])
        linked = os.path.join(scratch, "linked.so")
        _run([*compiler, *_FLAGS, "-shared", *objects, "-o", linked])
        _load(Path(linked))
        os.replace(linked, target)
    logger.info("native CPU kernels compiled in %.1f s", time.monotonic() - started)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        raise NativeBuildError(f"{shlex.join(command)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return done.stdout


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes = arguments
            function.restype = None
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"{path} does not load: {error}") from error
    return loaded
