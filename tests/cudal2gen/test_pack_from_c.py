"""Proves that a pack chooses, refuses and computes in C as in Python, and that the examples run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cudal2gen import pack
from cudal2gen.kernel import launch, serving
from kernelproof import emulator
from kernelproof.emulator.host.kernel_calls import KernelCalls
from kernelproof.ground import toolchain
from kernelproof.ground.chips import CardFacts
from tests.cudal2gen import packed
from tests.cudal2gen.c_interface import Answer, Fusion, Operands, Problem
from tests.cudal2gen.test_pack import files, flip_bit, folder, table

__all__ = ["files", "folder", "table"]  # fixtures


def compile_example(source: Path, files: dict[str, bytes], folder: Path) -> Path:
    """Compiles an example against the emulator's runtime, as a program and as a library for this process."""
    pack.write_folder(files, folder / "pack")
    for flags, name in (((), source.stem), (("-shared", "-fPIC"), f"{source.stem}.so")):
        command = ["g++", "-Wall", "-Wextra", "-Werror", *flags, str(source)]
        command += ["-o", str(folder / name), f"-I{folder / 'pack'}", f"-I{toolchain.discover().cuda_include}"]
        command += [str(folder / "pack" / "libcudal2gen.so"), str(emulator.runtime_path())]
        command += [f"-Wl,-rpath,{folder / 'pack'}", f"-Wl,-rpath,{emulator.runtime_path().parent}"]
        subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], checkout_root: Path) -> Path:
    """The folder of the compiled example and its pack."""
    return compile_example(checkout_root / "examples" / "gemm.c", files, tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def checkout_root() -> Path:
    """The root of this checkout, for fixtures of the whole module."""
    return Path(__file__).parents[2]


# A program's ``main``: a pack's folder -> its exit code.
Main = Callable[[Path], int]


@pytest.fixture
def main(example: Path) -> Main:
    """The example's ``main``."""
    return main_of(example / "gemm.so")


def main_of(path: Path) -> Main:
    """A function that calls a program's ``main`` with a pack's folder and the emulator's runtime, and returns its exit
    code."""
    library = ctypes.CDLL(str(path))

    def call(folder: Path) -> int:
        words = [b"gemm", os.fsencode(folder), os.fsencode(emulator.runtime_path())]
        return int(library.main(3, (ctypes.c_char_p * 3)(*words)))

    return call


def device(name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] = (8, 0), **facts: int) -> emulator.Session:
    """A session with a device of this name and capability."""
    return emulator.session(emulator.Memory(), emulator.Device(capability=capability, name=name, **facts))


def test_the_example_in_c_computes(main: Main, example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with device() as session:
        code = main(example / "pack")
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert "D[0][0] = 0x5800" in printed.out
    assert len(session.launches) == 1
    assert not session.errors
    assert len((Path(__file__).parents[2] / "examples" / "gemm.c").read_text().splitlines()) <= 40


def test_the_example_without_a_device_says_so(example: Path) -> None:
    done = subprocess.run(
        [str(example / "gemm"), str(example / "pack"), str(emulator.runtime_path())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "no CUDA device answers\n")


def test_c_refuses_what_python_refuses(
    main: Main, example: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refusal(folder: Path, name: str = "NVIDIA A100-SXM4-80GB", capability: tuple[int, int] = (8, 0)) -> str:
        with device(name, capability):
            assert main(folder) == 1
        return capfd.readouterr().err

    assert "holds no pack.txt" in refusal(tmp_path)
    alien = "no kernels for NVIDIA H200 (sm_90): this pack is for a100; see 'cudal2gen pack --help'"
    assert alien in refusal(example / "pack", "NVIDIA H200", (9, 0))
    for name in ("kernels/*/kernel.cubin", "table.json"):
        copy = tmp_path / name.replace("/", "-").replace("*", "x")
        shutil.copytree(example / "pack", copy)
        path = flip_bit(copy, name)
        assert f"{path} is truncated or was altered" in refusal(copy)
        path.unlink()
        assert f"{path} is missing" in refusal(copy)
        flip_bit(copy, "pack.txt")
        assert "pack.txt is truncated or was altered" in refusal(copy)
    for number, (before, after) in enumerate(((" layout=tn", ""), (" low=2.0", ""), (" kernel=0 ", " kernel=99 "))):
        copy = shutil.copytree(example / "pack", tmp_path / str(number))
        text = (copy / "pack.txt").read_text().replace(before, after).rsplit("sha256=", 1)[0]
        (copy / "pack.txt").write_text(f"{text}sha256={hashlib.sha256(text.encode()).hexdigest()}\n")
        assert "pack.txt is not one that this library understands" in refusal(copy), before


# --- fused and batched kernels ---

# A plain kernel, and the kernels of fused and batched products with the same tile.
PREDICATED = packed.RECORDS["predicated"]
WITH_FUSED = [
    PREDICATED,
    PREDICATED.at(PREDICATED.problem.revised(fusion="bias_n+relu")),
    PREDICATED.at(PREDICATED.problem.revised(batch="strided")),
    PREDICATED.at(PREDICATED.problem.revised(batch="grouped")),
]


@pytest.fixture(scope="module")
def fused_example(tmp_path_factory: pytest.TempPathFactory, checkout_root: Path) -> Path:
    """The example of fused and batched products, with a pack of which only the plain kernel was measured."""
    files = packed.files(packed.table(WITH_FUSED, {0: 2.0}))
    return compile_example(checkout_root / "examples" / "fused.c", files, tmp_path_factory.mktemp("fused"))


@pytest.mark.slow
def test_the_example_computes_a_fused_and_a_batched_product(
    fused_example: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with device() as session:
        code = main_of(fused_example / "fused.so")(fused_example / "pack")
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    assert "D[0][0] = 0x3C00, 0x3C00 is 1.0; D[0][1] = 0x0000" in printed.out
    assert "D[1] = 0x5800, D[2] = 0x5C00" in printed.out
    assert len(session.launches) == 2
    assert not session.errors
    assert not session.reports


def test_packs_say_what_their_kernels_fuse(fused_example: Path) -> None:
    lines = (fused_example / "pack" / "pack.txt").read_text().splitlines()
    kernels = [line for line in lines if line.startswith("kernel ")]
    assert ["fusion=bias_n+relu" in line for line in kernels] == [False, True, False, False]
    assert [line.split("batch=")[1].split()[0] for line in kernels[2:]] == ["strided", "grouped"]
    assert ["plain=0" in line for line in kernels] == [False, True, True, True]
    table = pack.open_pack(fused_example / "pack").table
    assert [kernel.record for kernel in table.kernels] == WITH_FUSED
    assert table.chosen().dump() == table.dump()


def test_a_pack_of_plain_kernels_is_as_it_was(files: dict[str, bytes]) -> None:
    for name in ("table.json", "pack.txt"):
        for word in ("fusion", " batch", '"batch', "products", " plain="):
            assert word not in files[name].decode(), (name, word)


def test_c_answers_from_the_same_table(example: Path) -> None:
    library = ctypes.CDLL(str(example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_void_p(), Answer()
    table = pack.open_pack(example / "pack").table
    by_name = {record.name: number for number, record in enumerate(packed.RECORDS.values())}

    def query(*fields: int) -> int:
        return int(library.cudal2gen_query(handle, ctypes.byref(Problem(*fields)), ctypes.byref(answer)))

    def digest(name: str) -> bytes:
        return table.kernels[by_name[packed.RECORDS[name].name]].digest.encode()

    with device():
        opened = library.cudal2gen_pack_open(
            os.fsencode(example / "pack"), os.fsencode(emulator.runtime_path()), ctypes.byref(handle)
        )
        assert opened == 0, library.cudal2gen_last_error()
        assert query(1, 0, 64, 64, 128, 0) == 0
        assert (answer.kernel, answer.speedup) == (digest("predicated"), 2.0)
        assert query(1, 0, 96, 96, 64, 0) == -1, "measured, and slower"
        assert b"96_96_64: no kernel was measured faster" in library.cudal2gen_last_error()
        assert query(1, 0, 96, 96, 64, 1) == 0
        assert (answer.kernel, answer.speedup, answer.workspace_bytes) == (digest("whole"), 0.0, 0)
        assert query(1, 0, 32, 32, 256, 1) == 0
        assert answer.kernel == digest("split")
        assert answer.workspace_bytes == 256 + 4 * 2 * 32 * 32
        assert query(0, 1, 64, 96, 128, 1) == 0
        assert answer.kernel == digest("zsplit"), "its option came with it"
        assert query(1, 0, 33, 33, 65, 1) == -1
        assert b"33_33_65: no kernel of this pack computes it" in library.cudal2gen_last_error()
        assert query(1, 0, -1, 33, 64, 1) == 1
        assert library.cudal2gen_pack_close(handle) == 0


# A card: its name, capability, SMs, and bytes of shared memory that a block may have.
SERVED = [
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10),
    ("NVIDIA A100 MIG 1g.5gb", (8, 0), 14, 163 << 10),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 54, 163 << 10),  # half of a card, which MPS can limit to this
    ("NVIDIA H200", (8, 0), 108, 163 << 10),
    ("NVIDIA A40", (8, 6), 84, 99 << 10),
    ("NVIDIA A40", (8, 6), 84, 20 << 10),
    ("NVIDIA L4", (8, 9), 58, 99 << 10),
    ("Tesla V100-SXM2-16GB", (7, 0), 80, 96 << 10),
    ("NVIDIA H100 PCIe", (9, 0), 114, 227 << 10),
]


@pytest.mark.parametrize(("name", "capability", "sms", "smem"), SERVED)
def test_c_serves_the_cards_that_python_serves(
    example: Path, name: str, capability: tuple[int, int], sms: int, smem: int
) -> None:
    """The test compares whether the pack opens, what counts as measured, and which kernels it has."""
    library = ctypes.CDLL(str(example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_void_p(), Answer()
    card = CardFacts.of(name, capability, sms, smem)
    served = pack.serving({"a100": pack.open_pack(example / "pack")}, card)
    with device(name, capability, sm_count=sms, smem_optin_bytes=smem):
        runtime = os.fsencode(emulator.runtime_path())
        code = library.cudal2gen_pack_open(os.fsencode(example / "pack"), runtime, ctypes.byref(handle))
        assert (code == 0) == (served is not None), library.cudal2gen_last_error()
        if served is None:
            return
        for record in packed.RECORDS.values():
            for prefer, word in ((0, "measured"), (1, "kernel")):
                operands = launch.LaunchOperands.packed(record.layout, serving.sizes_of(record.problem))
                choice = served.table.choose(record.problem, operands, word)  # type: ignore[arg-type]
                if choice.short == "estimated":  # from measurements of neighbours, which C does not use
                    continue
                question = Problem(record.acc == "f32", record.layout == "nn", record.m, record.n, record.k, prefer)
                code = library.cudal2gen_query(handle, ctypes.byref(question), ctypes.byref(answer))
                assert code == (-1 if choice.kernel is None else 0), library.cudal2gen_last_error()
                if choice.kernel is not None:
                    assert answer.kernel == served.table.kernels[choice.kernel].digest.encode()
                if code and "this card" in choice.short:
                    assert choice.short.encode() in library.cudal2gen_last_error()
        assert library.cudal2gen_pack_close(handle) == 0


def test_c_asks_a_driver_that_refuses_an_image_once(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer, problem = ctypes.c_void_p(), Answer(), Problem(1, 0, 64, 64, 128, 0)
    loads: list[int] = []
    monkeypatch.setattr(KernelCalls, "load_file", lambda *_: loads.append(222) or 222)
    with device():
        runtime = os.fsencode(emulator.runtime_path())
        assert library.cudal2gen_pack_open(os.fsencode(example / "pack"), runtime, ctypes.byref(handle)) == 0
        for _ in range(3):
            assert library.cudal2gen_query(handle, ctypes.byref(problem), ctypes.byref(answer)) == -3
            assert b"kernel.cubin: " in library.cudal2gen_last_error()
            assert b"; update the driver, or make the pack anew" in library.cudal2gen_last_error()
            words = (ctypes.byref(problem), *[ctypes.c_void_p(256), 128] * 2, ctypes.c_void_p(256), 64, None, None)
            assert library.cudal2gen_matmul(handle, *words) == -3
        assert loads == [222]
        assert library.cudal2gen_pack_close(handle) == 0


# Numbers of cudal2gen.h for ``prefer``, and a fusion of a bias and ReLU.
MEASURED, NEAREST, INFERRED = 0, 1, 2
RELU_WITH_BIAS = Fusion(bias=1, activation=1)


def test_c_infers_a_fused_kernel_on_request_only(fused_example: Path) -> None:
    library = ctypes.CDLL(str(fused_example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    handle, answer = ctypes.c_void_p(), Answer()
    digests = [kernel.digest.encode() for kernel in pack.open_pack(fused_example / "pack").table.kernels]

    def query(prefer: int, fusion: Fusion | None = None, **more: int) -> int:
        question = Problem(acc=1, m=64, n=64, k=128, prefer=prefer, fusion=fusion or Fusion(), **more)
        return int(library.cudal2gen_query(handle, ctypes.byref(question), ctypes.byref(answer)))

    with device():
        assert not library.cudal2gen_pack_open(
            os.fsencode(fused_example / "pack"), os.fsencode(emulator.runtime_path()), ctypes.byref(handle)
        )
        assert query(MEASURED) == 0
        assert (answer.kernel, answer.speedup) == (digests[0], 2.0)
        assert query(MEASURED, RELU_WITH_BIAS) == -1
        assert b"64_64_128 bias_n+relu: no kernel was measured faster" in library.cudal2gen_last_error()
        for number, fusion, more in (
            (1, RELU_WITH_BIAS, {}),
            (2, None, {"batch": 1, "products": 3}),
            (3, None, {"batch": 2, "products": 3}),
        ):
            for prefer in (INFERRED, NEAREST):
                assert query(prefer, fusion, **more) == 0
                assert (answer.kernel, answer.speedup) == (digests[number], 0.0)
        assert query(INFERRED, Fusion(bias=1)) == -1, "not in the pack"
        assert query(NEAREST, Fusion(bias=7)) == 1
        assert query(NEAREST, batch=1, products=-1) == 1
        assert library.cudal2gen_pack_close(handle) == 0


def test_c_computes_groups_of_rows(fused_example: Path) -> None:
    library = ctypes.CDLL(str(fused_example / "pack" / "libcudal2gen.so"))
    library.cudal2gen_last_error.restype = ctypes.c_char_p
    library.cudal2gen_gemm.argtypes = [
        *(ctypes.c_void_p,) * 3, *(ctypes.c_int, ctypes.c_void_p) * 2, ctypes.c_int, *(ctypes.c_void_p,) * 3
    ]  # fmt: skip
    rng, handle, memory = np.random.default_rng(1), ctypes.c_void_p(), emulator.Memory()
    a, b = rng.integers(-2, 3, (64, 128)).astype(np.float16), rng.integers(-2, 3, (3, 64, 128)).astype(np.float16)
    ends = np.array([10, 10, 64], np.int32)
    with emulator.session(memory, emulator.Device(capability=(8, 0), name="NVIDIA A100-SXM4-80GB")) as session:
        assert not library.cudal2gen_pack_open(
            os.fsencode(fused_example / "pack"), os.fsencode(emulator.runtime_path()), ctypes.byref(handle)
        )
        on_device = [memory.upload(each).address for each in (a, b, ends)]
        d = memory.upload(np.empty((64, 64), np.float16), role="output")
        operands = Operands(stride_b=64 * 128, ends=on_device[2])
        problem = Problem(acc=1, m=64, n=64, k=128, prefer=NEAREST, batch=2, products=3)
        arguments = (handle, ctypes.addressof(problem), on_device[0], 128, on_device[1], 128, d.address, 64)
        code = library.cudal2gen_gemm(*arguments, None, None, None)
        assert code == 1
        assert b"needs operands" in library.cudal2gen_last_error()
        code = library.cudal2gen_gemm(*arguments, ctypes.addressof(operands), None, None)
        assert code == 0, library.cudal2gen_last_error()
        assert library.cudal2gen_pack_close(handle) == 0
    assert not session.errors
    groups = [a[:10] @ b[0].T, a[10:] @ b[2].T]
    np.testing.assert_array_equal(d.download(), np.concatenate(groups))
