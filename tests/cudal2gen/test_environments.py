"""Proves that each verb works with unusable folders, streams or variables, or fails in one line with the right code."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from cudal2gen import cli, places
from cudal2gen.generation import compiler
from kernelproof import cli as prover
from kernelproof.ground import places as ground
from kernelproof.ground import toolchain
from kernelproof.ground.command_line import messages
from tests.commands import run
from tests.cudal2gen.paths import small
from tests.packages import require

BUILT_AHEAD = [small(m=64, n=64, k=64)]
NOWHERE = Path("/proc/none")  # no folder can be created there
# Variables that name folders which cannot be created, and messages about them.
UNWRITABLE_FOLDERS = {
    name: f"{NOWHERE}/{name}"
    for name in ("KERNELPROOF_CACHE_DIR", "CUDAL2GEN_RESULTS", "CUDAL2GEN_BUILD_DIR", "CUDAL2GEN_CACHE_DIR")
}
BUILD_FOLDER_ERROR = (
    f"cannot write to {UNWRITABLE_FOLDERS['CUDAL2GEN_BUILD_DIR']}: "
    "No such file or directory; choose another folder with "
)
REMEDY = (
    f"{NOWHERE}: No such file or directory; name another place by KERNELPROOF_CACHE_DIR, "
    "CUDAL2GEN_RESULTS, CUDAL2GEN_BUILD_DIR, CUDAL2GEN_CACHE_DIR"
)


class Outcome(NamedTuple):
    """Arguments after a verb, its exit code, and the start of its error, "" for none."""

    arguments: str
    code: int
    error: str = ""


# By verb: how it ends with these variables.
SIZE = "--mnk 64_64_64"
OUTCOMES = {
    "list": Outcome("--where structure=exact", 0),
    "show": Outcome(SIZE, 0),
    "render": Outcome(SIZE, 0),
    "edit": Outcome(f"{SIZE} --set bm=48", 2, "bm=48: does not divide m=64"),
    "build": Outcome(SIZE, 1, BUILD_FOLDER_ERROR),
    "run": Outcome(SIZE, 1, BUILD_FOLDER_ERROR),
    "validate": Outcome(SIZE, 1, BUILD_FOLDER_ERROR),
    "prove": Outcome(SIZE, 1, BUILD_FOLDER_ERROR),
    "recheck": Outcome("{folder}/none.json", 2, "cannot read "),
    "try": Outcome("--mnk 64_64_256 --set stages=2", 1, BUILD_FOLDER_ERROR),
    "bench": Outcome(f"{SIZE} --gpu any:99", 3, "torch sees no CUDA device"),
    "report": Outcome("{folder}/none.jsonl", 2, "no results file at "),
    "contribute": Outcome("", 2, "no measurements to contribute"),
    "profile": Outcome(SIZE, 1, BUILD_FOLDER_ERROR),
    "tune": Outcome(f"{SIZE} --environment model --proposers random --evaluations 2", 1, REMEDY),
    "write": Outcome(SIZE, 2, "a language model needs --llm NAME@URL"),
    "compare": Outcome("--recordings {folder}/none", 2, "{folder}/none: "),
    "export": Outcome("--out {folder}/data", 2, "no transcript "),
    "explain": Outcome(SIZE, 0),
    "tune-model": Outcome("{folder}/none.py", 2, "no file "),
    "pack": Outcome(f"{SIZE} --acc f16 --layout tn --out {{folder}}/pack", 1, BUILD_FOLDER_ERROR),
    "model": Outcome("{folder}/none", 2, "{folder}/none: "),
    "doctor": Outcome("", 3),
}
PROVER_OUTCOMES = {
    "check": Outcome("{folder}/program.cu", 1, f"{NOWHERE}: No such file or directory; name another place by "),
    "grade": Outcome("{folder}/none.py", 2, "cannot read "),
    "prove": Outcome("{folder}/none.ptx --contract {folder}/none.toml", 2, "cannot read "),
    "recheck": Outcome("{folder}/none.json {folder}/none.ptx", 2, "cannot read "),
    "profile": Outcome("{folder}/none.cubin", 2, "no file at "),
    "mcp": Outcome("--skill", 0),
}


VERBS = {"cudal2gen": OUTCOMES, "kernelproof": PROVER_OUTCOMES}


def test_every_verb_is_here() -> None:
    assert {command.name for command in cli.app.registered_commands} == set(OUTCOMES)
    assert {command.name for command in prover.app.registered_commands} == set(PROVER_OUTCOMES)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "verb"), [(program, verb) for program, verbs in VERBS.items() for verb in verbs])
def test_folders_that_cannot_be_written_are_named_with_what_moves_them(program: str, verb: str, tmp_path: Path) -> None:
    if verb in ("bench", "tune-model"):
        require("torch")
    (tmp_path / "program.cu").write_text("int main() { return 0; }\n")
    arguments, code, error = (
        part.format(folder=tmp_path) if isinstance(part, str) else part for part in VERBS[program][verb]
    )
    done = run(verb, *str(arguments).split(), env=UNWRITABLE_FOLDERS, program=program)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert done.returncode == code, done
    assert len(errors) == (1 if error else 0), done.stderr
    assert all(line.startswith(f"error: {error}") for line in errors), done.stderr
    assert bool(done.stdout) == (code == 0 or verb == "doctor"), done


def test_a_cache_that_cannot_be_written_has_one_remedy() -> None:
    compiler.build(BUILT_AHEAD)
    done = run("run", *SIZE.split(), env={"KERNELPROOF_CACHE_DIR": str(NOWHERE)})
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    reason = "No such file or directory; name another place by KERNELPROOF_CACHE_DIR"
    assert (done.returncode, errors) == (1, [f"error: {NOWHERE}/emulator: {reason}"])


def shell(script: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a bash script in which ``$CUDAL2GEN`` is the command line of cudal2gen."""
    env = os.environ | {"CUDAL2GEN": f"{sys.executable} -m cudal2gen"} | (variables or {})
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_messages_do_not_go_to_standard_output_when_standard_error_is_closed() -> None:
    done = shell("$CUDAL2GEN render --mnk 64_64 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_without_standard_input_and_error_kernels_are_built() -> None:
    done = shell("$CUDAL2GEN build --mnk 64_64_64 <&- 2>&-")
    assert (done.returncode, done.stdout.count("registers")) == (0, 1)


# A verb that flushes its output, so that a full device is noticed before the end. Python flushes once more when it
# ends.
FLUSHING_PROGRAM = """
from cudal2gen.cli import app, main
app.command("flushed")(lambda: print("result", flush=True))
main()
"""


def test_a_full_output_is_reported_once() -> None:
    command = [sys.executable, "-c", FLUSHING_PROGRAM, "flushed"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (1, "error: output: No space left on device\n")


@pytest.mark.slow
def test_an_early_reader_ends_the_program_as_a_signal_would() -> None:
    done = shell("$CUDAL2GEN list | head -c 1; echo ${PIPESTATUS[0]}")
    assert (done.stdout[1:], done.stderr) == ("141\n", "")


# A verb that writes to a closed socket, reads a UTF-8 file of the package, and prints a character that is not ASCII. It
# runs in an ASCII locale.
ASCII_LOCALE_PROGRAM = """
import socket
from cudal2gen import places
from cudal2gen.cli import app, main

@app.command("strange")
def strange():
    near, far = socket.socketpair()
    far.close()
    try:
        near.send(b"question")
    except BrokenPipeError:
        print("hung up")
    print(len((places.shipped("templates") / "report" / "script.js").read_text()), "\\u00b5s")

main()
"""


def test_a_closed_socket_does_not_end_the_program_and_files_are_read_as_utf_8() -> None:
    command = [sys.executable, "-c", ASCII_LOCALE_PROGRAM, "strange"]
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    text = (places.shipped("templates") / "report" / "script.js").read_text(encoding="utf-8")
    assert not text.isascii()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hung up\n{len(text)} \\xb5s\n", "")


# A program that gets a signal while it imports the catalog.
INTERRUPTED_PROGRAM = """
import os, signal, sys

class Import:
    def find_spec(self, name, path=None, target=None):
        if name == "cudal2gen.generation.catalog":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Import())
from cudal2gen.__main__ import main
main()
"""


def test_ctrl_c_during_the_imports_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_command_is_the_module(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {name: f"{name}.__main__:main" for name in ("cudal2gen", "kernelproof")}


def test_a_user_without_a_home_has_caches_that_nobody_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "CUDAL2GEN_CACHE_DIR", "KERNELPROOF_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", raise_unknown)
    assert places.user_cache() == Path("/~/.cache/cudal2gen")
    assert ground.user_cache() == Path("/~/.cache/kernelproof")
    assert places.user_data() == Path("/~/.local/share/cudal2gen")


def test_a_removed_current_folder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    try:
        Path.cwd()
    except OSError as failure:
        code = messages.report(failure)
    assert (code, capsys.readouterr().err) == (1, "error: the current folder was removed; change to another one\n")


@pytest.mark.slow
def test_compilers_get_a_temporary_folder_that_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", f"{NOWHERE}/tmp")
    assert Path(toolchain.environment()["TMPDIR"]).is_dir()
    assert compiler.build(BUILT_AHEAD)[0].cubin.is_file()
    done = run("--build-dir", str(tmp_path), "build", "--mnk", "64_64_64", env={"TMPDIR": f"{NOWHERE}/tmp"})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("character", ['"', "$", "`"])
def test_paths_that_nvccs_shell_would_read_are_refused_by_name(character: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a{character}b"
    folder.mkdir()
    for source in (tmp_path / "program.cu", folder / "program.cu"):
        source.write_text("int main() { return 0; }\n")
    refused = f"nvcc's shell does not take the {character} of this path as it is"
    done = run("check", str(folder / "program.cu"), program="kernelproof")
    assert done.stderr == f"error: {folder}/program.cu: {refused}; rename the folder or the file\n"
    variables = {"KERNELPROOF_CACHE_DIR": str(folder)}
    done = run("check", str(tmp_path / "program.cu"), env=variables, program="kernelproof")
    remedy = "name another folder by KERNELPROOF_CACHE_DIR"
    assert (done.returncode, done.stderr) == (2, f"error: {folder}/check: {refused}; {remedy}\n")
    done = run("build", "--mnk", "64_64_64", "--nvcc", str(folder / "nvcc"))
    assert (done.returncode, done.stderr.partition("; ")[0]) == (3, f"error: {folder}/nvcc: {refused}: move it")


@pytest.mark.thorough
@pytest.mark.slow
def test_programs_among_odd_paths_are_checked_and_compiled_again_when_a_header_changes(tmp_path: Path) -> None:
    temporary, folder = tmp_path / 'a"$b`', tmp_path / "it's \\ö: &(#;%~"
    temporary.mkdir()
    folder.mkdir()
    (folder / "a b.cu").write_text('#include "a b.h"\nint main() { return CODE; }\n')
    variables = {"TMPDIR": str(temporary), "KERNELPROOF_CACHE_DIR": str(folder / "cache")}
    for code in (3, 4):
        (folder / "a b.h").write_text(f"#define CODE {code}\n")
        done = run("check", str(folder / "a b.cu"), env=variables, program="kernelproof")
        assert (done.returncode, done.stderr) == (1, ""), done
        assert f"ended with exit code {code}" in done.stdout


def test_an_nvcc_that_fails_is_quoted(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'nvcc fatal : no licence' >&2\nexit 1\n")
    nvcc.chmod(0o755)
    done = run("build", "--mnk", "64_64_64", "--nvcc", str(nvcc))
    assert done.returncode == 3
    expected = f"error: {nvcc} does not run or answer like nvcc (nvcc fatal : no licence); install a compiler: "
    assert done.stderr.startswith(expected)
