"""Proves that the wheel, installed into an empty environment, runs the commands of README.md and of the pages.

A block of a page that begins with ```` ```console ```` holds commands after ``$ `` and, below each, what it prints.
Words after ``console`` say what the commands need beyond the wheel with its compiler (``NEEDS``); those commands are
not run, and a warning lists them. ``$ cat FILE`` creates FILE with the shown text if it does not exist yet.

A command whose output has a line that begins with ``error`` must end with 1 or 2, every other one with 0. The numbers
and hyphenated names of the output that is shown must appear; times and paths may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.draws import draw_part

READMES = ("README.md", "kernelproof/README.md")
NEEDS = {
    "gpu": "a GPU", "torch": "torch", "mcp": "the package mcp", "network": "a server, or files that are fetched",
    "checkout": "files of the checkout that the wheel does not have", "slow": "more than ten seconds",
}  # fmt: skip
# What may differ from the page (times, paths), and what must not: numbers, sizes such as 64_64 and hyphenated names.
TIME = re.compile(r"\d+(?:\.\d+)? (?:s|ms|us|seconds|minutes)\b")
PATH = re.compile(r"(?:^|(?<=[\s(]))[/~]\S+")
FIGURE = re.compile(r"\d+(?:\.\d+)*(?:[_x:-]\w+)*|[A-Za-z]\w*(?:[-_]\w+)+")
LIMIT_S = 300  # the limit of a command that hangs; the slowest command takes 6 s


class Command(NamedTuple):
    """A command of a page, what the page shows of its output, and the keys of ``NEEDS`` that its block names."""

    page: str
    line: int
    text: str
    shown: str
    needs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


class Installed(NamedTuple):
    """A virtual environment with the wheel and its compiler, and the variables of a user who has activated it."""

    wheel: Path
    python: Path
    variables: dict[str, str]


def commands_of(page: str, text: str) -> list[Command]:
    """The commands in a page's blocks, in order. A line that ends with a backslash goes on in the next."""
    found = []
    for block in re.finditer(r"^( *)```console(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
        needs = tuple(block[2].split())
        line = text.count("\n", 0, block.start(3))
        # A continued line belongs to one command, so its newline is hidden as \0 until the lines are split.
        content = block[3].replace("\\\n", "\\\0")
        for part in re.split(r"^(?= *\$ )", content, flags=re.MULTILINE):
            first, _, shown = part.partition("\n")
            if "$ " in first:
                command = first.partition("$ ")[2].replace("\\\0", "\\\n")
                found.append(Command(page, line + 1, command, shown, needs))
            line += part.count("\n") + part.count("\0")
    return found


def documented_commands(checkout: Path) -> list[Command]:
    """The commands in the blocks of all pages."""
    pages = [checkout / "README.md", *sorted((checkout / "docs").rglob("*.md"))]
    if (checkout / "kernelproof/README.md").is_file():
        pages.append(checkout / "kernelproof/README.md")
    return [command for path in pages for command in commands_of(str(path.relative_to(checkout)), path.read_text())]


def figures(shown: str) -> list[str]:
    """The numbers and names that the output of a command must contain."""
    return FIGURE.findall(PATH.sub(" ", TIME.sub(" ", shown)))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The installed wheel. It has 700 MB and is removed at the end."""
    checkout = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="installed-") as name:
        folder = Path(name)
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CUDAL2GEN_", "KERNELPROOF_", "PYTHON"))
        }
        options = ["--quiet", "--disable-pip-version-check"]
        build = [sys.executable, "-m", "pip", "wheel", *options, "--no-deps", "--wheel-dir", name, str(checkout)]
        subprocess.run(build, check=True, env=variables)
        (wheel,) = folder.glob("cudal2gen-*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, env=variables)
        python = folder / "venv/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", python]
        install = [*pip, "install", *options, "--no-compile", f"{wheel}[nvcc]"]
        process = subprocess.run(install, capture_output=True, text=True, check=False, env=variables)
        if process.returncode:
            pytest.fail(
                "The wheel's dependencies could not be installed: this test needs pip's package index or cache with "
                f"all packages of pyproject.toml's dependencies and of its extra nvcc.\n{process.stderr}"
            )
        path = [entry for entry in variables["PATH"].split(os.pathsep) if not (Path(entry) / "nvcc").exists()]
        yield Installed(
            wheel,
            python,
            variables
            | {
                "PATH": os.pathsep.join([str(python.parent), *path]),
                "HOME": name, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data"),
            },
        )  # fmt: skip


@pytest.mark.slow
def test_the_wheel_carries_templates_catalog_and_types(installed: Installed, checkout: Path, tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; import cudal2gen;"
        "from cudal2gen import places, report, results; from cudal2gen.generation import catalog;"
        "from cudal2gen.generation.renderer import render;"
        "assert places.checkout() is None, places.checkout();"
        "assert (places.PACKAGE / 'py.typed').is_file(), 'type checkers read the annotations';"
        "records = catalog.load();"
        "page = report.report(results.measurements(Path('none')), records).html();"
        "assert 'arXiv 2512.02551' in page and 'drawAll()' in page;"
        "print(len(records), len(render(records[0])), places.build_dir(), places.editable_catalog())"
    )
    command = [installed.python, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=installed.variables)
    assert done.returncode == 0, done.stderr
    count, length, build, editable = done.stdout.split()
    assert int(count) == len((checkout / "configs/kernels.jsonl").read_text().splitlines()) > 11000
    assert int(length) > 5000
    home = installed.variables["HOME"]
    assert (build, editable) == (f"{home}/cache/cudal2gen/build", f"{home}/data/cudal2gen/kernels.jsonl")
    with zipfile.ZipFile(installed.wheel) as archive:
        assert not [name for name in archive.namelist() if name.startswith(("tests/", "scripts/"))]


@pytest.mark.slow
def test_commands_of_the_pages_run(installed: Installed, checkout: Path, tmp_path: Path) -> None:
    """The commands of a page run in one folder and in their order, so that later ones find the files of earlier ones.

    ``make test`` takes both READMEs and every fifth of the other pages, ``make thorough`` all pages.
    """
    commands = documented_commands(checkout)
    pages = dict.fromkeys(command.page for command in commands if not command.needs)
    taken = {page for page in pages if page in READMES} | {
        *draw_part([page for page in pages if page not in READMES], 5)
    }
    if left_out := [f"{command} ({', '.join(command.needs)})" for command in commands if command.needs]:
        warnings.warn("not run:\n" + "\n".join(left_out), stacklevel=1)
    faults = []
    for command in commands:
        if not command.needs and command.page in taken:
            folder = tmp_path / command.page
            folder.mkdir(parents=True, exist_ok=True)
            faults += [f"{command}: {fault}" for fault in differences(command, folder, installed.variables)]
    assert faults == []
    assert sum(not command.needs for command in commands) > 10


def differences(command: Command, folder: Path, variables: dict[str, str]) -> Iterator[str]:
    """Runs a command and yields its differences from the page. A ``cat`` of a missing file writes the file instead."""
    if (made := re.fullmatch(r"cat ([\w.]+)", command.text)) and not (folder / made[1]).exists():
        (folder / made[1]).write_text(command.shown)
        return
    try:
        process = subprocess.run(
            ["bash", "-c", command.text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            text=True, check=False, cwd=folder, env=variables, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield f"does not end within {LIMIT_S} s"
        return
    allowed = (1, 2) if re.search(r"^error\b", command.shown, re.MULTILINE) else (0,)
    if process.returncode not in allowed:
        yield f"ended with {process.returncode}: {process.stdout}"
    elif missing := [figure for figure in figures(command.shown) if figure not in process.stdout]:
        yield f"did not print {', '.join(missing)} but {process.stdout}"


def test_commands_name_what_they_need(checkout: Path) -> None:
    unknown = [str(command) for command in documented_commands(checkout) if not set(command.needs) <= NEEDS.keys()]
    assert unknown == [], f"write one of {', '.join(NEEDS)} after ```console, or nothing"


def test_blocks_are_read_as_commands_and_their_outputs() -> None:
    page = "Text.\n\n```console\n$ cat a.cu\nint x;\n$ run \\\n  b\nruns in 2 s\n```\n"
    page += "\n```console gpu slow\n$ bench\n```\n"
    assert commands_of("page", page) == [
        Command("page", 4, "cat a.cu", "int x;\n", ()),
        Command("page", 6, "run \\\n  b", "runs in 2 s\n", ()),
        Command("page", 12, "bench", "", ("gpu", "slow")),
    ]


def test_figures_are_numbers_and_names_without_times_and_paths() -> None:
    shown = "error: shared-race at a.cu:6: tile[255]\n1 launch in 0.06 s, 49152 bytes in /tmp/x7/y (sm_80)"
    assert figures(shown) == ["shared-race", "6", "255", "1", "49152", "sm_80"]


@pytest.mark.parametrize(
    ("text", "shown", "faults"),
    [
        ("echo a 17", "a 17", 0),
        ("echo a 17", "a 18", 1),
        ("false", "", 1),
        ("echo error: x-y; exit 1", "error: x-y", 0),
        ("echo error: x-y", "error: x-y", 1),
    ],
)
def test_a_command_that_differs_from_its_page_is_a_fault(text: str, shown: str, faults: int, tmp_path: Path) -> None:
    assert len(list(differences(Command("page", 1, text, shown, ()), tmp_path, dict(os.environ)))) == faults


def test_a_file_that_a_page_shows_is_written_once(tmp_path: Path) -> None:
    for shown in ("text 1\n", "text 1\n", "text 2\n"):
        faults = list(differences(Command("page", 1, "cat a.txt", shown, ()), tmp_path, dict(os.environ)))
        assert bool(faults) == (shown != "text 1\n")
    assert (tmp_path / "a.txt").read_text() == "text 1\n"
