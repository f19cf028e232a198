"""Proves that the C interface returns codes for bad arguments, that plans run, and what autotuning chooses."""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cudal2gen import pack, places, torch_range
from cudal2gen.generation import compiler
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from kernelproof import emulator
from kernelproof.ground import toolchain
from tests.cudal2gen import idle_runtime, packed
from tests.cudal2gen.c_interface import Answer, Call, Fusion, Problem, Vendor, interface
from tests.packages import require

HEADER = places.PACKAGE / "launch" / "cudal2gen.h"
PREDICATED = packed.RECORDS["predicated"]
# The kernels of the pack: plain, split, fused, batched and grouped.
RECORDS = [
    PREDICATED,
    packed.RECORDS["split"],
    PREDICATED.at(PREDICATED.problem.revised(fusion="bias_n+relu")),
    PREDICATED.at(PREDICATED.problem.revised(batch="strided")),
    PREDICATED.at(PREDICATED.problem.revised(batch="grouped")),
]
BUILT_AHEAD = RECORDS
KERNEL = 1  # CUDAL2GEN_KERNEL of the header: the nearest kernel, whether measured or not
A, B, D = 1 << 20, 1 << 21, 1 << 22  # addresses that this runtime never reads
# Prints the lower bound on the median of 1 to ``pairs`` for each number of pairs up to 64, which is its rank.
RANKS_PROGRAM = """
#include "race_rule.h"
#include <cstdio>
#include <numeric>
int main() {
  for (int pairs = 1; pairs <= 64; ++pairs) {
    std::vector<double> values(pairs);
    std::iota(values.begin(), values.end(), 1.0);
    std::printf("%g ", cudal2gen::median_lower_bound(values));
  }
}
"""


class Place(NamedTuple):
    """A pack's folder, and a runtime that launches nothing."""

    folder: Path
    runtime: Path

    @property
    def library(self) -> Path:
        """The pack's library, which has the C interface."""
        return self.folder / pack.facts.LIBRARY


class OpenedPack(NamedTuple):
    """A pack that is open in the C interface: its functions and its handle."""

    api: ctypes.CDLL
    pack: ctypes.c_void_p


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The pack of ``RECORDS``, of which the first was measured twice as fast as torch, and a runtime."""
    folder = tmp_path_factory.mktemp("c")
    table = packed.table(RECORDS, {0: 2.0})
    return Place(packed.folder(table, folder / "pack", with_ptx=False), idle_runtime.build(folder))


@pytest.fixture
def opened_pack(place: Place) -> Iterator[OpenedPack]:
    """The pack, open until the test has ended."""
    api, handle = interface(place.library), ctypes.c_void_p()
    assert api.cudal2gen_pack_open(os.fsencode(place.folder), os.fsencode(place.runtime), ctypes.byref(handle)) == 0
    yield OpenedPack(api, handle)
    assert api.cudal2gen_pack_close(handle) == 0


@pytest.mark.parametrize(
    ("runtime", "driver", "code", "said"), [(12080, 13000, 500, "12.8"), (13000, 12090, 35, "12.9"), (0, 0, 0, "")]
)
def test_an_older_cuda_is_refused_in_one_sentence(
    runtime: int, driver: int, code: int, said: str, place: Place
) -> None:
    """Both a pack and a kernel refuse it. Unknown versions are not refused."""
    api, handle = interface(place.library), ctypes.c_void_p()
    idle_runtime.versions(place.runtime, runtime, driver)
    try:
        returned = api.cudal2gen_pack_open(os.fsencode(place.folder), os.fsencode(place.runtime), ctypes.byref(handle))
        assert returned == code
        if code:
            sentence = api.cudal2gen_last_error().decode()
            assert {said, str(torch_range.CUDA), str(torch_range.DRIVER)} <= set(re.findall(r"[\d.]+\d", sentence))
            kernel = next(file.parent for file in place.folder.rglob("kernel.launch"))
            with pytest.raises(LaunchError, match=re.escape(sentence)) as caught:
                OpenKernel(place.library, kernel, {}, place.runtime)
            assert caught.value.code == code
        else:
            assert api.cudal2gen_pack_close(handle) == 0
    finally:
        idle_runtime.versions(place.runtime)


def test_the_runtimes_name_stands_in_one_place(place: Place) -> None:
    files = [file for file in places.PACKAGE.rglob("*") if file.suffix in (".py", ".cpp", ".h")]
    spelled = [file for file in files if re.search(r"libcudart\.so\.\d", file.read_text())]
    assert (len(files) > 150, spelled) == (True, [])
    content = place.library.read_bytes()
    assert torch_range.RUNTIME.encode() in content
    assert torch_range.CUDAS[12].runtime.encode() not in content, "kernels of CUDA 13 need CUDA 13's runtime"


def problem(**fields: object) -> Problem:
    """A problem that the predicated kernel computes, whether measured or not; ``fields`` replace some."""
    return Problem(**{"acc": 1, "m": 64, "n": 64, "k": 128, "prefer": KERNEL, **fields})


def code_of(opened_pack: OpenedPack, question: Problem, d: int = D, ldd: int = 64) -> int:
    """The return code of a plain product. ``d``, ``ldd``: the address of D, and its leading dimension."""
    return int(
        opened_pack.api.cudal2gen_matmul(
            opened_pack.pack, ctypes.byref(question), A, 128, B, 128, d, ldd, 1 << 23, None
        )
    )


@pytest.mark.parametrize("command", [["gcc", "-std=c99"], ["gcc", "-std=c11"], ["g++", "-std=c++11"]])
def test_the_header_is_c_and_cpp(command: list[str], tmp_path: Path) -> None:
    source = tmp_path / ("a.c" if command[0] == "gcc" else "a.cpp")
    source.write_text('#include "cudal2gen.h"\nint main(void) { return CUDAL2GEN_VERSION != 10000; }\n')
    flags = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{HEADER.parent}"]
    subprocess.run([*command, *flags, str(source)], check=True)


def test_the_library_tells_its_version(opened_pack: OpenedPack) -> None:
    stated = re.search(r"#define CUDAL2GEN_VERSION (\d+)", HEADER.read_text())
    assert stated is not None
    assert opened_pack.api.cudal2gen_version() == int(stated[1])


def test_as_in_blas_nothing_is_done_without_an_element_and_k_of_zero_gives_zeros(
    opened_pack: OpenedPack, place: Place
) -> None:
    answer = Answer()
    before = idle_runtime.cleared_bytes(place.runtime)
    for sizes in ({"m": 0}, {"n": 0}, {"m": 0, "k": 0}, {"batch": 1, "products": 0}):
        question = problem(**sizes)
        assert opened_pack.api.cudal2gen_query(opened_pack.pack, ctypes.byref(question), ctypes.byref(answer)) == 0
        assert (answer.kernel, answer.workspace_bytes) == (b"", 0)
        nothing = (None, 0) * 3
        assert opened_pack.api.cudal2gen_matmul(opened_pack.pack, ctypes.byref(question), *nothing, None, None) == 0
    assert idle_runtime.cleared_bytes(place.runtime) == before
    assert code_of(opened_pack, problem(k=0), ldd=80) == 0
    assert idle_runtime.cleared_bytes(place.runtime) == before + 64 * 64 * 2
    assert code_of(opened_pack, problem(k=0, d=1, n=3), ldd=3) == 0
    assert idle_runtime.cleared_bytes(place.runtime) == before + 64 * 64 * 2 + 64 * 3 * 4
    # 1 is an invalid argument, and -1 a product that the caller must leave to the vendor.
    assert code_of(opened_pack, problem(k=0), d=0) == 1
    assert code_of(opened_pack, problem(k=0), ldd=63) == 1
    assert code_of(opened_pack, problem(k=0, fusion=Fusion(bias=1))) == -1


def test_a_plan_computes_on_the_emulator(place: Place) -> None:
    api, handle, plan, memory = interface(place.library), ctypes.c_void_p(), ctypes.c_void_p(), emulator.Memory()
    rng, answer = np.random.default_rng(1), Answer()
    a, b = (rng.integers(-2, 3, (64, 128)).astype(np.float16) for _ in range(2))
    with emulator.session(memory, emulator.Device(capability=(8, 0), name=idle_runtime.A100)) as session:
        runtime = os.fsencode(emulator.runtime_path())
        assert api.cudal2gen_pack_open(os.fsencode(place.folder), runtime, ctypes.byref(handle)) == 0
        question = problem()
        code = api.cudal2gen_plan_create(handle, ctypes.byref(question), ctypes.byref(answer), ctypes.byref(plan))
        assert (code, answer.workspace_bytes) == (0, 0), api.cudal2gen_last_error()
        question.m = -1  # a plan has a copy of its problem
        on_device = [memory.upload(each).address for each in (a, b)]
        d = memory.upload(np.empty((64, 64), np.float16), role="output")
        arguments = (on_device[0], 128, on_device[1], 128, d.address, 64, None, None, None)
        assert api.cudal2gen_plan_run(plan, *arguments) == 0, api.cudal2gen_last_error()
        np.testing.assert_array_equal(d.download(), a @ b.T)
        assert api.cudal2gen_plan_destroy(plan) == 0
        zeros = problem(k=0)
        assert api.cudal2gen_matmul(handle, ctypes.byref(zeros), None, 0, None, 0, d.address, 64, None, None) == 0
        np.testing.assert_array_equal(d.download(), np.zeros((64, 64), np.float16))
        assert api.cudal2gen_pack_close(handle) == 0
    assert not session.errors


def test_what_is_no_longer_open_is_refused(place: Place) -> None:
    """A handle is refused if it was closed or destroyed, is of the other kind, or is the address of some other
    object."""
    api, pack_, plan, answer, asked = (
        interface(place.library),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
        Answer(),
        problem(),
    )
    paths = os.fsencode(place.folder), os.fsencode(place.runtime)
    matrices = (A, 128, B, 128, D, 64, None, 1 << 23, None)

    def codes(pack_: object, plan: object) -> list[int]:
        """The codes of a query with this pack's handle and of a run with this plan's: 0, or 1 if it is refused."""
        query = api.cudal2gen_query(pack_, ctypes.byref(asked), ctypes.byref(answer))
        return [query, api.cudal2gen_plan_run(plan, *matrices)]

    assert api.cudal2gen_pack_open(*paths, ctypes.byref(pack_)) == 0
    assert api.cudal2gen_plan_create(pack_, ctypes.byref(asked), None, ctypes.byref(plan)) == 0
    assert codes(pack_, plan) == [0, 0]
    assert codes(plan, pack_) == [1, 1]
    assert codes(ctypes.addressof(asked), ctypes.addressof(asked)) == [1, 1]
    assert [api.cudal2gen_plan_destroy(plan) for _ in range(2)] == [0, 1]
    assert codes(pack_, plan) == [0, 1]
    assert api.cudal2gen_plan_create(pack_, ctypes.byref(asked), None, ctypes.byref(plan)) == 0
    assert [api.cudal2gen_pack_close(pack_) for _ in range(2)] == [0, 1]
    assert codes(pack_, plan) == [1, 1]
    assert api.cudal2gen_pack_open(*paths, ctypes.byref(ctypes.c_void_p())) == 0
    assert codes(pack_, plan) == [1, 1], "no later pack has the handle of one that was closed"
    assert api.cudal2gen_plan_destroy(plan) == 0


@pytest.mark.parametrize(
    ("costs", "vendor", "kernel", "code"),
    [
        ((10.0, 20.0), 12.0, 0, 0),
        ((20.0, 10.0), 12.0, 1, 0),
        ((10.0, 20.0), 10.05, None, -1),
        ((10.0, 20.0), 9.0, None, -1),
        ((20.0, 10.0), None, 1, 0),
    ],
)
def test_autotuning_takes_a_kernel_that_beats_the_vendor(
    opened_pack: OpenedPack,
    place: Place,
    costs: tuple[float, float],
    vendor: float | None,
    kernel: int | None,
    code: int,
) -> None:
    """The candidates, the nearest first, are the predicated kernel and the split one, which needs a workspace.

    ``costs``: their microseconds; ``vendor``: those of the vendor's product; ``kernel``: the candidate that is taken.
    """
    plan, answer = ctypes.c_void_p(), Answer()
    assert autotune_opened_pack(opened_pack, place, costs, vendor, plan, answer) == code, (
        opened_pack.api.cudal2gen_last_error()
    )
    assert bool(plan) == (code == 0)
    if kernel is not None:
        digests = [each.digest.encode() for each in pack.open_pack(place.folder).table.kernels]
        assert answer.kernel == digests[kernel]
        assert answer.speedup == pytest.approx(vendor / costs[kernel] if vendor else 0, rel=1e-3)
        assert opened_pack.api.cudal2gen_plan_run(plan, A, 128, B, 128, D, 64, None, 1 << 23, None) == 0
        assert opened_pack.api.cudal2gen_plan_destroy(plan) == 0


def autotune_opened_pack(
    opened_pack: OpenedPack,
    place: Place,
    costs: Sequence[float],
    vendor: float | None,
    plan: ctypes.c_void_p,
    answer: Answer,
) -> int:
    """Autotunes in a pack none of whose kernels is open yet. ``costs``: microseconds of its two kernels.

    ``vendor``: those of the vendor's product; None for a call without one. Returns the code.
    """
    idle_runtime.cost(place.runtime, *costs)
    asked, call = problem(prefer=0), Call(A, 128, B, 128, D, 64, None, 1 << 23, 1 << 20, None)
    streams: list[int | None] = []

    def product(_: object, stream: int | None) -> int:
        streams.append(stream)
        idle_runtime.spend(place.runtime, vendor or 0)
        return 0

    callback = Vendor(product)
    given = ctypes.cast(callback, ctypes.c_void_p) if vendor else None
    arguments = opened_pack.pack, ctypes.byref(asked), ctypes.byref(call), given, None, 10e3
    code = opened_pack.api.cudal2gen_plan_autotune(*arguments, ctypes.byref(answer), ctypes.byref(plan))
    assert bool(streams) == (vendor is not None)
    return int(code)


@pytest.mark.torch
def test_autotuning_in_c_has_the_rule_of_python(place: Place) -> None:
    require("torch")
    from cudal2gen.operators.measuring import rule

    api, rng = interface(place.library), np.random.default_rng(3)
    for number in range(10):
        # The kernels take ``costs`` µs and the vendor exp(vendor_log) µs, which is chosen so that the expected gain
        # lies just above ``rule.GAIN``, or just below it.
        costs, accepted = 10 * np.exp(rng.normal(0, 0.06, 2)), number % 2
        kernel_logs = -np.log(costs)
        expected = float(rule.expected(kernel_logs.max(), kernel_logs))
        vendor_log = math.log1p(rule.GAIN) + (0.003 if accepted else -0.003) - expected
        assert rule.accepts(np.full(64, kernel_logs.max() + vendor_log), kernel_logs + vendor_log) == accepted
        opened_pack, plan = OpenedPack(api, ctypes.c_void_p()), ctypes.c_void_p()
        paths = os.fsencode(place.folder), os.fsencode(place.runtime)
        assert api.cudal2gen_pack_open(*paths, ctypes.byref(opened_pack.pack)) == 0
        assert autotune_opened_pack(opened_pack, place, list(costs), math.exp(vendor_log), plan, Answer()) == (
            0 if accepted else -1
        )
        assert api.cudal2gen_pack_close(opened_pack.pack) == 0
        assert api.cudal2gen_plan_destroy(plan) == 0


@pytest.mark.torch
def test_a_bound_in_c_is_that_of_python(tmp_path: Path) -> None:
    """The rank of the sample that is the median's lower bound is the same in both, for 1 to 64 pairs."""
    require("torch")
    from cudal2gen.operators.measuring import rule

    source = tmp_path / "ranks.cpp"
    source.write_text(RANKS_PROGRAM)
    command = ["g++", "-std=c++17", f"-I{HEADER.parent}", str(source), "-o", str(tmp_path / "ranks")]
    subprocess.run(command, check=True)
    ranks = subprocess.run([str(tmp_path / "ranks")], check=True, capture_output=True, text=True).stdout.split()
    assert [max(float(rank), 0) for rank in ranks] == [rule.bound_rank(pairs) for pairs in range(1, 65)]


def test_autotuning_leaves_captures_and_kernels_without_their_workspace_alone(
    opened_pack: OpenedPack, place: Place
) -> None:
    idle_runtime.cost(place.runtime, 20.0, 10.0)
    plan, answer, question = ctypes.c_void_p(), Answer(), problem()
    call = Call(A, 128, B, 128, D, 64, None, None, 0, None)

    def autotune_once() -> int:
        arguments = (
            ctypes.byref(question),
            ctypes.byref(call),
            None,
            None,
            10e3,
            ctypes.byref(answer),
            ctypes.byref(plan),
        )
        return int(opened_pack.api.cudal2gen_plan_autotune(opened_pack.pack, *arguments))

    idle_runtime.capture(place.runtime, [])
    assert autotune_once() == -1
    idle_runtime.capture(place.runtime, None)
    assert autotune_once() == 0
    assert answer.workspace_bytes == 0, "the faster kernel needs a workspace, and there is none"
    opened_pack.api.cudal2gen_plan_destroy(plan)


def fuzz(library: Path, place: Place, count: int, seed: int, **variables: str) -> dict[int, int]:
    """How often each code was returned to drawn calls. Fails if one differs from what the header says."""
    arguments = [str(library), str(place.folder), str(place.runtime), str(count), str(seed)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cudal2gen.fuzzed_c", *arguments],
        capture_output=True, text=True, check=False, env=os.environ | variables, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(code): int(times) for code, times in (pair.split(":") for pair in done.stdout.split())}


@pytest.mark.slow
def test_ten_thousand_drawn_calls_answer_by_the_header(place: Place) -> None:
    codes = fuzz(place.library, place, 10_000, seed=1)
    assert sum(codes.values()) == 10_000
    assert {0, 1, -1, -2, 716} <= codes.keys(), codes
    assert codes[0] > 2000, codes


@pytest.mark.slow
def test_drawn_calls_under_sanitisers(place: Place, tmp_path: Path) -> None:
    library = tmp_path / "libcudal2gen.so"
    sources = [str(HEADER.parent / name) for name in compiler.LAUNCHER_SOURCES if name.endswith(".cpp")]
    flags = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = f"-I{toolchain.discover().cuda_include}"
    command = [
        "g++",
        *compiler.launcher_flags(toolchain.discover()),
        *flags,
        include,
        *sources,
        "-o",
        str(library),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    codes = fuzz(library, place, 3000, seed=2, LD_PRELOAD=asan.strip(), ASAN_OPTIONS="detect_leaks=0")
    assert {0, 1, -1} <= codes.keys(), codes
