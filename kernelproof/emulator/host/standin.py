"""Builds and loads the stand-in CUDA runtime: a C library that passes each runtime call to the open session.

Its functions have the names of the real runtime and driver, so an unmodified host launcher runs against it. The library
is compiled once per version of its text, and kept in the cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from kernelproof.emulator.host.cuda import NO_DEVICE
from kernelproof.emulator.state.reports import EmulatorError
from kernelproof.ground import places


class Words(Protocol):
    """The arguments of a runtime call as 64-bit words; pointers are addresses."""

    def __getitem__(self, index: int, /) -> int: ...


MAX_FRAMES = 14  # kFrames of guard.c

# (name of the call, its words) -> cudaError_t. It must not raise, because an exception cannot pass through C.
Runtime = Callable[[str, Words], int]
# The open sessions. Calls go to the last one.
active: list[Runtime] = []


@cache
def runtime_path() -> Path:
    """The stand-in runtime as a shared library, built at the first call.

    A process always gets the file of its first call, even if the cache folder changes: a second file would be a second
    library, whose calls no session answers. Raises EmulatorError if there is no C compiler or it fails.
    """
    # By this option its functions call each other, even if torch has loaded a real runtime for the whole process.
    return _compiled("runtime", _text(), "-Wl,-Bsymbolic-functions")


def _compiled(name: str, text: str, *options: str) -> Path:
    """The path of a shared library in the cache folder, compiled from C text unless it exists. Raises EmulatorError."""
    flags = ["-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-w", *options]
    digest = hashlib.sha256(text.encode() + " ".join(flags).encode()).hexdigest()[:20]
    folder = places.user_cache() / "emulator"
    target = folder / f"{name}-{digest}.so"
    if target.exists():
        return target
    compiler = next((c for c in (os.environ.get("CC"), "gcc", "cc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        raise EmulatorError("no C compiler (gcc, cc or clang) on PATH: the stand-in CUDA runtime cannot be built")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=folder)
    except OSError as error:
        raise OSError(error.errno, str(error.strerror), str(folder)) from None
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, "-x", "c", "-", "-o", scratch, "-ldl"],
            input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EmulatorError(f"{compiler} failed on the stand-in {name}:\n{done.stderr}")
        # Renaming is atomic: another process sees either no file or the complete one.
        Path(scratch).replace(target)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return target


def stand_for(*libraries: str) -> None:
    """Let programs that need these libraries (such as libcuda.so.1) load without them: the stand-in runtime has their
    functions. Only for processes that load none of the real libraries."""
    standin()
    for library in libraries:
        ctypes.CDLL(str(stand_in_path(library)), mode=ctypes.RTLD_GLOBAL)


def stand_in_path(library: str) -> Path:
    """The file that is loaded in place of a library, built at the first call."""
    return _compiled(library, "", f"-Wl,-soname,{library}")


@cache
def _text() -> str:
    """The C text: runtime, driver, and for every other name in symbols.txt a function that returns "not supported"."""
    folder = Path(__file__).parent
    text = "".join(
        (folder / name).read_text() for name in ("runtime.c", "guard.c", "driver.c", "graphs.c", "driver_graphs.c")
    )
    defined = set(re.findall(r"\b(_*cu\w+) ?\(", text))
    # The pattern above does not match functions that macros of the C files define: POOLS, NODES, COPY and DRIVER_FORM,
    # and BOTH and WITH_STREAM with their variants for per-thread streams.
    defined |= {api + name for name in re.findall(r"int api##(\w+)", text) for api in ("cuda", "cu")}
    kinds = re.findall(r"^NODES\((\w+)", text, re.M)
    defined |= {form.format(kind) for kind in kinds for form in _NODE_FUNCTIONS}
    copies = {f"{name}{version}" for name in re.findall(r"^COPY\((\w+)", text, re.M) for version in _COPY_VERSIONS}
    defined |= set(re.findall(r"^DRIVER_FORM\((\w+)", text, re.M))
    both = set(re.findall(r"^BOTH\((\w+)", text, re.M))
    streams = set(re.findall(r"^(?:BOTH_ASYNC|WITH_STREAM)\((\w+)", text, re.M))
    defined |= copies | both | streams | {f"{name}_ptds" for name in both} | {f"{name}_ptsz" for name in streams}
    names = [name for name in (folder / "symbols.txt").read_text().split() if name not in defined]
    return text + "".join(f'EXPORT int {name}() {{ return unsupported("{name}"); }}\n' for name in names)


# The functions that one NODES and one COPY of the C files define.
_NODE_FUNCTIONS = ("cudaGraphAdd{}Node", "cudaGraphExec{}NodeSetParams", "cudaGraph{}NodeSetParams")
_COPY_VERSIONS = ("_v2", "_v2_ptds", "Async_v2", "Async_v2_ptsz")


@cache
def standin() -> ctypes.CDLL:
    """The stand-in runtime, loaded so that launchers opened later resolve against it."""
    library = ctypes.CDLL(str(runtime_path()), mode=ctypes.RTLD_GLOBAL)
    number = ctypes.POINTER(ctypes.c_int)
    for lookup in (library.emulator_function, library.emulator_variable):
        lookup.restype, lookup.argtypes = ctypes.c_char_p, [ctypes.c_void_p, number, number]
    library.emulator_image.restype = ctypes.c_void_p
    library.emulator_image.argtypes = [ctypes.c_int, number, ctypes.POINTER(ctypes.c_void_p)]
    library.emulator_managed.restype = ctypes.c_char_p
    library.emulator_managed.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), number, number]
    library.emulator_guard.restype, library.emulator_guard.argtypes = None, [ctypes.c_size_t, ctypes.c_size_t]
    library.emulator_add_partial_page.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    library.emulator_install(_callback)
    return library


def frames() -> tuple[int, ...]:
    """The callers of the runtime call or access that this thread is in, as return addresses, the innermost first."""
    places = (ctypes.c_size_t * MAX_FRAMES)()
    return tuple(places[: standin().emulator_frames(places)])


def _dispatch(name: bytes, words: Words) -> int:
    """Pass a runtime call to the open session; without one it fails."""
    return active[-1](name.decode(), words) if active else NO_DEVICE


_callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))(_dispatch)
