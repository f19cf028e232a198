"""Proves what the C++ library of planned calls needs, how it is connected to torch, and what plans it gets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cudal2gen import pack, places
from cudal2gen.cli import machine
from cudal2gen.generation import compiler
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import call_native  # noqa: E402
from tests.cudal2gen.test_native_calls import draw_integers, opened_pack  # noqa: E402

pytestmark = pytest.mark.torch

__all__ = ["opened_pack"]  # fixtures


# --- the library ---


@pytest.mark.slow
def test_its_functions_are_those_of_torch(tmp_path: Path) -> None:
    """Each member of ``Torch`` and ``TorchCuda`` has the type of torch's function of that name."""
    source = places.PACKAGE / "launch" / "torch_launcher.cpp"
    include = Path(torch.__file__).parent / "include"
    names = {
        structure: re.findall(
            r"\(\*(\w+)\)\(", re.findall(rf"struct {structure} {{(.*?)\n}};", source.read_text(), re.S)[0]
        )
        for structure in ("Torch", "TorchCuda")
    }
    assert {structure: len(members) for structure, members in names.items()} == {"Torch": 19, "TorchCuda": 4}
    lines = [
        f'#include "{source}"',
        "#define USE_CUDA",
        "#include <torch/csrc/stable/c/shim.h>",
        "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>",
        "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>",
        "#include <type_traits>",
    ]
    lines += [
        f"static_assert(std::is_same_v<decltype({structure}::{name}), decltype(&{name})>);"
        for structure, members in names.items()
        for name in members
    ]
    text = tmp_path / "compared.cpp"
    text.write_text("\n".join(lines) + "\n")
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", f"-I{include}", str(text)], check=True)


def test_without_torch_or_with_an_old_one_it_says_what_is_missing() -> None:
    program = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.cudal2gen_torch_message.restype = ctypes.c_char_p
print(library.cudal2gen_torch_connect(b"cudal2gen"), library.cudal2gen_torch_message().decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(compiler.torch_launcher())], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 torch lacks aoti_torch_dtype_float32, which torch 2.10 has\n"


def test_without_a_library_python_makes_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is only a pack's library of another version, and no compiler."""
    text = tmp_path / "other.c"
    text.write_text("int cudal2gen_torch_version(void) { return 99; }\n")
    other = tmp_path / "other.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(text), "-o", str(other)], check=True)
    monkeypatch.setenv("CUDAL2GEN_BUILD_DIR", str(tmp_path / "build"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    unconnected = call_native.Native()
    assert not unconnected.serves(call_native.CallPlace(), other)
    assert (
        unconnected.state
        == "calls are Python's: the launcher of torch needs g++, which PATH lacks; e.g. apt install g++"
    )
    assert unconnected.planned(draw_integers(2, 2), draw_integers(2, 2), 0) is None
    reason = f"calls are Python's: {other} has version 99, not {call_native.VERSION}"
    assert call_native.Native()._connect(other) == reason
    half = tmp_path / "half.c"
    half.write_text(f"int cudal2gen_torch_version(void) {{ return {call_native.VERSION}; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", str(half), "-o", str(tmp_path / "half.so")], check=True)
    incomplete = call_native.Native()
    assert "undefined symbol: cudal2gen_torch_connect" in incomplete._connect(tmp_path / "half.so")
    assert not incomplete.connected
    assert machine._calls({}) == (
        False, "Python makes calls: no pack has libcudal2gen_torch.so, and g++ is missing; e.g. apt install g++"
    )  # fmt: skip
    monkeypatch.setattr(metadata, "version", lambda _: "2.9.1+cu130")
    assert machine._calls({}) == (False, "Python makes calls: torch 2.9.1+cu130 has no stable ABI of 2.10.0")


def test_a_library_is_connected_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Other threads see both operators once a library is connected. If torch lacks a function, there is no library."""
    text = tmp_path / "library.c"
    functions = "".join(
        f"long cudal2gen_torch_{name}(void) {{ return 0; }}\n" for name in ("connect", "calls", "message")
    )
    version = f"int cudal2gen_torch_version(void) {{ return {call_native.VERSION}; }}\n"
    text.write_text(f"{functions}{version}int cudal2gen_torch_on_cuda(void) {{ return 1; }}\n")
    file = tmp_path / "library.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(text), "-o", str(file)], check=True)
    order: list[str] = []

    class RecordingNative(call_native.Native):
        def __setattr__(self, name: str, value: Any) -> None:
            order.append(name)
            super().__setattr__(name, value)

    connected = RecordingNative()
    order.clear()
    assert connected._connect(file) == f"calls are made by {file}"
    assert connected.connected
    assert order[-1] == "_library"
    assert {"plan", "planned", "_on_cuda"} <= set(order[:-1])

    def refuse_load() -> None:
        raise RuntimeError("torch has no such operator")

    monkeypatch.setattr(call_native, "_operators", refuse_load)
    unconnected = call_native.Native()
    assert not unconnected.serves(call_native.CallPlace(), file)
    assert not unconnected.connected
    assert unconnected.planned(draw_integers(2, 2), draw_integers(2, 2), 0) is None
    assert "torch has no such operator" in unconnected.state


def test_a_pack_has_the_library(opened_pack: pack.Pack) -> None:
    assert opened_pack.torch_library is not None
    assert opened_pack.torch_library.read_bytes() == compiler.torch_launcher().read_bytes()
    assert machine._calls({opened_pack.gpu: opened_pack}) == (True, str(opened_pack.torch_library))
    older = pack.Pack(opened_pack.directory, opened_pack.facts | {"files": {}})
    assert older.torch_library is None


# A stand-in for the CUDA part of torch: streams are 1000 plus the device, and 100 more under a guard for it, whose end
# is printed.
CUDA = """
#include <stdint.h>
#include <stdio.h>
static int within = -1;
int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  return *stream = (void*)(uintptr_t)(1000 + device + 100 * (within == device)), 0;
}
int aoti_torch_create_cuda_guard(int32_t device, void** guard) { return within = device, *guard = &within, 0; }
int aoti_torch_delete_cuda_guard(void* guard) {
  return within = -1, printf("out\\n"), fflush(stdout), guard != &within;
}
int aoti_torch_cuda_add_Tensor(void* self, void* other, double alpha, void** sum) { return 1; }
"""
# The program that makes calls on device 3, without and with a guard. Its arguments: that library and a pack.
ON_CUDA = """
import ctypes, sys
import torch
ctypes.CDLL(sys.argv[1])
from pathlib import Path
import cudal2gen
from cudal2gen import pack
from cudal2gen.operators import call_native, emulated
from tests.cudal2gen import idle_device, test_native_calls
device, reference = idle_device.IdleDevice(Path(sys.argv[1]).parent), test_native_calls.Reference()
a, b = test_native_calls.draw_integers(48, 64), test_native_calls.draw_integers(64, 40)
patch = test_native_calls.pytest.MonkeyPatch()
reference.install(patch)
for guard in (False, True):
    device.place = call_native.CallPlace(device=3, guard=guard)
    with emulated(device, [pack.open_pack(Path(sys.argv[2]))], prefer="kernel"):
        for _ in range(2):
            d = cudal2gen.matmul(a, b)
    assert torch.equal(d, test_native_calls.product(a, b))
print(reference.streams)
"""


@pytest.mark.slow
def test_the_stream_and_the_guard_of_a_cuda_device(tmp_path: Path, opened_pack: pack.Pack, checkout: Path) -> None:
    """A stand-in replaces the CUDA part of torch."""
    library = tmp_path / "libtorch_cuda.so"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=CUDA, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", ON_CUDA, str(library), str(opened_pack.directory)],
        check=False, capture_output=True, text=True, cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "out\n[1003, 1103]\n"), done.stderr
