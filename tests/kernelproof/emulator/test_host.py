"""Proves that an unmodified host launcher runs on the stand-in runtime, which refuses what the real one refuses."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Device, EmulatorError, Memory
from kernelproof.emulator.host.cuda import NO_DEVICE
from kernelproof.emulator.host.program import pack_arguments
from tests.kernelproof.emulator.build import compile_file


@pytest.fixture(scope="module")
def program() -> emulator.Program:
    """A GEMM with its launcher."""
    return emulator.load(compile_file("multistage", ".ptx"), launcher=compile_file("multistage", ".so"))


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "k", "f16"), [(128, 256, 96, 0), (256, 128, 64, 1)])
def test_launcher(program: emulator.Program, m: int, n: int, k: int, f16: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2, (m, k)).astype(np.float16), rng.integers(0, 2, (n, k)).astype(np.float16)
    memory = Memory()
    d = memory.upload(np.empty((m, n), np.float16), "output")
    with emulator.session(memory=memory) as s:
        assert program.call("launch", memory.upload(a), memory.upload(b), d, m, n, k, f16) == 0
    assert s.reports == []
    assert s.errors == []
    assert [(x.kernel, x.grid, x.block) for x in s.launches] == [
        ("gemm_f16" if f16 else "gemm_f32", (n // 128, m // 128, 1), (128, 1, 1))
    ]
    np.testing.assert_array_equal(d.download(), (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16))


def test_refusals(program: emulator.Program) -> None:
    memory = Memory()
    x = memory.upload(np.zeros(128 * 128, np.float16), "inout")
    with emulator.session(memory=memory, device=Device(smem_optin_bytes=48 * 1024)) as s:
        assert program.call("launch", x, x, x, 128, 128, 32, 0) == 1
    assert "exceed" in s.refusals[0]
    with emulator.session(memory=memory) as s:
        assert program.call("launch", x, x, x, 128, 0, 32, 0) == 9
    assert "positive" in s.refusals[0]
    assert s.launches == []


def test_outside_a_session_nothing_runs(program: emulator.Program) -> None:
    with pytest.raises(emulator.EmulatorError, match="session"):
        program.call("launch", None, None, None, 128, 128, 32, 0)


def test_missing_outputs_are_reported_at_the_end(program: emulator.Program) -> None:
    memory = Memory()
    a = memory.upload(np.zeros((256, 32), np.float16))
    d = memory.upload(np.empty((256, 256), np.float16), "output", name="D")
    with emulator.session(memory=memory, programs=[program]) as s:
        assert program.call("launch", a, a, d, 128, 256, 32, 0) == 0
    (report,) = s.reports
    assert report.kind == "unwritten-output"
    assert "32768 of 65536 elements of D" in report.message


def test_chosen_ctas(program: emulator.Program) -> None:
    memory = Memory()
    a = memory.upload(np.ones((512, 32), np.float16))
    d = memory.upload(np.empty((512, 512), np.float16), "output")
    with emulator.session(memory=memory, cta_filter=lambda grid: [0, grid[0] * grid[1] - 1]) as s:
        assert program.call("launch", a, a, d, 512, 512, 32, 0) == 0
    assert s.reports == []
    assert s.launches[0].ctas is not None
    assert list(s.launches[0].ctas) == [0, 15]
    got = d.download()
    assert (got[:128, :128] == 32).all()
    assert (got[384:, 384:] == 32).all()
    assert np.isnan(got[:128, 128:]).all()


class Runtime:
    """The runtime as seen by a launcher that opens it itself."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL(str(emulator.runtime_path()))
        self.c.cudaGetErrorString.restype = ctypes.c_char_p

    def kernel(self, path: Path, name: str) -> tuple[int, ctypes.c_void_p]:
        """cudaLibraryLoadFromFile and cudaLibraryGetKernel: the code of the one that fails, else 0; the kernel's
        handle."""
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        code = self.c.cudaLibraryLoadFromFile(ctypes.byref(library), str(path).encode(), None, None, 0, None, None, 0)
        if code:
            return code, kernel
        return self.c.cudaLibraryGetKernel(ctypes.byref(kernel), library, name.encode()), kernel


class Config(ctypes.Structure):
    """A cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p), ("attrs", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


def test_library_of_a_cubin_answers_with_its_ptx(tmp_path: Path) -> None:
    (tmp_path / "kernel.ptx").write_text(compile_file("multistage", ".ptx").read_text())
    (tmp_path / "kernel.cubin").write_bytes(b"\x7fELF")
    memory = Memory()
    a, d = memory.upload(np.ones((128, 64), np.float16)), memory.upload(np.empty((128, 128), np.float16), "output")
    with emulator.session(memory=memory, device=Device(sm_count=7)) as s:
        runtime = Runtime()
        code, kernel = runtime.kernel(tmp_path / "kernel.cubin", "gemm_f16")
        assert code == 0
        assert runtime.kernel(tmp_path / "kernel.cubin", "gemm_f64")[0] == 500
        assert runtime.kernel(tmp_path / "other.cubin", "gemm_f16")[0] == 301
        number = ctypes.c_int()
        assert runtime.c.cudaDeviceGetAttribute(ctypes.byref(number), 16, 0) == 0
        assert number.value == 7
        assert runtime.c.cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(number), kernel, 128, 65536) == 0
        assert number.value == 2
        assert runtime.c.cudaKernelSetAttributeForDevice(kernel, 8, 1 << 20, 0) == 1
        assert runtime.c.cudaMemsetAsync(ctypes.c_void_p(d.address), 0, ctypes.c_size_t(d.nbytes), None) == 0
        assert runtime.c.cudaMemsetAsync(ctypes.c_void_p(d.address), 0, ctypes.c_size_t(d.nbytes + 1), None) == 1
        values = [ctypes.c_uint64(a.address), ctypes.c_uint64(a.address), ctypes.c_uint64(d.address)]
        sizes = [ctypes.c_int(128), ctypes.c_int(128), ctypes.c_int(64)]
        pointers = (ctypes.c_void_p * 6)(*(ctypes.addressof(v) for v in [*values, *sizes]))
        config = Config((1, 1, 1), (128, 1, 1), 65536, None, None, 0)
        # More than 48 KiB is refused until the attribute allows it.
        assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, pointers) == 1
        assert runtime.c.cudaGetErrorString(1) == b"invalid argument"
        assert runtime.c.cudaKernelSetAttributeForDevice(kernel, 8, 65536, 0) == 0
        assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, pointers) == 0
        config.block[0] = 160
        assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, pointers) == 9
    assert s.reports == []
    assert (d.download() == 64).all()


def test_errors_inside_the_machine_are_not_swallowed(tmp_path: Path) -> None:
    text = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n"
    text += " unheard.of;\n ret;\n}\n"
    (tmp_path / "kernel.ptx").write_text(text)
    with emulator.session() as s:
        runtime = Runtime()
        code, kernel = runtime.kernel(tmp_path / "kernel.cubin", "k")
        assert code == 0
        config = Config((1, 1, 1), (32, 1, 1), 0, None, None, 0)
        assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, None) == 719
        assert runtime.c.cudaGetLastError() == 719
        assert runtime.c.cudaGetLastError() == 0
    (report,) = s.reports
    assert report.kind == "launch-error"
    assert "unheard.of" in report.message
    assert len(s.errors) == 1


class Dim3(ctypes.Structure):
    """A dim3."""

    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]  # fmt: skip


class Attribute(ctypes.Structure):
    """A cudaLaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]  # fmt: skip


@pytest.mark.parametrize(
    ("block", "shared", "cluster", "most"),
    [
        (32, 0, 1, 7 * 32),  # limited by the CTAs of an SM
        (512, 0, 1, 7 * 4),  # limited by threads
        (32, 40000, 1, 7 * 5),  # limited by shared memory, of which each CTA takes 1 KiB more
        (512, 0, 4, 7 * 4),
        (512, 0, 8, 3 * 8),  # limited to whole clusters
    ],
)
def test_a_cooperative_grid_must_be_resident(block: int, shared: int, cluster: int, most: int, tmp_path: Path) -> None:
    text = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {\n ret;\n}\n"
    (tmp_path / "kernel.ptx").write_text(text)
    attributes = (Attribute * 2)((2, 0, (1,)), (4, 0, (cluster, 1, 1)))
    with emulator.session(device=replace(emulator.HOPPER, sm_count=7)) as s:
        runtime = Runtime()
        _, kernel = runtime.kernel(tmp_path / "kernel.cubin", "k")
        for ctas, code in ((most, 0), (most + cluster, 720)):
            config = Config((ctas, 1, 1), (block, 1, 1), shared, None, ctypes.addressof(attributes), 2)
            assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, None) == code
            # Other CTAs wait until an SM has room.
            config = Config((ctas, 1, 1), (block, 1, 1), shared, None, ctypes.addressof(attributes[1]), 1)
            assert runtime.c.cudaLaunchKernelExC(ctypes.byref(config), kernel, None) == 0
            if cluster == 1:
                sizes, size = (Dim3(ctas, 1, 1), Dim3(block, 1, 1)), ctypes.c_size_t(shared)
                assert runtime.c.cudaLaunchCooperativeKernel(kernel, *sizes, None, size, None) == code
    assert f"a cooperative grid of {most + cluster} CTAs, the device holds {most} at a time" in s.refusals[0]


@pytest.mark.slow
def test_runtime_is_built_once_and_whole(tmp_path: Path) -> None:
    code = "from kernelproof import emulator; print(emulator.runtime_path())"
    env = {**os.environ, "KERNELPROOF_CACHE_DIR": str(tmp_path)}
    racing = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)
    ]
    paths = {process.communicate()[0].strip() for process in racing}
    assert len(paths) == 1
    assert [p.name for p in (tmp_path / "emulator").iterdir()] == [Path(paths.pop()).name]


def test_a_process_keeps_its_runtime_when_the_cache_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that opened another file of the same runtime would never find a device."""
    (tmp_path / "kernel.ptx").write_text(compile_file("multistage", ".ptx").read_text())
    (tmp_path / "kernel.cubin").write_bytes(b"\x7fELF")
    with emulator.session():
        assert Runtime().kernel(tmp_path / "kernel.cubin", "gemm_f16")[0] == 0
    monkeypatch.setenv("KERNELPROOF_CACHE_DIR", str(tmp_path / "later"))
    with emulator.session():
        assert Runtime().kernel(tmp_path / "kernel.cubin", "gemm_f16")[0] == 0
    assert not (tmp_path / "later").exists()


def test_a_launcher_that_was_compiled_again_is_the_new_one(tmp_path: Path) -> None:
    """A process loads two versions of a file, as in a notebook. The first one continues to work."""
    launcher, answers = tmp_path / "launcher.so", []
    for answer in (1, 2):
        text = f"int answer(void) {{ return {answer}; }}"
        subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", launcher], input=text, text=True, check=True)
        answers += [emulator.load(PARAMETERS, launcher=launcher) for _ in range(2)]
    with emulator.session():
        assert [program.call("answer") for program in answers] == [1, 1, 2, 2]
    assert len({program.owner for program in answers}) == 2
    with pytest.raises(EmulatorError, match=r"absent\.so: .*No such file"):
        emulator.load(PARAMETERS, launcher=tmp_path / "absent.so")


# A kernel with parameters of four types.
PARAMETERS = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .f32 x, .param .u32 n, .param .f64 y, .param .s64 m) { ret; }
"""


def test_a_number_takes_the_type_of_its_parameter() -> None:
    function = emulator.load(PARAMETERS).module.kernels["k"]
    block = pack_arguments(function, [3, 3, 5, -5])
    assert block == struct.pack("<fIdq", 3.0, 3, 5.0, -5)
    assert pack_arguments(function, [0.5, 3, 1e300, 0]) == struct.pack("<fIdq", 0.5, 3, 1e300, 0)
    with pytest.raises(EmulatorError, match=r"argument 1 of k is an integer \(\.u32\), not 3\.0"):
        pack_arguments(function, [3, 3.0, 5, -5])
    with pytest.raises(EmulatorError, match=r"argument 1 of k: 4294967296 does not fit into 4 bytes"):
        pack_arguments(function, [3, 1 << 32, 5, -5])


def test_the_runtime_calls_its_own_functions(tmp_path: Path) -> None:
    """This holds even if another runtime is loaded globally, as a torch for CUDA does."""
    other = tmp_path / "libcudart.so.12"
    source = "int cudaStreamCreateWithPriority(void) { return 77; }"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(other)], input=source, text=True, check=True)
    program = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
        "print(ctypes.CDLL(sys.argv[2]).cudaStreamCreateWithFlags(ctypes.byref(ctypes.c_void_p()), 0))"
    )
    command = [sys.executable, "-c", program, str(other), str(emulator.runtime_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(NO_DEVICE)
