"""Proves that builds are complete or absent, and that two processes which need the same kernel compile it once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact, BuildError, Ptxas
from cudal2gen.generation.ptx_split import split
from kernelproof.ground import toolchain
from kernelproof.ground.toolchain import Toolchain, ToolchainError
from tests import processes
from tests.cudal2gen.strategies import STRAIGHT, direct, multistage, prefetch

# Fields of a kernel that compiles quickly.
SMALL = {"bm": 32, "bn": 32, "bk": 32, "mma_repeat": [1, 1, 1], "c_batch": 1, "m": 64, "n": 64, "k": 64}
RECORDS = [direct(), direct(acc="f32"), multistage(**SMALL), multistage(**SMALL, **prefetch("none"))]
FAMILIES = RECORDS[::2]  # one record of each of the two families
# The files of a built kernel.
FILES = {"kernel.cu", "kernel.ptx", "kernel.cubin", "kernel.launch", "ptxas.json"}

# Requests one kernel in a separate process.
BUILD_ONE = """
import sys
from pathlib import Path
from cudal2gen.generation import compiler; from kernelproof.ground import toolchain
from tests.cudal2gen.strategies import direct
tools = toolchain.discover(Path(sys.argv[2]))
print(compiler.build([direct()], build_dir=Path(sys.argv[1]), tools=tools, jobs=1)[0].directory)
"""


@pytest.fixture
def counting_nvcc(tmp_path: Path) -> Path:
    """A slow nvcc that notes each compilation in the file ``calls`` in its folder."""
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\ncase \"$*\" in *-dryrun*|*--version*) ;; *) echo call >> '{tmp_path}/calls'; sleep 1 ;; esac\n"
        f"exec '{toolchain.discover().nvcc}' \"$@\"\n"
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def hanging_nvcc(counting_nvcc: Path) -> Path:
    """An nvcc that notes each compilation and outlives any test."""
    text = counting_nvcc.read_text()
    assert "sleep 1 ;;" in text
    counting_nvcc.write_text(text.replace("sleep 1 ;;", f"exec sleep {processes.LIFE_S:g} ;;"))
    return counting_nvcc


@pytest.fixture(scope="module")
def single_builds(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """A record of each family, built alone, in a folder that the processes of a run share."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "built-alone"
    return [compiler.build([record], build_dir=folder)[0] for record in FAMILIES]


def copy_of(artifact: Artifact, build_dir: Path) -> Artifact:
    """Copies an artifact to another build folder, which a test may then change."""
    return replace(artifact, directory=Path(shutil.copytree(artifact.directory, build_dir / artifact.digest)))


def start_build(build_dir: Path, nvcc: Path) -> subprocess.Popen[str]:
    """Starts a process that builds one kernel."""
    command = [sys.executable, "-c", BUILD_ONE, str(build_dir), str(nvcc)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def names_in(folder: Path) -> set[str]:
    """The names in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_prebuilt_kernels_are_found_without_their_compiler(
    single_builds: list[Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of versions stands for a compiler that was used elsewhere. If these are the versions of this machine's
    compiler, it is used."""
    versions = tmp_path / "toolchain.json"
    here = toolchain.discover()
    other = {"nvcc": "13.0.1", "cutlass": here.cutlass_version}
    versions.write_text(json.dumps(other))
    monkeypatch.setenv(toolchain.PREBUILT, str(versions))
    tools = toolchain.discover()
    assert tools.versions == other
    elsewhere = compiler.job(RECORDS[0], replace(here, nvcc_version="13.0.1")).digest
    assert compiler.job(RECORDS[0], tools).digest == elsewhere
    with pytest.raises(ToolchainError, match=r"and 1 more: not in .*nvcc 13\.0\.1 elsewhere"):
        compiler.build(RECORDS[:2], build_dir=tmp_path / "empty", tools=tools)
    with pytest.raises(ToolchainError, match="the launcher: not in"):
        compiler.launcher(build_dir=tmp_path / "empty", tools=tools)
    shutil.copytree(single_builds[0].directory, tmp_path / "build" / elsewhere)
    assert compiler.build(RECORDS[:1], build_dir=tmp_path / "build", tools=tools)[0].digest == elsewhere
    versions.write_text(json.dumps(here.versions))
    assert toolchain.discover().compiles
    versions.write_text("{}")
    with pytest.raises(ToolchainError, match="holds no versions"):
        toolchain.discover()


@pytest.mark.slow
def test_a_build_leaves_whole_directories_and_nothing_else(single_builds: list[Artifact], tmp_path: Path) -> None:
    """This holds for a batch, which gives the same files as builds of single kernels."""
    reports: list[tuple[int, int]] = []
    artifacts = compiler.build(
        RECORDS, build_dir=tmp_path, jobs=1, progress=lambda finished, total: reports.append((finished, total))
    )
    assert [artifact.digest for artifact in artifacts] == [
        compiler.job(r, toolchain.discover()).digest for r in RECORDS
    ]
    assert names_in(tmp_path) == {".lock", *(artifact.digest for artifact in artifacts)}
    for record, artifact in zip(RECORDS, artifacts, strict=True):
        assert names_in(artifact.directory) == FILES
        assert artifact.cubin.read_bytes()[:4] == b"\x7fELF"
        assert f".visible .entry {record.name}(" in artifact.ptx.read_text()
        assert artifact.source.read_text().startswith("// D(m,n)")
        report = json.loads((artifact.directory / "ptxas.json").read_text())
        assert report == {
            "arch": "sm_80",
            "registers": artifact.ptxas.registers,
            "spill_store_bytes": 0,
            "spill_load_bytes": 0,
            "stack_bytes": 0,
            "smem_static_bytes": 0,
            "barriers": 1 if record.family == "sm80_multistage" else 0,
            "losses": [],
        }
        assert 16 <= artifact.ptxas.registers <= 255
    assert reports[0] == (0, 4)
    assert reports[-1] == (4, 4)
    for single, batched in zip(single_builds, artifacts[::2], strict=True):
        for name in FILES:
            assert (single.directory / name).read_bytes() == (batched.directory / name).read_bytes(), name


@pytest.mark.slow
def test_what_is_built_is_not_built_again(
    single_builds: list[Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [copy_of(single_builds[0], tmp_path)]
    monkeypatch.setattr(compiler, "_ninja", lambda *_: pytest.fail("compiled again"))
    assert compiler.build(RECORDS[:1], build_dir=tmp_path) == first
    assert compiler.find(RECORDS[0], build_dir=tmp_path) == first[0]
    assert compiler.find(RECORDS[1], build_dir=tmp_path) is None


@pytest.mark.slow
def test_no_path_and_no_time_enters_the_files(single_builds: list[Artifact]) -> None:
    artifact = single_builds[0]
    folder = str(artifact.directory.parent)
    for name in FILES - {"kernel.cubin"}:
        assert folder not in (artifact.directory / name).read_text()
    assert folder.encode() not in artifact.cubin.read_bytes()
    assert '.file\t1 "kernel.cu"' in artifact.ptx.read_text()


@pytest.mark.slow
def test_line_information_points_into_the_kernels_own_text(single_builds: list[Artifact]) -> None:
    artifact = single_builds[1]
    source = artifact.source.read_text().splitlines()
    lines = artifact.ptx.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if "cp.async.wait_" in line)
    location = next(line for line in reversed(lines[:index]) if line.startswith("\t.loc\t1 "))
    assert "cp_async_wait" in source[int(location.split()[2]) - 1]


def test_the_digest_follows_text_architecture_and_versions() -> None:
    tools = toolchain.discover()
    newer = Toolchain(
        tools.nvcc, tools.ptxas, tools.cuda_include, tools.cutlass_include, "13.0.99", tools.cutlass_version
    )
    relocated = Toolchain(
        Path("/x/nvcc"), tools.ptxas, tools.cuda_include, Path("/y"), tools.nvcc_version, tools.cutlass_version
    )
    base = compiler.job(multistage(), tools).digest
    assert compiler.job(multistage(stages=2), tools).digest != base
    assert compiler.job(multistage(gpu="h200"), tools).digest != base
    assert compiler.job(multistage(), newer).digest != base
    assert compiler.job(multistage(), relocated).digest == base
    assert compiler.job(multistage(m=128), tools).digest == base


@pytest.mark.slow
def test_processes_that_race_for_a_kernel_compile_it_once(tmp_path: Path, counting_nvcc: Path) -> None:
    racers = [start_build(tmp_path / "build", counting_nvcc) for _ in range(4)]
    outputs = [racer.communicate(timeout=300) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]


@pytest.mark.slow
def test_threads_that_race_for_a_kernel_compile_it_once(tmp_path: Path, counting_nvcc: Path) -> None:
    tools = toolchain.discover(counting_nvcc)
    built: list[Artifact] = []
    threads = [
        threading.Thread(
            target=lambda: built.extend(compiler.build(RECORDS[:1], build_dir=tmp_path / "build", tools=tools))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(built)) == 1
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_looks_whole(tmp_path: Path, hanging_nvcc: Path) -> None:
    build_dir = tmp_path / "build"
    victim = start_build(build_dir, hanging_nvcc)
    processes.wait_until((tmp_path / "calls").exists)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert all(name.startswith(".") for name in names_in(build_dir)), "no finished directory"
    assert any(name.startswith(".tmp-") for name in names_in(build_dir)), "the kill came during the build"
    artifact = compiler.build([direct()], build_dir=build_dir)[0]
    assert names_in(artifact.directory) == FILES
    assert names_in(build_dir) == {".lock", artifact.digest}, "what the killed build left is gone"


@pytest.mark.slow
def test_a_directory_without_its_report_is_no_kernel(single_builds: list[Artifact], tmp_path: Path) -> None:
    artifact = copy_of(single_builds[0], tmp_path)
    for name, text in [
        ("ptxas.json", "{"),
        ("ptxas.json", "{}"),
        ("ptxas.json", "[]"),
        ("kernel.cubin", ""),
        ("kernel.ptx", ""),
    ]:
        whole = (artifact.directory / name).read_bytes()
        (artifact.directory / name).write_text(text)
        assert compiler.find(RECORDS[0], build_dir=tmp_path) is None
        (artifact.directory / name).write_bytes(whole)
        assert compiler.find(RECORDS[0], build_dir=tmp_path) == artifact
    (artifact.directory / "kernel.cubin").unlink()
    (artifact.directory / "ptxas.json").write_text("{")
    assert compiler.build(RECORDS[:1], build_dir=tmp_path) == [artifact]
    assert names_in(artifact.directory) == FILES


@pytest.mark.slow
def test_a_compile_error_is_nvccs_first_in_a_line_against_the_kept_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = RECORDS[0], RECORDS[2]
    render = compiler.render
    monkeypatch.setattr(
        compiler,
        "render",
        lambda record: render(record).replace("kStages - 1", "kStagez - 1") if record == bad else render(record),
    )
    with pytest.raises(BuildError) as raised:
        compiler.build([good, bad], build_dir=tmp_path, jobs=1)
    message = str(raised.value)
    (source,) = (tmp_path / "failed").glob("*.cu")
    log = source.with_suffix(".log")
    line = next(i for i, text in enumerate(source.read_text().splitlines(), 1) if "kStagez" in text)
    first = f'{source}({line}): error: identifier "kStagez" is undefined'
    assert message == f"{bad.name} did not compile: {first}; all messages are in {log}"
    assert log.read_text().startswith(f"{first}\n")
    assert compiler.find(good, build_dir=tmp_path) is not None, "the others of the batch are built"
    assert compiler.find(bad, build_dir=tmp_path) is None
    assert names_in(tmp_path) == {".lock", "failed", compiler.job(good, toolchain.discover()).digest}


def test_an_unwritable_build_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot write to .*file/build: Not a directory; choose another folder"):
        compiler.build(RECORDS[:1], build_dir=tmp_path / "file" / "build")


@pytest.mark.parametrize(("code", "said", "number"), [
    (137, "", 9), (139, "", 11), (1, "died due to signal 9", 9), (1, "", 0), (255, "", 0), (127, "", 0), (2, "", 0),
    (1, "died due to signal 999", 0), (134, "died due to signal 11", 6),
])  # fmt: skip
def test_the_signal_that_ended_a_compiler_is_that_of_its_own_last_command(code: int, said: str, number: int) -> None:
    job: Any = SimpleNamespace(name="own")
    other = "FAILED: [code=139] sm_80/other/kernel.ptx\nnvcc x\ndied due to signal 11\n"
    own = f"FAILED: [code={code}] sm_80/own/kernel.ptx\nnvcc y\nnvcc error: 'cicc' {said}\n"
    first = "FAILED: [code=138] sm_80/own/kernel.ptx\nnvcc y\n"
    for log in (own, other + own, own + other, f"[1/2] nvcc\n{other}{first}{own}{other}"):
        assert compiler._fatal_signal(job, log) == number
    assert compiler._fatal_signal(job, other) == compiler._fatal_signal(job, "") == 0


def test_a_library_is_compiled_once_and_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def fake_compile(library: Path, name: str, sources: list[str], flags: list[str], failed: Path) -> None:
        assert (name, sources, flags, failed) == ("a library", ["x.cpp"], ["-O2"], tmp_path / "root" / "failed")
        made.append(library)
        if len(made) == 1:
            raise BuildError("broken")
        library.parent.mkdir()
        library.write_text("content")

    monkeypatch.setattr(compiler, "_compile_shared", fake_compile)
    library = tmp_path / "root" / "digest" / "library.so"
    with pytest.raises(BuildError):
        compiler._shared_library(library, "a library", ["x.cpp"], ["-O2"])
    assert not library.exists()
    for _ in range(2):
        assert compiler._shared_library(library, "a library", ["x.cpp"], ["-O2"]) == library
        assert library.read_text() == "content"
    assert len(made) == 2
    assert all(path.name == library.name and tmp_path in path.parents and path != library for path in made)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_write(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail_to_write)
    with pytest.raises(BuildError, match=r"No space left on device; free some space, or choose another folder"):
        compiler.build(RECORDS[:1], build_dir=tmp_path)
    monkeypatch.undo()
    assert names_in(tmp_path) == {".lock"}


def test_a_missing_nvcc_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "nvcc_candidates", lambda nvcc: [])
    monkeypatch.setattr(toolchain, "_installed", toolchain._installed.__wrapped__)
    with pytest.raises(ToolchainError, match=r"no nvcc found .*\[nvcc\]"):
        toolchain.discover()


def test_an_nvcc_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="does not run"):
        toolchain.discover(tmp_path / "nvcc")
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ToolchainError, match="does not run or answer like nvcc"):
        toolchain.discover(fake)
    fake.write_text("#!/bin/sh\necho '#$ TOP=/usr'; echo V12.4.131\n")
    with pytest.raises(ToolchainError, match=r"is of CUDA 12.4.131, not 13; install a compiler"):
        toolchain.discover(fake)


def test_nvcc_is_taken_by_argument_then_environment_then_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = tmp_path / "nvcc"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KERNELPROOF_NVCC", "/from/environment")
    assert toolchain.nvcc_candidates(Path("/given")) == [Path("/given")]
    assert toolchain.nvcc_candidates(Path("here/nvcc")) == [Path.cwd() / "here/nvcc"]
    assert toolchain.nvcc_candidates() == [Path("/from/environment")]
    monkeypatch.delenv("KERNELPROOF_NVCC")
    assert toolchain.nvcc_candidates()[0] == on_path


@pytest.mark.slow
def test_the_environment_cannot_change_a_kernel_unseen(
    single_builds: list[Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("CPATH", "/nowhere")
    changed = compiler.build(RECORDS[:1], build_dir=tmp_path)[0]
    assert changed.ptx.read_bytes() == single_builds[0].ptx.read_bytes()


@pytest.mark.thorough
@pytest.mark.slow
def test_processes_that_race_for_the_launcher_all_get_it(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; import ctypes;"
    program += "from cudal2gen.generation import compiler; from cudal2gen.launch import launcher;"
    program += "ctypes.CDLL(str(compiler.launcher(build_dir=Path(sys.argv[1]))))"
    racers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(3)]
    assert [racer.wait(300) for racer in racers] == [0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_build_that_ends_takes_its_compilers_along(
    tmp_path: Path, hanging_nvcc: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "cudal2gen", "--build-dir", str(tmp_path / "b"), "build", "--mnk", "64_64_64"]
    victim = subprocess.Popen([*command, "--nvcc", str(hanging_nvcc)], env=processes.marked_environment(tmp_path))
    processes.wait_until((tmp_path / "calls").exists)
    assert any("ninja" in line for line in processes.living_processes(tmp_path).values())
    victim.send_signal(number)
    processes.wait_until(lambda: not processes.living_processes(tmp_path), processes.END_S)
    code = victim.wait(processes.END_S)
    if number == signal.SIGKILL:
        return
    assert code == 128 + number
    assert names_in(tmp_path / "b") == {".lock"}


@pytest.mark.slow
def test_a_compiler_that_is_killed_costs_its_own_kernel_only(tmp_path: Path, counting_nvcc: Path) -> None:
    """The killed program is nvcc itself, or one that nvcc runs, which it reports."""
    victim, reported, other = RECORDS[:3]
    counting_nvcc.write_text(
        f'#!/bin/sh\ncase "$*" in *{victim.name}*) kill -9 $$;;\n'
        f"*{reported.name}*) echo \"nvcc error : 'cicc' died due to signal 9 (Kill signal)\"; exit 9;; esac\n"
        f"exec '{toolchain.discover().nvcc}' \"$@\"\n"
    )
    tools = replace(toolchain.discover(), nvcc=counting_nvcc)
    outcomes = compiler.attempt([victim, reported, other], build_dir=tmp_path / "b", tools=tools, jobs=3)
    for record, outcome in zip((victim, reported), outcomes, strict=False):
        assert str(outcome).startswith(f"{record.name}: SIGKILL ended its compiler; if memory ran out")
    assert isinstance(outcomes[2], compiler.Artifact)
    with pytest.raises(BuildError, match="SIGKILL") as caught:
        compiler.build([victim, other, victim], build_dir=tmp_path / "b", tools=tools)
    assert str(caught.value).count("\n") == 0, "once for each kernel"


def test_tools_follow_the_environment_of_a_process_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.discover(), toolchain.find_nvdisasm()
    for name, search in (("KERNELPROOF_NVCC", toolchain.discover), ("KERNELPROOF_NVDISASM", toolchain.find_nvdisasm)):
        monkeypatch.setenv(name, "/nowhere")
        with pytest.raises(ToolchainError, match="/nowhere"):
            search()
        monkeypatch.undo()
    assert (toolchain.discover(), toolchain.find_nvdisasm()) == before


def test_missing_headers_say_what_installs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.discover()
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"CuTe headers are missing.*nvidia-cutlass"):
        toolchain.discover()


def test_ninja_text_is_a_pure_function_of_its_jobs() -> None:
    tools = Toolchain(Path("/n/$nv cc"), Path("/n/ptxas"), Path("/i"), Path("/c c"), "13.0.88", "4.2.0")
    jobs = [compiler.job(record, tools) for record in RECORDS[:2]]
    text = compiler.ninja_text([jobs], tools, Path("/py"))
    assert text == compiler.ninja_text([jobs], tools, Path("/py"))
    assert "command = '/n/$$nv cc' '-std=c++17'" in text
    assert "'-I/c c'" in text
    for item in jobs:
        assert f"build sm_80/{item.name}/kernel.cubin: ptxas sm_80/{item.name}/kernel.ptx" in text
    assert text.count(": nvcc ") == 1


def test_spills_and_stack_frames_are_findings() -> None:
    log = """ptxas info    : Function properties for k
    48 bytes stack frame, 44 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 16 bytes smem, 408 bytes cmem[0]"""
    report = compiler.parse_ptxas(log, "sm_80")
    assert report == Ptxas("sm_80", 255, 44, 52, 48, 16, 2)
    assert report.findings == ["spills 44 bytes (255 registers)"]
    assert Ptxas("sm_80", 40, 0, 0, 8, 0, 0).findings == ["has a stack frame of 8 bytes"]
    assert Ptxas("sm_80", 40, 0, 0, 0, 0, 0).findings == []


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        (
            "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.",
            "C7508 'setmaxnreg' ignored; unable to determine register count at entry.",
        ),
        (
            "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to wgmma pipeline "
            "crossing function boundary at a function call in the function 'k'",
            "C7510 wgmma.mma_async instructions are serialized due to wgmma pipeline crossing function boundary "
            "at a function call",
        ),
        (
            "(C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient "
            "register resources for the wgmma pipeline in the function 'k'",
            "C7511 wgmma.mma_async instructions are serialized due to insufficient register resources "
            "for the wgmma pipeline",
        ),
        (
            "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient "
            "register resources for the function 'k'",
            "C7512 wgmma.mma_async instructions are serialized due to insufficient register resources",
        ),
    ],
)
def test_what_ptxas_calls_a_loss_is_a_finding(line: str, finding: str) -> None:
    log = f"ptxas info    : {line}\nptxas info    : {line}\nptxas info    : Used 168 registers, used 1 barriers"
    assert compiler.parse_ptxas(log, "sm_90a").findings == [f"is slow, says ptxas: {finding}"]


@pytest.mark.slow
def test_a_kernel_that_spills_is_found() -> None:
    record = multistage(bm=256, bn=128, acc="f32", min_blocks=1, stages=2, **STRAIGHT, bk=32)
    assert compiler.build([record])[0].ptxas.findings


def test_split_refuses_what_has_no_kernel() -> None:
    with pytest.raises(ValueError, match="no kernel entry"):
        split(".version 9.0\n.target sm_80\n.address_size 64\n")


def test_split_keeps_the_symbols_that_a_kernel_uses() -> None:
    text = (
        ".version 9.0\n.target sm_80\n.address_size 64\n\n"
        ".global .align 1 .b8 unused[1];\n.const .align 4 .b8 table[8] = {1, 2};\n"
        ".extern .shared .align 16 .b8 smem[];\n"
        ".visible .entry a(\n\t.param .u32 a_param_0\n)\n{\n\tmov.u32 %r1, table;\n$L__BB0_1:\n\tret;\n\n}\n"
        ".visible .entry b(\n\t.param .u32 b_param_0\n)\n{\n"
        "\tmov.u32 %r1, smem;\n\tbra $L__BB1_2;\n$L__BB1_2:\n\tret;\n\n}\n"
    )
    parts = split(text)
    assert set(parts) == {"a", "b"}
    assert ".const .align 4 .b8 table[8] = {1, 2};" in parts["a"]
    assert "smem" not in parts["a"]
    assert ".extern .shared .align 16 .b8 smem[];" in parts["b"]
    assert "unused" not in parts["a"] + parts["b"]
    assert "bra $L__BB_2;" in parts["b"]


def test_split_knows_the_braces_of_inline_assembly() -> None:
    body = "{\n\t// begin inline asm\n\t{\n.reg .pred p;\n}\n\t// end inline asm\n\tret;\n\n}\n"
    text = ".version 9.0\n.target sm_90a\n.address_size 64\n\n"
    parts = split(text + f".visible .entry a(\n)\n{body}.visible .entry b(\n)\n{body}")
    assert all(parts[name].count("}") == 2 and parts[name].count("ret;") == 1 for name in ("a", "b"))


@pytest.mark.slow
def test_the_launcher_is_linked_against_no_cuda_library() -> None:
    library = compiler.launcher()
    assert library == compiler.launcher()
    listing = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    undefined = [line.split()[-1] for line in listing.splitlines() if " U " in line]
    assert not [name for name in undefined if name.startswith("cu")]
    defined = {line.split()[-1] for line in listing.splitlines() if " T " in line}
    assert {"cudal2gen_open", "cudal2gen_launch", "cudal2gen_close", "cudal2gen_workspace_bytes"} <= defined
