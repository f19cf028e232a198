"""Proves that ``kernelproof check`` finds the planted errors of whole programs, and reports none for right ones.

The programs in the folder ``checked`` run by their own main on the emulated device.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kernelproof.checking import compilation, devices, expectations, names, plan, supervision, text, writing
from kernelproof.checking.result import Result
from kernelproof.emulator import Frame, Participant, Report, Site
from kernelproof.emulator.host import images
from kernelproof.emulator.state.options import Device
from kernelproof.ground import toolchain
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import Failure, WrongInput
from tests import commands, processes
from tests.kernelproof.emulator import build

SOURCE = Path(__file__).parent / "checked" / "program.cu"


@pytest.fixture(scope="module")
def library() -> Path:
    """The compiled program."""
    return compilation.library([SOURCE], [], "sm_80", toolchain.discover())


def check_program(library: Path, *arguments: str, seconds: float = 60, gib: float = 4, **settings: object) -> Result:
    """The result of checking the program with these arguments, within these seconds and GiB."""
    settings = {"main": ("program", *arguments), **settings}
    return supervision.run(plan.CheckPlan("sm_80", library, **settings), "program.cu", seconds, gib)  # type: ignore[arg-type]


def rules(result: Result) -> dict[str, int]:
    """How often each rule was broken."""
    return dict(Counter({item.kind: item.count for item in result.findings.values()}))


# The cases of program.cu by its first argument: right ones; and wrong ones with the number of findings of each rule and
# the program's exit code.
RIGHT = [
    "right", "barrier", "ordered", "graph", "driver", "memory", "timed", "reset", "changed", "callback", "nodes",
    "pools", "driver nodes", "halves", "long loop", "relay", "graph memory", "parameters",
]  # fmt: skip
# Wrong cases of the program: the name, the number of findings of each kind, and the exit code.
WRONG = [
    ("bounds", {"global-out-of-bounds": 2}, 0), ("race", {"shared-race": 64}, 0), ("threads", {"launch-refused": 1}, 0),
    ("unordered", {"stream-race": 1}, 0), ("long copy", {"copy-out-of-bounds": 1}, 0), ("assert", {"trap": 24}, 0),
    ("abort", {"global-out-of-bounds": 2}, -6), ("no path", {"stream-race": 1}, 0), ("early", {"stream-race": 4}, 0),
    ("hidden", {"global-out-of-bounds": 2}, 0), ("overlap", {"stream-race": 1}, 0), ("circle", {"runaway": 1}, 0),
    ("poll", {"deadlock": 1}, 0), ("freed", {"use-after-free": 1}, 0),
    ("launched twice", {"launch-refused": 1}, 0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_have_no_findings(library: Path, case: str) -> None:
    result = check_program(library, case)
    assert (rules(result), result.ending, result.refusals, result.unsupported) == ({}, "", {}, [])
    assert (result.code, result.program_exit_code) == (0, 0)


@pytest.mark.parametrize(("case", "expected", "exit_code"), WRONG)
def test_wrong_programs_have_one_finding_of_their_rule(
    library: Path, case: str, expected: dict[str, int], exit_code: int
) -> None:
    result = check_program(library, case)
    assert rules(result).keys() == expected.keys()
    if case != "race":
        assert sum(rules(result).values()) <= sum(expected.values())
    assert (result.code, result.program_exit_code) == (1, exit_code)


@pytest.mark.slow
def test_streams_see_bulk_copies_of_kernels() -> None:
    bulk = compilation.library([SOURCE.with_name("bulk.cu")], [], "sm_90a", toolchain.discover())
    for way in ("store", "load"):
        for order, expected in (("ordered", {}), ("unordered", {"stream-race": 1})):
            program = plan.CheckPlan("sm_90a", bulk, main=("bulk", way, order))
            assert rules(supervision.run(program, "bulk.cu", 60, 4)) == expected


def test_progress_counts_ctas(library: Path) -> None:
    seen: list[tuple[int, int]] = []  # the CTAs that have ended, and those of the grid
    words = ("in:i32[999999]", "scratch:i32[999999]")
    arguments = tuple(plan.argument(word, {}) for word in words)
    spec = plan.LaunchSpec("scale", (4000,), (256,), 0, (1,), (*arguments, 999999))
    program = plan.CheckPlan("sm_80", library, launches=(spec,))
    supervision.run(program, "program.cu", 60, 4, lambda kernel, seconds, done, ctas: seen.append((done, ctas)))
    assert {ctas for _, ctas in seen} - {0} == {4000}
    assert sorted(seen) == seen


def test_a_refused_tensor_map_is_noted_once(library: Path) -> None:
    text = "cuTensorMapEncodeTiled: box extent 512 of dimension 0, allowed are 1 to 256"
    assert check_program(library, "wide box").notes.count(text) == 1


def test_a_launch_that_takes_long_says_how_long() -> None:
    # Seconds so far, CTAs that have ended, and CTAs of the grid.
    shares = [(10, 0, 64), (10, 4, 32), (10, 16, 8192), (29, 30, 16384)]
    assert [supervision.expected_time(*share) for share in shares] == [
        "", ", all of them in about 80 s", ", all of them in about 85 min", ", all of them in about 4 h"
    ]  # fmt: skip
    running = supervision._Running("_Z5scalePKiPii", "grid 16384", time.perf_counter() - 29)
    ending = supervision._launch_progress(Result("x.cu", "A100"), running, 30, 16384)
    share = r"\(30 of 16384 CTAs, all of them in about 4 h\)"
    assert re.fullmatch(rf": launch 1 of scale, grid 16384, ran for \d+ s {share}", ending)


def test_findings_have_the_programs_lines_and_names(library: Path) -> None:
    result = check_program(library, "bounds")
    number = 1 + SOURCE.read_text().splitlines().index("  if (i <= n) y[i] = x[i];")
    document = json.loads(json.dumps(result.document()))
    sides = [
        (access["home"]["line"], place["buffer"], place["index"], access["threads"])
        for access, place in ((item["access"], item["place"]) for item in document["findings"])
    ]
    assert sorted(sides) == [(number, "x", [1000], [232]), (number, "y", [1000], [232])]
    assert [(k["name"], k["launches"], k["grids"], k["ctas"]) for k in document["kernels"]] == [
        ("beyond", 1, {"4 of 256": 1}, 4)
    ]
    assert (document["schema"], document["outcome"], document["program_exit_code"]) == (1, "errors", 0)


def test_repeated_launches_on_unchanged_data_run_twice(library: Path) -> None:
    kernel = check_program(library, "timed").kernels["_Z5scalePKiPii"]
    # The first memset changes x. The launch after it is the first of 50 equal ones.
    assert (kernel.launches, kernel.repetitions) == (2, 48)


def test_launches_between_resets_run_once_per_content(library: Path) -> None:
    kernel = check_program(library, "reset").kernels["_Z5scalePKiPii"]
    assert (kernel.launches, kernel.repetitions) == (2, 18)


def test_sampled_launches_on_unchanged_data_run_twice(library: Path) -> None:
    kernel = check_program(library, "timed", sample=2).kernels["_Z5scalePKiPii"]
    assert (kernel.launches, kernel.repetitions) == (2, 48)


@pytest.mark.slow
def test_a_limit_names_the_launch(library: Path) -> None:
    result = check_program(library, "endless kernel", seconds=4)
    if "in the loop" not in result.ending:  # on a busy machine the loop had too few iterations
        result = check_program(library, "endless kernel", seconds=30)
    assert result.code == 2
    assert re.match("did not end within (4|30) s: launch 1 of waiting, grid 2, ran for ", result.ending)
    assert ", at last in the loop at " in result.ending
    assert "program.cu:29 in waiting (" in result.ending
    assert result.ending.endswith(
        "iterations and more); --timeout gives it longer, --sample N runs only N CTAs of a grid"
    )


@pytest.mark.parametrize(
    ("case", "sample", "reason"),
    [
        ("late flag", 0, "poll waits for memory that the host writes, which goes on only when the kernel has ended"),
        ("relay", 5, "relay waits for some of the 10 CTAs that are left out of 16"),
    ],
)
def test_waiting_for_what_is_not_executed_is_not_checked(library: Path, case: str, sample: int, reason: str) -> None:
    result = check_program(library, case, sample=sample)
    assert (rules(result), result.code) == ({}, 2)
    assert [text for _, text in result.refusals] == [reason]
    assert any(note.startswith(f"{reason}: ") for note in result.notes), "what it leaves unwritten is excused"


@pytest.mark.parametrize(
    ("case", "sample", "kinds", "errors"),
    [
        ("permuted", 0, set(), set()),
        ("permuted", 1, {"uninitialised-shared", "shared-race"}, set()),
        (
            "permuted, beyond",
            1,
            {"uninitialised-shared", "shared-race", "global-out-of-bounds"},
            {"global-out-of-bounds"},
        ),
    ],
)
def test_errors_that_may_follow_from_left_out_ctas_are_benign(
    library: Path, case: str, sample: int, kinds: set[str], errors: set[str]
) -> None:
    result = check_program(library, case, sample=sample)
    assert rules(result).keys() == kinds
    assert {item.kind for item in result.errors} == errors
    assert all("may follow from values" in item.message for item in result.findings.values() if not item.is_error)


def test_an_endless_loop_is_named(library: Path) -> None:
    (finding,) = check_program(library, "circle").findings.values()
    assert finding.message == "never ends: every 7 backward branches all registers and all memory are as before"
    assert finding.access.site.home is not None
    assert finding.access.site.home.function == "circle"


@pytest.mark.slow
def test_the_program_may_fail_end_late_and_take_all_memory(library: Path) -> None:
    failed = check_program(library, "exit code")
    assert (failed.code, failed.ending) == (1, "ended with exit code 3")
    late = check_program(library, "endless", seconds=2)
    assert late.code == 2
    expected = "--timeout gives it longer. It has launched no kernel: --nvcc-args -O2 makes its own code faster"
    assert late.ending == f"did not end within 2 s; {expected}"
    greedy = check_program(library, "greedy", gib=0.75)
    assert greedy.code == 2
    assert greedy.ending.startswith("needs more than 0.75 GiB")
    assert 1.0 < late.seconds < 120


@pytest.mark.slow
def test_the_limit_of_memory_is_of_all_processes_that_a_program_starts(library: Path) -> None:
    with processes.use_memory(1.0):  # the limit of this process; a program does not count memory that it inherits
        greedy = check_program(library, "greedy family", gib=0.75)
        # Memory that processes share counts once.
        family = check_program(library, "family", gib=0.75)
    assert greedy.ending.startswith("needs more than 0.75 GiB")
    assert greedy.seconds < 120
    assert (family.ending, family.program_exit_code) == ("", 0)


def test_what_cannot_be_checked_is_named(library: Path) -> None:
    result = check_program(library, "unsupported")
    assert (result.unsupported, result.code) == (["cudaCreateTextureObject"], 0)
    boxes = check_program(library, "boxes")
    assert (boxes.unsupported, rules(boxes), boxes.program_exit_code) == (["cudaMallocArray"], {}, 0)


def test_launches_are_described_in_a_file(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "launches.json"
    launch = {"entry": "beyond", "grid": 4, "block": 256, "args": ["in:i32[1000]", "y", 999]}
    file.write_text(json.dumps({"buffers": {"y": "out:i32[1000]"}, "launches": [launch]}))
    launches, buffers = plan.launch_file(file)
    right = check_program(library, main=None, launches=launches, buffers=buffers)
    assert (rules(right), right.code) == ({}, 0)
    launch["args"] = ["in:i32[1000]", "y", 900]
    file.write_text(json.dumps({"buffers": {"y": "out:i32[1000]"}, "launches": [launch]}))
    launches, buffers = plan.launch_file(file)
    assert rules(check_program(library, main=None, launches=launches, buffers=buffers)) == {"unwritten-output": 99}
    for wrong in (
        {"entry": "nothing"},
        {"args": ["in:i32[1000]"]},
        {"args": ["what", 1, 2]},
        {"args": ["in:i32[1000]", "in:i32[1000]", 2.5]},
        {"args": ["in:i32[1000]", "in:i32[1000]", 1 << 32]},
        {"grid": -1},
    ):
        file.write_text(json.dumps({"launches": [{**launch, **wrong}]}))
        with pytest.raises(WrongInput):
            check_program(library, main=None, launches=plan.launch_file(file)[0])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(WrongInput, match="no UTF-8 text"):
        plan.launch_file(file)


def test_missing_arguments_are_told_with_an_example_that_runs(library: Path) -> None:
    spec = plan.LaunchSpec("scale", (4,), (32,))
    with pytest.raises(WrongInput) as error:
        check_program(library, main=None, launches=(spec,))
    (words,) = re.findall(r'--args "(.*)"', str(error.value))
    arguments = tuple(plan.argument(word, {}) for word in words.split())
    assert [getattr(each, "role", each) for each in arguments] == ["input", "inout", 1000]
    assert check_program(library, main=None, launches=(replace(spec, arguments=arguments),)).code == 0


def test_a_sample_runs_the_corners(library: Path) -> None:
    spec = plan.LaunchSpec(
        "scale", (40, 10), (32,), 0, (1,), (plan.argument("in:i32[99]", {}), plan.argument("scratch:i32[99]", {}), 99)
    )
    result = check_program(library, main=None, launches=(spec,), sample=8)
    assert 8 <= result.kernels["_Z5scalePKiPii"].ctas <= 12


def test_a_cooperative_grid_runs_whole(library: Path) -> None:
    result = check_program(library, "cooperative", sample=2)
    assert (rules(result), [kernel.ctas for kernel in result.kernels.values()]) == ({}, [8])


def test_what_left_out_ctas_would_write_counts_as_initialised(library: Path) -> None:
    result = check_program(library, "chain", sample=2)
    (kernel,) = result.kernels.values()
    assert (rules(result), kernel.launches) == ({}, 2)
    assert kernel.ctas < 12


def test_expected_findings_do_not_count(library: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected"
    file.write_text("# a list\nglobal-out-of-bounds beyond program.cu\nshared-race *\n")
    result = check_program(library, "bounds")
    expectations.apply(result, expectations.read(file))
    assert (result.code, len(result.expected)) == (0, 2)
    assert "expected and not seen: shared-race *" in result.notes
    file.write_text("no-such-rule\n")
    with pytest.raises(WrongInput, match="expected:1"):
        expectations.read(file)


def test_headers_between_two_lines_of_a_program_take_one_line() -> None:
    headers = (Frame("/x/include/cute/arch/copy.hpp", 59, "copy"), Frame("/x/include/cute/atom/copy_atom.hpp", 103))
    site = Site(5, "st.shared", (*headers, Frame("tile.cuh", 3, "store"), Frame("a.cu", 9, "k")))
    printed = text.finding(Report("shared-race", "text", "k", Participant(site), None, None)).splitlines()
    assert printed[0] == "error: shared-race in k at tile.cuh:3: text"
    assert printed[1:3] == ["    by way of copy_atom.hpp:103 > copy.hpp:59", "    by way of a.cu:9 in k"]


def test_other_programs_read_findings(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check_program(library, "bounds")
    monkeypatch.chdir(tmp_path)
    writing.sarif(result, tmp_path / "s.json")
    (sarif,) = json.loads((tmp_path / "s.json").read_text())["runs"]
    assert [item["ruleId"] for item in sarif["results"]] == ["global-out-of-bounds"] * 2
    uri = sarif["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == str(SOURCE)
    writing.page(result, tmp_path / "p.html")
    assert "if (i &lt;= n) y[i] = x[i];" in (tmp_path / "p.html").read_text()
    assert all(line.startswith(f"::error file={SOURCE},line=") for line in writing.github(result))
    # If it runs in the repository, paths are relative to the repository. Programs of one upload differ in their
    # category.
    monkeypatch.chdir(SOURCE.parents[1])
    writing.sarif(result, tmp_path / "s.json")
    (sarif,) = json.loads((tmp_path / "s.json").read_text())["runs"]
    location = sarif["results"][0]["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "checked/program.cu"
    assert sarif["automationDetails"]["id"] == "kernelproof/program.cu/"
    assert all(line.startswith("::error file=checked/program.cu,line=") for line in writing.github(result))
    assert all(" at checked/program.cu:" in text.finding(item) for item in result.ordered)


@pytest.mark.slow
def test_kernels_compile_without_their_host_code(library: Path, tmp_path: Path) -> None:
    source = tmp_path / "x.cu"
    source.write_text("#error\n")
    with pytest.raises(Failure, match="#error"):
        compilation.ptx(source, [], "sm_80", toolchain.discover())
    source.write_text('#include "n.h"\n__global__ void f(int *x) { *x = n; }\nint main() { return missing(); }\n')
    (tmp_path / "n.h").write_text("const int n = 5;\nint missing();\n")
    first = compilation.ptx(source, ["-DN"], "sm_80", toolchain.discover())
    assert ".entry _Z1fPi" in first.read_text()
    assert compilation.ptx(source, ["-DN"], "sm_80", toolchain.discover()) == first
    (tmp_path / "n.h").write_text("const int n = 6;\nint missing();\n")
    assert compilation.ptx(source, ["-DN"], "sm_80", toolchain.discover()) != first


# A program whose kernel does nothing.
EMPTY = "__global__ void k() {} int main() { k<<<1, 1>>>(); }"


@pytest.mark.slow
def test_a_library_with_the_static_runtime_is_refused() -> None:
    target = build.compile_library(EMPTY, "-cudart", "static")
    with pytest.raises(WrongInput, match="static CUDA runtime"):
        check_program(target)


OLD_RUNTIME = "libcudart.so.9.9"  # no machine with CUDA 13 has it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "libraries", "replaced"),
    [
        (["-lno_such_library"], ("no_such_library",), ()),
        (["-Xlinker", f"-l:{OLD_RUNTIME}", "-lnone"], (OLD_RUNTIME, "none"), (OLD_RUNTIME,)),
    ],
)
def test_libraries_without_a_file_are_named(
    arguments: list[str], libraries: tuple[str, ...], replaced: tuple[str, ...]
) -> None:
    source = build.stable_file("int main() {}")
    with pytest.raises(compilation.MissingLibraries) as raised:
        compilation.library([source], arguments, "sm_80", toolchain.discover())
    assert (sorted(raised.value.libraries), raised.value.replaced) == (sorted(libraries), replaced)


@pytest.mark.parametrize("name", ["cuda", "cudart", "cudart_static", "cudadevrt", "libcudart_static.a"])
def test_libraries_that_a_check_replaces_are_told_from_others(name: str) -> None:
    assert compilation.MissingLibraries([name, f"{name}_other"], Path()).replaced == (name,)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["size", "speed", "none"])
def test_a_librarys_ptx_may_be_compressed(mode: str) -> None:
    result = check_program(
        build.compile_library(EMPTY, "-cudart", "none", f"--compress-mode={mode}", "-arch=compute_80")
    )
    assert (result.code, result.refusals, [kernel.launches for kernel in result.kernels.values()]) == (0, {}, [1])


@pytest.mark.slow
def test_what_the_system_cannot_decompress_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_LIBRARIES", {0x8000: "no_such_library.so.1"})
    result = check_program(build.compile_library(EMPTY, "-cudart", "none", "--compress-mode=size", "-arch=compute_80"))
    ((_, text),) = result.refusals
    assert (result.code, "the system lacks no_such_library.so.1" in text) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--no-compress", "-gencode", "arch=compute_90,code=sm_90"), "no PTX, only machine code"),
        (("--no-compress", "-arch=compute_90"), "PTX of sm_90, and the device is sm_80"),
    ],
)
def test_a_library_without_usable_ptx_is_no_finding(options: tuple[str, ...], reason: str) -> None:
    result = check_program(build.compile_library(EMPTY, "-cudart", "none", *options))
    assert (result.code, rules(result)) == (2, {})
    ((_, text),) = result.refusals
    assert reason in text


@pytest.mark.parametrize(
    ("targets", "gpu", "chosen"),
    [
        (("sm_90", "sm_100", "sm_80"), "b200", "sm_100"),
        (("sm_100", "sm_100a", "sm_100f"), "b200", "sm_100a"),
        (("sm_90", "sm_100", "sm_80"), "h200", "sm_90"),
    ],
)
def test_a_device_loads_the_newest_ptx_that_it_can_run(
    targets: tuple[str, ...], gpu: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f".version 9.0\n.target {target}\n.visible .entry k()\n{{\n  ret;\n}}\n" for target in targets]
    parts = [images.ImageEntry(True, 0, text.encode()) for text in texts]
    monkeypatch.setattr(images, "entries", lambda _: parts)
    assert images.program_of(0, Device.of(GPUS[gpu])).module.target == chosen


@pytest.mark.slow
def test_a_library_without_ptx_runs_by_its_machine_code() -> None:
    result = check_program(build.compile_library(EMPTY, "-cudart", "none", "-gencode", "arch=compute_80,code=sm_80"))
    assert (result.code, result.refusals, [kernel.launches for kernel in result.kernels.values()]) == (0, {}, [1])


def test_names_are_short_where_they_are_unambiguous() -> None:
    mangled = ["_Z5scalePKiPii", "_Z3addIfEvPT_", "_Z3addIiEvPT_", "plain"]
    assert list(names.short_names(mangled).values()) == ["scale", "add<float>", "add<int>", "plain"]
    assert names.resolved("add<int>", mangled) == "_Z3addIiEvPT_"
    assert list(names.fitted(names.short_names(mangled), 8).values()) == ["scale", "add<...> #1", "add<int>", "plain"]
    # A template argument may be a value: void sort<(Order)0, int>(int*).
    assert names.qualified("_Z4sortIL5Order0EiEvPT0_") == "sort<(Order)0, int>"
    assert names.plain("_Z4sortIL5Order0EiEvPT0_") == "sort"
    assert names.plain("__nv_static_26__7bbe168e_5_d2_cu_802c4e23__Z1kPf") == "k"
    beyond_libstdc = "_Z4gemmI1SN4cute9MMA_AtomsIJNS1_1XIfLNS1_5MajorE0EEEEEEEvT0_T9_"
    assert names.demangled(beyond_libstdc) == beyond_libstdc
    assert names.plain(beyond_libstdc) == "gemm"
    with pytest.raises(WrongInput, match="ambiguous"):
        names.resolved("add", mangled)
    with pytest.raises(WrongInput, match="explicit instantiation"):
        names.resolved("add<int>", [])


def test_architecture_comes_from_the_compilers_arguments() -> None:
    assert compilation.split_arguments("-O2 -arch=sm_90a -lcuda -Ix") == (["-O2", "-Ix"], "sm_90a")
    assert compilation.split_arguments("-gencode arch=compute_86,code=sm_86") == ([], "sm_86")
    assert (devices.nearest("sm_90a"), devices.nearest("sm_75"), devices.target("h200")) == ("sm_90", "sm_80", "sm_90a")
    for words in ("-dc", "-rdc true", "--relocatable-device-code=true -dlto"):
        assert compilation.split_arguments(f"{words} -Ix") == (["-rdc=true", "-Ix"], None)


def check_two_files(*flags: str) -> Result:
    """The result of checking a program of two files with relocatable device code."""
    sources = [SOURCE.with_name(name) for name in ("linked.cu", "linked_other.cu")]
    library = compilation.library(sources, ["-rdc=true", *flags], "sm_80", toolchain.discover())
    return check_program(library)


@pytest.mark.slow
def test_device_code_of_several_files_is_linked() -> None:
    """main compares values from functions and variables of both files. Names that are local to a file are not mixed up,
    and a template in both files is one."""
    result = check_two_files()
    assert (rules(result), result.refusals, result.program_exit_code) == ({"global-out-of-bounds": 1}, {}, 0)
    (finding,) = result.findings.values()
    assert names.plain(finding.kernel) == "beyond"
    assert finding.access.site.home is not None
    assert Path(finding.access.site.home.file).name == "linked_other.cu"
    assert {names.plain(name): kernel.launches for name, kernel in result.kernels.items()} == {"sum": 1, "beyond": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "reason", "kernels"),
    [("-DNO_VARIABLE", "no file defines the variable factor", 0), ("-DNO_FUNCTION", "no file defines scaled", 1)],
)
def test_device_code_that_no_file_defines_is_named(flag: str, reason: str, kernels: int) -> None:
    result = check_two_files(flag)
    assert result.refusals
    assert all(reason in text for _, text in result.refusals)
    assert (result.code, result.ending, len(result.kernels)) == (2 - kernels, "ended with exit code 1", kernels)


@pytest.mark.slow
def test_a_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    source = tmp_path / "x.cu"
    source.write_text("int main() { return nothing; }")
    with pytest.raises(Failure, match="nothing"):
        compilation.library([source], [], "sm_80", toolchain.discover())


@pytest.mark.slow
def test_exit_runs_the_programs_handlers_and_no_others() -> None:
    """A handler of the checking process, such as Ray's, might wait for a thread that does not exist after a fork."""
    source = build.stable_file(
        "#include <cstdio>\n#include <cstdlib>\n#include <iostream>\n"
        'struct Static { ~Static() { std::cout << "static\\n"; printf("the end"); } } object;\n'
        "int main(int count, char **) {\n  std::ios::sync_with_stdio(false);\n"
        '  atexit([] { std::cout << "handler, "; });\n  if (count > 1) exit(3);\n  return 4;\n}\n'
    )
    program = (
        "import ctypes, os, sys; from pathlib import Path; from kernelproof.ground import toolchain\n"
        "from kernelproof.checking import compilation, plan, supervision\n"
        "libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.pause, None, None)\n"
        f"library = compilation.library([Path({str(source)!r})], [], 'sm_80', toolchain.discover())\n"
        "check = plan.CheckPlan('sm_80', library, main=('x', *sys.argv[1:]))\n"
        "result = supervision.run(check, 'x.cu', 60, 4); print(f': {result.ending}', flush=True); os._exit(0)"
    )
    for words, code in ([], 4), (["early"], 3):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False, timeout=600
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(done.stdout) == sorted(f"handler, static\nthe end: ended with exit code {code}\n")


@pytest.mark.slow
def test_kernels_in_a_cpp_file_compile_as_cuda() -> None:
    source = build.stable_file(EMPTY, "x.cpp")
    with pytest.raises(Failure, match='--nvcc-args "-x cu"'):
        compilation.library([source], [], "sm_80", toolchain.discover())
    result = check_program(compilation.library([source], ["-x", "cu"], "sm_80", toolchain.discover()))
    assert (result.code, [kernel.launches for kernel in result.kernels.values()]) == (0, [1])


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``kernelproof check`` with these words."""
    return commands.run("check", *words, program="kernelproof")


@pytest.mark.slow
def test_the_command_prints_in_order_and_exits_by_outcome() -> None:
    done = command(str(SOURCE), "--", "printf")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines, _, _, _, last = done.stdout.splitlines()
    assert first == "case printf"
    assert lines == ["warp 0 of block:  2.50 5 -5%", "warp 1 of block:  2.50 5 -5%"]
    assert last.startswith("1 launch of 1 kernel on an emulated A100")
    wrong = command(str(SOURCE), "--json", "--", "race")
    assert wrong.returncode == 1
    assert [item["rule"] for item in json.loads(wrong.stdout)["findings"]] == ["shared-race"]
    assert "case race" in wrong.stderr
    text = command(str(SOURCE), "--", "bounds").stdout.splitlines()
    assert text[0] == "case bounds"  # the program leaves by exit()
    file = SOURCE.relative_to(Path.cwd()) if SOURCE.is_relative_to(Path.cwd()) else SOURCE
    assert text[1].startswith(f"error: global-out-of-bounds in beyond at {file}:")
    assert text[-1].endswith(": 2 errors")
    refused = command(str(SOURCE), "missing.cu")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "missing.cu: no such file" in refused.stderr


@pytest.mark.slow
def test_ptx_for_a_newer_device_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.ptx"
    file.write_text(".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }\n")
    refused = command(str(file), "--launch", "k", "--gpu", "sm_80")
    assert refused.returncode == 2
    assert "the PTX is for sm_90a alone, the device is sm_80" in refused.stderr
    assert command(str(file), "--launch", "k").returncode == 0
