"""Compiles the fixtures of these tests with nvcc, cached by content outside the clone."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from kernelproof.ground.places import user_cache

FIXTURES = Path(__file__).with_name("kernels")


@cache
def nvcc() -> str:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec is not None else []:
        path = Path(root) / "cu13" / "bin" / "nvcc"
        if path.exists():
            return str(path)
    on_path = shutil.which("nvcc")
    assert on_path is not None, "these tests need nvcc: pip install nvidia-cuda-nvcc (13.0), or put one on PATH"
    return on_path


@cache
def _version() -> str:
    return subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout


def compiled(name: str, suffix: str, *flags: str, arch: str = "sm_80") -> Path:
    """``kernels/NAME.cu`` as ``.ptx``, ``.cubin`` or ``.so``."""
    source = FIXTURES / f"{name}.cu"
    code = arch if suffix == ".cubin" else f"compute_{arch[3:]}"
    command = [nvcc(), "-O3", "-std=c++17", f"-gencode=arch=compute_{arch[3:]},code={code}", *flags]
    if suffix in (".ptx", ".cubin"):
        command += ["-lineinfo", f"-{suffix[1:]}"]
    else:
        command += ["-shared", "-Xcompiler", "-fPIC", "-cudart", "none"]
    headers = [p.read_text() for p in sorted(FIXTURES.glob("*.cuh"))] if arch == "sm_90a" else []
    key = hashlib.sha256("\0".join([source.read_text(), *headers, _version(), *command]).encode()).hexdigest()[:20]
    target = user_cache() / "test-kernels" / f"{name}-{key}{suffix}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=suffix, dir=target.parent)
        os.close(handle)
        done = subprocess.run(
            [*command, "-o", temporary, source.name], cwd=FIXTURES, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        Path(temporary).replace(target)
    return target


def compiled_text(code: str, arch: str) -> str:
    """PTX with line information of a program of one file, ``example.cu``."""
    command = [nvcc(), "-O3", "-std=c++17", f"-gencode=arch=compute_{arch[3:]},code=compute_{arch[3:]}"]
    command += ["-lineinfo", "-ptx", "example.cu"]
    key = hashlib.sha256("\0".join([code, _version(), *command]).encode()).hexdigest()[:20]
    # The source stays beside its PTX: findings read the names of variables in it.
    folder = user_cache() / "test-kernels" / f"example-{key}"
    target = folder / "example.ptx"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "example.cu").write_text(code)
        handle, temporary = tempfile.mkstemp(suffix=".ptx", dir=folder)
        os.close(handle)
        done = subprocess.run([*command, "-o", temporary], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        Path(temporary).replace(target)
    return target.read_text()
