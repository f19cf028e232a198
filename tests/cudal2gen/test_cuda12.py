"""Proves that kernels which a ptxas of CUDA 12 assembles have digests of their own, are packed, and run with runtimes
of CUDA 12.

Triton's wheel has such a ptxas. No driver is needed: stand-ins for the runtime count what the launcher calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudal2gen import pack, torch_range
from cudal2gen.cli import machine
from cudal2gen.generation import compiler, ptx_split
from cudal2gen.launch import gpu
from cudal2gen.launch.gpu import GpuError
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.validator import machine_code
from kernelproof.ground import toolchain
from kernelproof.ground.chips import CardFacts
from kernelproof.ground.toolchain import Toolchain, ToolchainError
from tests.cudal2gen import idle_runtime, packed
from tests.cudal2gen.paths import ring, small, tensor, warps

# A kernel that is packed, and one with wgmma.
RECORD = packed.RECORDS["predicated"]
WGMMA = ring(acc="f32")
BUILT_AHEAD = [RECORD]


def ptxas(folder: Path, says: str) -> Path:
    """A program that prints the version of a ptxas, as ``ptxas --version`` does."""
    program = folder / "ptxas"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


def toolchain_for(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    """The toolchain that is found when KERNELPROOF_PTXAS names a stand-in for a ptxas of this version."""
    says = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}"
    monkeypatch.setenv(toolchain.PTXAS, str(ptxas(folder, says)))
    return toolchain.discover()


@pytest.fixture(scope="module")
def real() -> Path:
    """Triton's own ptxas."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"


@pytest.fixture(scope="module")
def tools12() -> Toolchain:
    """A toolchain whose ptxas is of CUDA 12.9."""
    return replace(toolchain.discover(), ptxas_version="12.9.86")


# --- compilers ---


@pytest.mark.parametrize(("version", "isa"), [("12.8.93", "8.7"), ("12.9.86", "8.8"), ("13.1.0", "")])
def test_another_ptxas_is_in_every_digest(
    version: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = toolchain.discover()
    tools = toolchain_for(version, tmp_path, monkeypatch)
    assert (tools.cuda, tools.isa) == (version, isa)
    assert tools.ptxas == tmp_path / "ptxas"
    assert tools.versions == own.versions | {"ptxas": version}
    assert compiler.job(RECORD, tools).digest != compiler.job(RECORD, own).digest
    own_launcher, other = (compiler.launcher_flags(each) for each in (own, tools))
    assert (own_launcher == other) == version.startswith("13.")


def test_nvccs_own_ptxas_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = toolchain.discover()
    assert own.isa == ""
    assert toolchain_for(own.nvcc_version, tmp_path, monkeypatch) == own


@pytest.mark.parametrize("says", ["Cuda compilation tools, release 12.6, V12.6.85", "hello"])
def test_what_is_no_ptxas_for_kernels_is_refused(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.PTXAS, str(ptxas(tmp_path, says)))
    with pytest.raises(ToolchainError):
        toolchain.discover()
    monkeypatch.setenv(toolchain.PTXAS, str(tmp_path / "absent"))
    with pytest.raises(ToolchainError):
        toolchain.discover()


def test_kernels_of_another_ptxas_are_found_prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = toolchain.discover().versions | {"ptxas": "12.9.86"}
    (tmp_path / "versions.json").write_text(json.dumps(stated))
    monkeypatch.setenv(toolchain.PREBUILT, str(tmp_path / "versions.json"))
    tools = toolchain.discover()
    assert (tools.versions, tools.compiles, tools.cuda) == (stated, False, "12.9.86")


def test_the_text_states_what_the_ptxas_takes(tmp_path: Path) -> None:
    batch = tmp_path / "batch.ptx"
    batch.write_text(".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry one(\n)\n{\n// .version 9.0\n}\n")
    for isa in ("", "8.8"):
        ptx_split.main(str(batch), str(tmp_path), *([isa] if isa else []))
        part = (tmp_path / "one" / "kernel.ptx").read_text()
        assert re.findall(r"\.version (\S+)", part) == [isa or "9.0", "9.0"]


def test_a_ptxas_without_an_architecture_is_refused_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = toolchain_for("12.8.93", tmp_path, monkeypatch)
    for record in (tensor(acc="f32"), warps(acc="f32")):
        with pytest.raises(ToolchainError, match=r"12\.9"):
            compiler.attempt([record], build_dir=tmp_path / "build", tools=tools)
    assert not (tmp_path / "build").exists()


@pytest.mark.thorough
def test_kernels_of_cuda_12_are_right_and_packed(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their machine code is executed, also that of wgmma, which this ptxas does not serialise."""
    monkeypatch.setenv(toolchain.PTXAS, str(real))
    tools = toolchain.discover()
    assert tools.cuda.startswith("12.9.")
    artifacts = compiler.build([RECORD, WGMMA], tools=tools)
    for record, artifact in zip((RECORD, WGMMA), artifacts, strict=True):
        assert artifact.ptxas.findings == []
        assert artifact.ptx.read_text().startswith(".version 8.8")
        verdict = machine_code.judge(record, artifact, compiler.launcher(tools=tools))
        assert not isinstance(verdict, machine_code.Unexecuted)
        assert verdict.passed, verdict.findings
    opened = pack.open_pack(packed.folder(packed.table([RECORD]), tmp_path / "pack"))
    assert (opened.cuda, opened.facts["cuda"]) == (12, tools.cuda)
    assert (opened.facts["cuda_range"], opened.facts["driver_minimum"]) == (">=12.0,<14", "525")
    assert opened.table.kernels[0].digest == artifacts[0].digest


def test_a_wheel_of_cuda_12_has_a_version_of_its_own(tmp_path: Path) -> None:
    table = packed.table([RECORD])
    artifacts = {artifact.digest: artifact for artifact in compiler.build([RECORD])}
    names = set()
    for cuda in ("12.9.86", "13.0.88"):
        files = pack.contents(table, artifacts, compiler.launcher(), cuda)
        names.add(pack.write_wheel(files, tmp_path / "any.whl").name.split("-")[1])
    version = json.loads(files["pack.json"])["version"]
    assert names == {f"{version}+candidates", f"{version}+candidates.cu12"}


# --- runtimes ---


@pytest.fixture(scope="module")
def launcher(tools12: Toolchain) -> Path:
    """That toolchain's launcher."""
    return compiler.launcher(tools=tools12)


@pytest.fixture(scope="module")
def compiled_kernel() -> Path:
    """A kernel with counters, whose launches call more functions of the runtime than others."""
    return compiler.build([small(acc="f32", split_k=2, padding="predicate", k=128)])[0].directory


@pytest.mark.parametrize("defined", [(), ("-DCUDA_12_6",)], ids=["12.8", "12.6"])
def test_kernels_are_launched_by_a_runtime_of_cuda_12(
    defined: tuple[str, ...], launcher: Path, compiled_kernel: Path, tmp_path: Path
) -> None:
    """A runtime before 12.8 loads no kernels, so the driver does. Captures are queried by a function with a version."""
    library = idle_runtime.build(tmp_path, *defined)
    idle_runtime.versions(library, 12060 if defined else 12080, 12060)
    with OpenKernel(launcher, compiled_kernel, {}, library) as kernel:
        if defined:  # load, find, raise its limit
            assert ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "idle_driver").value == 3
        size = kernel.workspace_bytes(64, 64, 128)
        assert size
        for nodes in (None, [idle_runtime.KERNEL_NODE], [idle_runtime.MEMSET_NODE]):
            idle_runtime.capture(library, nodes)
            kernel.launch(1 << 20, 128, 2 << 20, 128, 3 << 20, 64, 64, 64, 128, 4 << 20)
        assert idle_runtime.launches(library) == 3
    if defined:
        ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "idle_driver").value = -1
        with pytest.raises(LaunchError, match="cuLibraryLoadFromFile"):
            OpenKernel(launcher, compiled_kernel, {}, library)


@pytest.mark.parametrize(
    ("runtime", "driver", "code"),
    [(12060, 12020, 0), (13000, 13000, 0), (12080, 13000, 0), (11080, 12000, 500), (12080, 11080, 35)],
)
def test_what_kernels_of_cuda_12_need(
    runtime: int, driver: int, code: int, launcher: Path, compiled_kernel: Path, tmp_path: Path
) -> None:
    library = idle_runtime.build(tmp_path)
    idle_runtime.versions(library, runtime, driver)
    if not code:
        OpenKernel(launcher, compiled_kernel, {}, library).close()
        return
    with pytest.raises(LaunchError, match=r"525") as caught:
        OpenKernel(launcher, compiled_kernel, {}, library)
    assert caught.value.code == code


@pytest.mark.parametrize("number", sorted(torch_range.CUDAS))
def test_a_runtime_without_a_name_is_that_of_the_process(
    number: int, launcher: Path, compiled_kernel: Path, tmp_path: Path
) -> None:
    """A program in C has the runtime that it is linked with, of either CUDA."""
    library = idle_runtime.build(tmp_path)
    named = library.rename(tmp_path / torch_range.CUDAS[number].runtime)
    program = (
        "import ctypes, sys; from pathlib import Path; from cudal2gen.launch.launcher import OpenKernel\n"
        "loaded = ctypes.CDLL(sys.argv[1])\n"
        "with OpenKernel(Path(sys.argv[2]), Path(sys.argv[3])):\n"
        "    print(ctypes.c_size_t.in_dll(loaded, 'idle_kernels').value)"
    )
    # The stand-in is known by its file's name as it would be by its own: it is loaded under it.
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", program, named.name, str(launcher), str(compiled_kernel)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "1"


def test_runtimes_are_found_for_the_cuda_of_a_pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    idle_runtime.hide_loaded(monkeypatch)
    old, new = (tmp_path / "nvidia" / folder for folder in ("cuda_runtime/lib", "cu13/lib"))
    for folder, cuda in ((old, 12), (new, 13)):
        folder.mkdir(parents=True)
        (folder / torch_range.CUDAS[cuda].runtime).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert gpu.runtime(12).parent == old
    assert gpu.runtime(13).parent == new
    (old / torch_range.CUDAS[12].runtime).unlink()
    assert gpu.runtime(12).parent == new, "a later one serves"
    with pytest.raises(GpuError):
        gpu.runtime(14)


# --- what doctor says ---


@pytest.mark.parametrize(
    ("pack_cuda", "torch_cuda", "driver", "ok"),
    [
        *((12, "12.8", 12080, True), (12, "12.6", 12060, True), (12, "13.0", 13000, True), (12, "12.8", 13000, True)),
        *(
            (13, "13.0", 13000, True),
            (13, "12.8", 12080, False),
            (13, "12.8", 13000, False),
            (13, "13.0", 12080, False),
        ),
    ],
)
def test_doctor_says_what_fits(
    pack_cuda: int, torch_cuda: str, driver: int, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = CardFacts.of("NVIDIA A100", (8, 0), 108)
    opened = pack.Pack(tmp_path, {"gpu": "a100", "cuda": f"{pack_cuda}.0.1"})
    (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {torch_cuda!r}\n")
    distribution = SimpleNamespace(version=torch_range.OLDEST, locate_file=lambda _: tmp_path / "version.py")
    monkeypatch.setattr(machine.metadata, "distribution", lambda _: distribution)
    monkeypatch.setattr(gpu, "cards", lambda: [card])
    monkeypatch.setattr(gpu, "driver_cuda", lambda: driver)
    checks = machine._torch({"a100": opened}), machine._cards({"a100": opened})
    assert all(check.ok for check in checks) == ok, checks
    assert torch_range.spelled(driver) in checks[1].detail
