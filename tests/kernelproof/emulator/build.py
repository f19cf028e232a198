"""Compiles the programs of these tests, cached by content outside the clone.

The cache of ``kernelproof`` finds a program only if its source lies at the same path as before. ``stable_file`` and
``stable_folder`` give a text the same path in every run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from kernelproof.ground import toolchain
from kernelproof.ground.places import user_cache

FIXTURES = Path(__file__).with_name("kernels")


@cache
def nvcc() -> str:
    """The path of nvcc: that of the installed wheel, or the one on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec is not None else []:
        path = Path(root) / "cu13" / "bin" / "nvcc"
        if path.exists():
            return str(path)
    on_path = shutil.which("nvcc")
    assert on_path is not None, "these tests need nvcc: pip install nvidia-cuda-nvcc (13.0), or put one on PATH"
    return on_path


@cache
def _version(program: str) -> str:
    """What a compiler prints of its version."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


def _key(*parts: str) -> str:
    """A digest of texts, as the name of a cached file."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _make(target: Path, command: Sequence[str | Path], folder: Path) -> Path:
    """Runs a compiler in ``folder`` to make the file ``target``, unless the file exists; returns the file.

    ``command``: the compiler's command without ``-o``, which is added.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=target.suffix, dir=target.parent)
        os.close(handle)
        done = subprocess.run([*command, "-o", temporary], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        Path(temporary).replace(target)
    return target


def stable_folder(texts: Mapping[str, str]) -> Path:
    """A folder with these files, at the same path in every run: what is compiled from them is compiled once."""
    folder = user_cache() / "test-kernels" / f"text-{_key(*texts, *texts.values())}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        if not (folder / name).exists():
            handle, temporary = tempfile.mkstemp(dir=folder)
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(temporary).replace(folder / name)
    return folder


def stable_file(text: str, name: str = "program.cu") -> Path:
    """A file with this text, at the same path in every run."""
    return stable_folder({name: text}) / name


def compile_file(name: str, suffix: str, *flags: str, arch: str = "sm_80") -> Path:
    """The file to which nvcc compiles ``kernels/NAME.cu``. ``suffix``: ``.ptx``, ``.cubin`` or ``.so``."""
    source = FIXTURES / f"{name}.cu"
    code = arch if suffix == ".cubin" else f"compute_{arch[3:]}"
    command = [nvcc(), "-O3", "-std=c++17", f"-gencode=arch=compute_{arch[3:]},code={code}", *flags]
    if suffix in (".ptx", ".cubin"):
        command += ["-lineinfo", f"-{suffix[1:]}"]
    else:
        command += ["-shared", "-Xcompiler", "-fPIC", "-cudart", "none"]
    # Only kernels for sm_90a include headers of the folder. A change of a header has to compile these anew.
    headers = [p.read_text() for p in sorted(FIXTURES.glob("*.cuh"))] if arch == "sm_90a" else []
    key = _key(source.read_text(), *headers, _version(nvcc()), *command)
    target = user_cache() / "test-kernels" / f"{name}-{key}{suffix}"
    return _make(target, [*command, source.name], FIXTURES)


def ptx_of_text(code: str, arch: str) -> str:
    """The PTX of a program of one file, ``example.cu``, with line information; ``arch`` is such as ``sm_80``."""
    # The source is stored next to its PTX, since findings read names of variables from it.
    source, number = stable_file(code, "example.cu"), arch[3:]
    command = [nvcc(), "-O3", "-std=c++17", f"-gencode=arch=compute_{number},code=compute_{number}"]
    command += ["-lineinfo", "-ptx", source.name]
    target = source.with_name(f"example-{_key(_version(nvcc()), *command)}.ptx")
    return _make(target, command, source.parent).read_text()


def compile_cubin(code: str, *options: str, arch: str = "sm_80") -> Path:
    """The machine code of a program of one file, ``program.cu``."""
    source, command = stable_file(code), [nvcc(), *options, f"-arch={arch}", "-cubin", "program.cu"]
    target = source.with_name(f"program-{_key(_version(nvcc()), *command)}.cubin")
    return _make(target, command, source.parent)


def compile_library(code: str, *options: str) -> Path:
    """The shared library of a program, which nvcc links with these options."""
    source, tools = stable_file(code), toolchain.discover()
    command = [str(tools.nvcc), "-shared", "-Xcompiler", "-fPIC", *options, source.name, *map(str, tools.link_flags)]
    return _make(source.with_name(f"library-{_key(tools.nvcc_version, *command)}.so"), command, source.parent)


def assemble(ptx: str, level: int = 3, target: str = "sm_80") -> Path:
    """The cubin of a PTX text, by ptxas at a level of optimisation."""
    source, program = stable_file(ptx, "kernel.ptx"), str(toolchain.discover().ptxas)
    command = [program, f"-O{level}", f"-arch={target}", source.name]
    return _make(source.with_name(f"kernel-{_key(_version(program), *command)}.cubin"), command, source.parent)
