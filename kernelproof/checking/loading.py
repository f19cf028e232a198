"""Loads the kernels of a file, so that Python can launch them on the CPU."""

from __future__ import annotations

from pathlib import Path

from kernelproof import emulator
from kernelproof.checking import compilation, devices
from kernelproof.ground import toolchain
from kernelproof.ground.errors import WrongInput

COMPILED = (".ptx", ".cubin")  # suffixes of files that need no compiler


def load(source: str | Path, nvcc_args: str = "") -> emulator.Program:
    """Load the kernels of a CUDA, PTX or cubin file.

    ``nvcc_args``: options for the compiler; the architecture is that of ``-arch``, or sm_80. PTX and cubin files are
    not compiled, so they ignore it. Raises WrongInput if there is no such file, MissingTool if there is no compiler,
    and Failure with the compiler's errors.
    """
    path = Path(source)
    if not path.is_file():
        raise WrongInput(f"no file {path}")
    if path.suffix in COMPILED:
        return emulator.load(path)
    arguments, sm = compilation.split_arguments(nvcc_args)
    return emulator.load(compilation.ptx(path, arguments, sm or devices.target(), toolchain.discover()))
