"""Proves that tests launch kernels on the emulated GPU by the pytest plugin, and that findings fail these tests.

Each test here runs pytest in a session of its own.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.checking import compilation
from kernelproof.ground import places, toolchain
from kernelproof.ground.errors import WrongInput
from kernelproof.testing import emulation  # sessions in this process leave what it had imported

pytest_plugins = ["pytester"]

CACHE = places.user_cache()  # pytester's sessions have another home
SOURCE = Path(__file__).parent / "checked" / "program.cu"
PLUGIN = ("-p", "kernelproof.testing.plugin")
# ``reverse`` launches a kernel that races unless ``synchronised``.
HEAD = """
import ctypes
import numpy as np
import pytest
SOURCE, PTX, LIBRARY = {source!r}, {ptx!r}, {library!r}
x = np.arange(64, dtype="i4")
def reverse(emulator, synchronised):
    y = np.empty_like(x)
    emulator.load(PTX).launch("reversed", block=64, args=[x, emulator.output(y), synchronised])
    return y
"""
# Host code that launches 96 threads. With ``excess`` 1 one of them accesses an element too many.
LAUNCHER = """
__global__ void add(const float *x, float *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += x[i];
}
extern "C" int run(const float *x, float *y, int n, int excess) {
  add<<<3, 32>>>(x, y, n + excess);
  return cudaDeviceSynchronize();
}
"""


def test_an_option_of_the_mark_changes_itself_alone() -> None:
    plain = emulation.MarkOptions(None, adverse=False, allow=(), counters=False, triton=None)
    assert emulation.MarkOptions.of({}) == emulation.MarkOptions() == plain
    given: dict[str, Any] = {"device": "h200", "adverse": 1, "allow": "shared-race", "counters": True, "triton": 0}
    kept = given | {"adverse": True, "allow": ("shared-race",), "triton": False}
    for name, value in given.items():
        assert emulation.MarkOptions.of({name: value}) == replace(plain, **{name: kept[name]})
    assert emulation.MarkOptions.of(given) == emulation.MarkOptions(**kept)
    assert emulation.MarkOptions.of({"allow": ["shared-race", "trap"]}).allow == ("shared-race", "trap")
    for wrong in ({"nothing": 1}, {"allow": "nothing"}, {"allow": 5}, {"device": "nothing"}):
        with pytest.raises(WrongInput):
            emulation.MarkOptions.of(wrong)
    assert plain.target is None
    assert emulation.MarkOptions.of(given).target is not None


def test_a_launch_of_a_file_has_the_defaults_of_any_launch() -> None:
    """A grid and a cluster of one CTA with one thread, and nothing more."""
    own, common = (inspect.signature(kind.launch).parameters for kind in (emulation.KernelFile, emulation.CudaEmulator))
    shared = own.keys() & common.keys()
    assert {name: own[name].default for name in shared} == {name: common[name].default for name in shared}
    defaults = {name: each.default for name, each in own.items() if each.default is not inspect.Parameter.empty}
    nothing = {"smem": 0, "cooperative": False, "overlapping": False}
    assert defaults == {"grid": 1, "block": 1, "args": (), "cluster": 1, **nothing}


def test_a_function_of_a_file_is_that_of_its_host_code_compiled_once() -> None:
    opened: list[Path] = []
    calls: list[tuple[Any, ...]] = []
    library = SimpleNamespace(run=1)

    def open_library(path: Path) -> Any:
        opened.append(path)
        return library

    fake: Any = SimpleNamespace(
        open_library=open_library, call_in=lambda *arguments: calls.append(arguments) or len(calls)
    )
    program: Any = SimpleNamespace(kernels={})
    file = emulation.KernelFile(fake, program, lambda: Path("host.so"))
    assert [file.call("run", 5), file.call("run", 6)] == [1, 2]
    assert calls == [(library, "run", (5,)), (library, "run", (6,))]
    assert (file.function("other"), opened) == (None, [Path("host.so")])
    for each in (file, emulation.KernelFile(fake, program)):
        with pytest.raises(WrongInput):
            each.call("other")
    assert opened == [Path("host.so")]


@pytest.fixture(scope="module")
def head() -> str:
    """The common head of a session's tests, with kernels that are compiled already."""
    tools = toolchain.discover()
    ptx = compilation.ptx(SOURCE, [], "sm_80", tools)
    launcher = compilation.text_file(LAUNCHER, ".cu")
    library = compilation.library([launcher], [], "sm_80", tools)
    return HEAD.format(source=str(SOURCE), ptx=str(ptx), library=str(library))


@pytest.fixture
def session(pytester: pytest.Pytester, head: str, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the head of a test module, in which pytest runs."""
    monkeypatch.setenv("KERNELPROOF_CACHE_DIR", str(CACHE))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    pytester.makepyfile(head=head)
    return pytester


def run_module(session: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    """Runs pytest on a module with this body."""
    session.makepyfile(test_kernels=f"from head import *\n{body}")
    return session.runpytest_inprocess(*PLUGIN, "--strict-markers", *options)


def test_importing_it_is_nearly_free() -> None:
    """Every pytest session imports an installed plugin, so the import brings fewer than ten modules and no numpy."""
    statement = "import sys, pytest; before = set(sys.modules); import kernelproof.testing.plugin\nprint(*sorted("
    statement += "set(sys.modules) - before))"
    output = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout
    assert {name for name in output.split() if name.startswith(("cudal2gen", "kernelproof"))} == {
        "kernelproof", "kernelproof.ground", "kernelproof.ground.version", "kernelproof.testing",
        "kernelproof.testing.plugin",
    }  # fmt: skip
    assert "numpy" not in output.split()
    assert len(output.split()) < 10


@pytest.mark.slow
def test_a_finding_fails_the_test_with_its_report(session: pytest.Pytester) -> None:
    result = run_module(
        session,
        """
def test_right(cuda_emulator):
    np.testing.assert_array_equal(reverse(cuda_emulator, 1), x[::-1])
def test_wrong(cuda_emulator):
    reverse(cuda_emulator, 0)
def test_wrong_value(cuda_emulator):
    assert reverse(cuda_emulator, 0)[0] == 5
""",
    )
    result.assert_outcomes(passed=1, failed=2)
    line = 1 + SOURCE.read_text().splitlines().index("  y[threadIdx.x] = tile[63 - threadIdx.x];")
    result.stdout.fnmatch_lines(
        [
            f"shared-race in reversed at {SOURCE}:{line}: read after write without a barrier between",
            "*Captured CUDA findings call*",
            f"error: shared-race in reversed at {SOURCE}:{line}: *",
            "    CTA (0, 0, 0), threads 0, 1, *",
            "    PTX line *: ld.shared.*",
            f"    the other side: CTA (0, 0, 0), thread 63 at {SOURCE}:{line - 2}",
            "    hint: *",
            "    64 times",
            "    page: */docs/kernelproof/rules/shared-race.md",
            "*assert*==*5*",  # the test's own failure remains, and also has the section
            "*Captured CUDA findings call*",
            "FAILED test_kernels.py::test_wrong - Failed: shared-race in reversed at *",
        ]
    )
    page = next(text for text in result.outlines if text.startswith("    page: ")).removeprefix("    page: ")
    assert "**Error**" in Path(page).read_text()


@pytest.mark.slow
def test_options_of_the_mark(session: pytest.Pytester) -> None:
    result = run_module(
        session,
        """
@pytest.mark.emulated(allow=["shared-race"], counters=True)
def test_allowed(cuda_emulator):
    y = np.empty_like(x)
    result = cuda_emulator.load(PTX).launch("reversed", block=64, args=[x, y, 0])
    assert result.counters.shared_banks["st.shared"].conflicts == 0
    assert [item.kind for item in cuda_emulator.findings] == ["shared-race"]
@pytest.mark.emulated("sm_90a", adverse=True)
class TestDevice:
    @pytest.mark.emulated(adverse=False)
    def test_nearest_mark(self, cuda_emulator):
        assert (cuda_emulator.settings.device, cuda_emulator.options.adverse) == ("sm_90a", False)
    def test_class_mark(self, cuda_emulator):
        assert cuda_emulator.options.adverse and cuda_emulator.session.device.capability == (9, 0)
@pytest.mark.emulated(allow="shared-rac")
def test_no_rule(): pass
@pytest.mark.emulated(devices="sm_80")
def test_no_option(): pass
@pytest.mark.emulated("sm_12")
def test_no_device(): pass
""",
    )
    result.assert_outcomes(passed=3, errors=3)
    result.stdout.fnmatch_lines_random(
        [
            "*CUDA findings that fail no test*",
            "test_kernels.py::test_allowed",
            "allowed error: shared-race in reversed at *",
            "*allow: no rule 'shared-rac'; the rules are *shared-race*",
            "*no option 'devices'; there are device, adverse, allow, counters, triton*",
            "*sm_12*sm_80*",
        ]
    )


@pytest.mark.slow
def test_benign_findings_are_listed_and_fail_no_test(session: pytest.Pytester) -> None:
    benign = """
extern "C" __global__ void masked(const int *x, int *y) {
  __shared__ int tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  int other;
  asm volatile("and.b32 %0, %1, 0;" : "=r"(other) : "r"(tile[63 - threadIdx.x]));
  y[threadIdx.x] = x[threadIdx.x] + other;
}
"""
    session.makefile(".cu", masked=benign)
    body = """
def test_masked(cuda_emulator):
    cuda_emulator.compile("masked.cu").launch("masked", block=64, args=[x, np.empty_like(x)])
    assert [str(item.severity) for item in cuda_emulator.findings] == ["benign"]
"""
    result = run_module(session, body, "-W", "error")
    result.assert_outcomes(passed=1)
    listed = [
        "*CUDA findings that fail no test*",
        "test_kernels.py::test_masked",
        "benign: shared-race in masked *",
    ]
    result.stdout.fnmatch_lines(listed)


def test_the_mark_alone_gives_launchers_a_device(session: pytest.Pytester) -> None:
    result = run_module(
        session,
        """
@pytest.mark.parametrize("excess", [0, 1])
@pytest.mark.emulated
def test_launcher(excess):
    library = ctypes.CDLL(LIBRARY)
    pointers = [ctypes.c_void_p() for _ in range(2)]
    runtime = ctypes.CDLL(None)
    for pointer in pointers:
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(256)) == 0
        runtime.cudaMemset(pointer, 0, ctypes.c_size_t(256))
    library.run(*pointers, 64, excess)
def test_without(): pass
""",
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["global-out-of-bounds in add at *"])
    result = run_module(
        session,
        """
@pytest.mark.parametrize("excess", [0, 1])
@pytest.mark.emulated
def test_launcher(excess, cuda_emulator):
    cuda_emulator.open(LIBRARY)
    y = np.ones(48 + 16 * (not excess), "f4")
    assert cuda_emulator.call("run", y.copy(), y, len(y), excess) == 0
    np.testing.assert_array_equal(y, 2)
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*global-out-of-bounds in add at *"])


@pytest.mark.slow
def test_sources_programs_and_arrays(session: pytest.Pytester) -> None:
    session.makefile(".cu", pair="__global__ void pair(const int *x, short *y) { y[threadIdx.x] = x[threadIdx.x]; }")
    result = run_module(
        session,
        """
@pytest.mark.parametrize("case", ["right", "race", "exit code"])
def test_program(cuda_emulator, case):
    result = cuda_emulator.check_program(SOURCE, args=[case], timeout=60)
    assert result.program_exit_code == (3 if case == "exit code" else 0)
def test_compiled(cuda_emulator):
    assert cuda_emulator.compile("pair.cu").kernels == ("pair",)
    y = np.zeros(200, "i2")
    cuda_emulator.launch("pair", block=64, args=[x, y[:64]])
    np.testing.assert_array_equal(y[:100], [*x, *[0] * 36])
    whole = np.arange(128, dtype="i4")
    cuda_emulator.launch("pair", block=32, args=[whole[::2], whole.view("i2")[64:]])
    np.testing.assert_array_equal(whole.view("i2")[64:96], np.arange(32))
def test_beyond(cuda_emulator):
    cuda_emulator.compile("pair.cu")
    cuda_emulator.launch("pair", block=64, args=[x, np.zeros(200, "i2")[:63]])
def test_input(cuda_emulator):
    cuda_emulator.compile("pair.cu")
    y = np.zeros(64, "i2")
    y.flags.writeable = False
    cuda_emulator.launch("pair", block=64, args=[x, y])
def test_output(cuda_emulator):
    cuda_emulator.compile("pair.cu")
    cuda_emulator.launch("pair", block=63, args=[x, cuda_emulator.output(np.zeros(64, "i2"))])
def test_kept(cuda_emulator):
    file = cuda_emulator.compile("pair.cu")
    y = cuda_emulator.upload(np.zeros(64, "i2"), "output", "totals")
    for _ in range(2):
        file.launch("pair", block=32, args=[x, y])
    np.testing.assert_array_equal(y.download()[:32], x[:32])
def test_no_file(cuda_emulator):
    cuda_emulator.compile("missing.cu")
""",
    )
    result.assert_outcomes(passed=2, failed=7)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED test_kernels.py::test_program?race? - Failed: shared-race in *",
            "*program.cu: the program ended with exit code 3; 0 is expected",
            "global-out-of-bounds in pair at *pair.cu:1: *",
            "input-modified in pair at *pair.cu:1: *",
            "unwritten-output in pair: 1 of 64 elements of argument 1 were never written, first (63,), last (63,)",
            "unwritten-output in pair: 32 of 64 elements of totals were never written, *",
            "*WrongInput: no file missing.cu in *",
        ]
    )


@pytest.mark.torch
def test_tensors_are_arguments(session: pytest.Pytester) -> None:
    pytest.importorskip("torch")
    result = run_module(
        session,
        """
import torch
def test_bounds_of_a_view(cuda_emulator):
    x, y = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    cuda_emulator.load(PTX).launch("reversed", block=64, args=[x, y[:32], 1])
def test_values(cuda_emulator):
    x, y = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    cuda_emulator.load(PTX).launch("reversed", block=64, args=[x, cuda_emulator.output(y), 1])
    assert torch.equal(y, x.flip(0))
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["global-out-of-bounds in reversed at *"])


# A test file with a kernel in Triton.
TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n + {excess})

def test_kernel():
    x, y = torch.arange(100.0), torch.zeros(100)
    double[(2,)](x, y, 100, BLOCK=64)
    assert torch.equal(y, 2 * x)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_marked_tests_launch_triton_kernels(session: pytest.Pytester) -> None:
    """The tests run in new processes, since without the mark Triton looks for a GPU."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    for name, excess, mark in (
        ("right", 0, "emulated"),
        ("wrong", 1, "emulated('sm_90a', triton=True)"),
        ("left", 0, "emulated(triton=False)"),
    ):
        text = TRITON.format(excess=excess).replace("def test_kernel", f"@pytest.mark.{mark}\ndef test_kernel")
        session.makepyfile(**{f"test_{name}": f"import pytest\n{text}"})
    result = session.runpytest_subprocess(*PLUGIN, "--strict-markers")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines_random(
        ["global-out-of-bounds in double at *test_wrong.py:9: *", "*test_left.py:*Error*"]
    )


@pytest.mark.slow
def test_a_missing_compiler_fails_or_skips(session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
@pytest.fixture
def file(cuda_emulator):
    return cuda_emulator.compile("__global__ void f() {}\\n")
def test_compiled(file): pass
def test_loaded(cuda_emulator):
    reverse(cuda_emulator, 1)
@pytest.mark.emulated
def test_marked(): pass
"""
    session.makepyfile(test_kernels=f"from head import *\n{body}")
    # Only Python is available, without a stand-in runtime in the cache.
    monkeypatch.setenv("PATH", str(session.path))
    monkeypatch.setenv("KERNELPROOF_CACHE_DIR", str(session.path / "cache"))
    failed = session.runpytest_subprocess(*PLUGIN)
    failed.assert_outcomes(passed=1, errors=2)
    failed.stdout.fnmatch_lines(["*gcc*(to skip such tests: kernelproof_missing = skip in pytest's ini file)"])
    session.makeini("[pytest]\nkernelproof_missing = skip\n")
    skipped = session.runpytest_subprocess(*PLUGIN, "-rs")
    skipped.assert_outcomes(passed=1, skipped=2)
    skipped.stdout.fnmatch_lines_random(["SKIPPED*gcc*", "SKIPPED*no C compiler*"])
    session.makeini("[pytest]\nkernelproof_missing = sometimes\n")
    assert session.runpytest_inprocess(*PLUGIN).ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_share_compilations_and_send_failures(
    session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELPROOF_CACHE_DIR", str(session.path / "cache"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    body = """
@pytest.mark.parametrize("synchronised", [0, 1, 0, 1])
def test_reversed(cuda_emulator, synchronised):
    cuda_emulator.compile(SOURCE).launch("reversed", block=64, args=[x, np.empty_like(x), synchronised])
"""
    session.makepyfile(test_kernels=f"from head import *\n{body}")
    result = session.runpytest_subprocess(*PLUGIN, "-n", "2", "-p", "xdist")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*Captured CUDA findings call*", f"::error file={SOURCE},line=*title=shared-race::*"])
    assert len(list((session.path / "cache" / "check").glob("*.ptx"))) == 1
