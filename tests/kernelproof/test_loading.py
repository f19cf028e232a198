"""Proves that ``kernelproof.load`` takes kernels as CUDA, as PTX and as machine code, and launches the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kernelproof
from kernelproof import emulator
from kernelproof.cli import checking
from kernelproof.ground.errors import WrongInput
from tests.kernelproof.emulator import build

SOURCE = 'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n'


def test_a_kernel_is_the_same_in_all_forms(tmp_path: Path) -> None:
    (tmp_path / "a.ptx").write_text(build.ptx_of_text(SOURCE, "sm_80"))
    for path in (build.stable_file(SOURCE), tmp_path / "a.ptx", build.compile_cubin(SOURCE)):
        memory = emulator.Memory()
        x = memory.upload(np.arange(32, dtype=np.float32), "inout")
        result = kernelproof.load(path).launch("twice", grid=1, block=32, args=[x], memory=memory)
        assert result.reports == []
        np.testing.assert_array_equal(x.download(), 2 * np.arange(32))


def test_a_file_that_is_not_there_is_wrong_input() -> None:
    with pytest.raises(WrongInput):
        kernelproof.load("nowhere.cu")


def test_roles_have_two_spellings_and_places_before_a_buffer_are_named() -> None:
    memory = emulator.Memory()
    first, last = memory.upload(np.zeros(8, np.float32), "in"), memory.upload(np.zeros(8, np.float32), "out")
    assert (first.role, last.role, last.written is None) == ("input", "output", False)
    near = memory.nearest(first.start - 4)
    assert near is not None
    assert near[0] is first
    assert near[1].startswith("4 bytes before")
    with pytest.raises(emulator.EmulatorError):
        memory.allocate(4, "into")


def test_a_cubin_is_checked_by_the_ptx_beside_it(tmp_path: Path) -> None:
    cubin, ptx = tmp_path / "a.cubin", tmp_path / "a.ptx"
    cubin.write_bytes(b"")
    with pytest.raises(WrongInput):
        checking._ptx_of(cubin)
    ptx.write_text("")
    assert checking._ptx_of(cubin) == ptx
