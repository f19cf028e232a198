"""Proves that no text of a client or a graded source reaches a shell, a file or a secret through arguments, names or
includes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproof.checking import compilation, execution, plan, supervision
from kernelproof.checking.result import NOT_CHECKED, Result
from kernelproof.ground import toolchain
from kernelproof.ground.errors import WrongInput
from kernelproof.mcp_server.requests import Request

# A kernel that does nothing.
KERNEL = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 x) { ret; }\n"
# Every character that a POSIX shell interprets, either alone or at the beginning of an operator.
METACHARACTERS = [*"`$\\\"'|&;<>(){}[]*?!~#^ \t\n\r\x7f", "$(", "&&", "||", ">>", "<<<", "\\\n", "';", '";', "${IFS}"]
# Arguments of nvcc, each with a {} for an attacker's text.
DOORS = [
    "-DX={}", "-DX{}", "-D{}", "-UX{}", "-I{}", "-isystem={}", "-isystem {}", "-Xcompiler {}", "-Xcompiler=-DX={}",
    "-Xcompiler -DX={}", "-Xcompiler -I{}", "-Xlinker {}", "-l{}", "-L{}", "-std=c++17{}", "-O2{}", "-D A{}",
    "-include {}", "--maxrregcount=80{}", "-DA -DX={}", "-Ia -DX={}", "-x {}", "-ccbin={}", "{}",
]  # fmt: skip


def injection_texts(metacharacter: str, file: Path) -> list[str]:
    """Texts that create a file if a shell interprets them, with this character before or around the command."""
    touch = f"touch {file}"
    ends = {"$(": ")", "`": "`", "(": ")", "{": "; }", "'": ";'", '"': ';"'}
    return [
        f"{metacharacter}{touch}{ends.get(metacharacter, '')}", f"a{metacharacter}{touch}{metacharacter}",
        f"a;{metacharacter}{touch};", f'"{metacharacter};{touch};"', f"a{metacharacter}\n{touch}\n",
    ]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("metacharacter", METACHARACTERS, ids=ascii)
def test_no_metacharacter_of_an_argument_reaches_nvccs_shell(metacharacter: str, tmp_path: Path) -> None:
    """Accepted arguments are passed to nvcc, whose shell would execute injected commands."""
    source, planted = tmp_path / "x.cpp", tmp_path / "planted"
    source.write_text("int x;\n")
    for door in DOORS:
        for text in injection_texts(metacharacter, planted):
            words = [word.replace("{}", text) for word in door.split(" ")]
            try:
                command = toolchain.nvcc_command(toolchain.discover().nvcc, ["-E", *words], [source], tmp_path / "out")
            except WrongInput:
                continue
            subprocess.run(command, capture_output=True, check=False, env=toolchain.environment(), cwd=tmp_path)
            assert not planted.exists(), words


def test_definitions_keep_their_values() -> None:
    values = ["-DX=a b", "-DF(x)=(x)*(x)", '-DS="a;b"', "-DOP=<<", "-DT=float *", "-DC='c'", "-Ia folder/(1)"]
    for before in ([], ["-O2"], ["-DA"], ["-Xcompiler", "-O2"], ["-std=c++17"], ["--maxrregcount=80"]):
        for value in values:
            assert toolchain.unread_by_shells([*before, value]) == [*before, value]


@pytest.mark.parametrize("character", METACHARACTERS, ids=ascii)
def test_file_names_reach_no_shell(character: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    for name in (f"a{character}touch planted{character}b.cpp", f"{character}touch planted;.cpp"):
        source = tmp_path / name
        source.write_text("int x;\n")
        target = source.with_suffix(".out")
        for files in ([source], [tmp_path / "plain.cpp", source]):
            try:
                command = toolchain.nvcc_command(toolchain.discover().nvcc, ["-E"], files, target)
            except WrongInput:
                continue
            subprocess.run(command, capture_output=True, check=False, env=toolchain.environment(), cwd=tmp_path)
    assert not planted.exists()


def test_unguarded_words_do_reach_nvccs_shell(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    source, planted = tmp_path / "x.cpp", tmp_path / "planted"
    source.write_text("int x;\n")
    for word in (
        f"-DX=`touch {planted}`",
        f"-UX$(touch {planted})",
        f"-I\\;touch {planted};\\",
        f"-Xcompiler=;touch {planted};",
    ):
        command = [toolchain.discover().nvcc, "-E", word, source, "-o", tmp_path / "out"]
        subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
        if "\\" not in word:
            assert planted.exists(), word
            planted.unlink()


@pytest.mark.parametrize(
    "words", ["-UX$(touch F)", "-DX=`touch F`", "-Ia`touch F`", "-DX=$F", "-DX=a\\b", "-Ia,/etc", "-Ia\\", "-DX=a\nb"]
)
def test_a_request_with_words_for_a_shell_is_refused(words: str) -> None:
    launch = plan.LaunchEntry(entry="k", block=1)
    request = Request(launches=[launch], nvcc_args=f"'{words}'", seconds=1, gib=1, roots=[Path.cwd()])
    with pytest.raises(WrongInput, match=r"argument|nvcc_args|not below|cannot read"):
        request.options()


def launch_nothing(argument: str = "5", **settings: object) -> Result:
    """A launch of a kernel that does nothing."""
    path = compilation.text_file(KERNEL, ".ptx")
    spec = plan.LaunchSpec("k", (1,), (1,), arguments=(plan.argument(argument, {}),))
    return supervision.run(plan.CheckPlan("sm_80", kernels=(path,), launches=(spec,), **settings), "k", 20, 2)  # type: ignore[arg-type]


def test_a_launch_that_ends_is_clean() -> None:
    result = launch_nothing("out:f32[0]")
    assert (result.code, [kernel.launches for kernel in result.kernels.values()]) == (0, [1])


@pytest.mark.parametrize(
    "buffer",
    ["out:f32[100000000000]", "in:f64[100000000000]", "out:u8[99999999999999999999]", "in:f32[9999999999]=iota"],
)
def test_a_buffer_beyond_memory_is_not_checked(buffer: str) -> None:
    result = launch_nothing(buffer)
    assert (result.code, result.kernels) == (NOT_CHECKED, {})
    assert result.document()["outcome"] == "not checked"
    assert result.document()["not_checked"]


def _raise(error: BaseException) -> Callable[..., None]:
    """A function that raises an error whatever its arguments are."""

    def raise_os_error(*_: object) -> None:
        raise error

    return raise_os_error


def _end(call: Callable[[], object]) -> Callable[..., None]:
    """A function that makes a call whatever its arguments are."""
    return lambda *_: (call(), None)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        _raise(MemoryError()), _raise(RecursionError()), _raise(KeyError("x")), _raise(SystemExit(0)),
        _raise(SystemExit(3)), _raise(KeyboardInterrupt()), _raise(GeneratorExit()),
        _end(lambda: os._exit(0)), _end(lambda: os._exit(1)),
        _end(lambda: os.kill(os.getpid(), signal.SIGKILL)), _end(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        _end(lambda: os.kill(os.getpid(), signal.SIGXCPU)), _end(lambda: ctypes.CDLL(None).exit(0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["_launch_all", "CheckHooks", "load"])
def test_a_process_that_ends_without_an_answer_is_not_checked(
    end: Callable[..., None], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, place, end)
    result = launch_nothing()
    assert (result.code, result.kernels) == (NOT_CHECKED, {})
    assert result.document()["not_checked"]


def test_a_process_that_ends_within_a_launch_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution.Repetitions, "observed", _end(lambda: os._exit(0)))
    result = launch_nothing()
    assert (result.code, list(result.refusals)) == (
        NOT_CHECKED, [("k", "the process of the check ended with exit code 0 within a launch of k")],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "code", "within", "outcome"),
    [
        ("main", 0, False, 0), ("main", 3, False, 1), ("main", -6, False, 1), ("main", -9, False, 2),
        ("main", -15, False, 2), ("main", None, False, 2), ("main", 0, True, 2), ("main", 3, True, 2),
        ("", 0, False, 2), ("", 1, False, 2),
        ("complete", 0, False, 0), ("complete", 1, False, 2), ("complete", -9, False, 2), ("complete", None, False, 2),
    ],
)  # fmt: skip
def test_only_a_programs_own_end_is_an_answer(stage: str, code: int | None, within: bool, outcome: int) -> None:
    result = Result("x", "A100")
    running = supervision._Running("k", "grid 1", 0.0) if within else None
    supervision._add_ending(result, code, stage, running)
    assert result.code == outcome
