"""The stand-in CUDA runtime: a C library that hands each runtime call to whoever is active."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from cudal2gen.emulator.host.cuda import NO_DEVICE
from cudal2gen.emulator.state.reports import EmulatorError


class Words(Protocol):
    """The arguments of a runtime call as 64-bit words; pointers are addresses."""

    def __getitem__(self, index: int, /) -> int: ...


# Answers calls by name with a cudaError_t. It must not raise: nothing may escape through C.
Runtime = Callable[[str, Words], int]
# The last one answers.
active: list[Runtime] = []


def cache_dir() -> Path:
    """Folder of the compiled stand-in: ``$CUDAL2GEN_CACHE_DIR``, else ``cudal2gen`` in the user's cache folder."""
    own = os.environ.get("CUDAL2GEN_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cudal2gen"


def runtime_path() -> Path:
    """The stand-in runtime as a shared library, built at the first call.

    Raises EmulatorError when there is no C compiler or it fails.
    """
    source = Path(__file__).with_name("runtime.c")
    text = source.read_bytes()
    flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    compiler = next((c for c in (os.environ.get("CC"), "gcc", "cc", "clang") if c and shutil.which(c)), None)
    digest = hashlib.sha256(text + " ".join(flags).encode()).hexdigest()[:20]
    folder = cache_dir() / "emulator"
    target = folder / f"runtime-{digest}.so"
    if target.exists():
        return target
    if compiler is None:
        raise EmulatorError("no C compiler (gcc, cc or clang) on PATH: the stand-in CUDA runtime cannot be built")
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, "-x", "c", str(source), "-o", name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise EmulatorError(f"{compiler} failed on {source.name}:\n{done.stderr}")
        # A reader sees either nothing or the whole file.
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


@cache
def standin() -> ctypes.CDLL:
    """The stand-in runtime, loaded so that launchers opened later resolve against it."""
    library = ctypes.CDLL(str(runtime_path()), mode=ctypes.RTLD_GLOBAL)
    library.emulator_function.restype = ctypes.c_char_p
    library.emulator_function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.emulator_variable.restype = ctypes.c_char_p
    library.emulator_variable.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.emulator_install(_callback)
    return library


def _dispatch(name: bytes, words: Words) -> int:
    return active[-1](name.decode(), words) if active else NO_DEVICE


_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))(_dispatch)
