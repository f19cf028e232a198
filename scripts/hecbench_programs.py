"""Reads from a Makefile of HeCBench how its program is built and run, with arguments that an emulator can afford.

The rules, unless ``scripts/hecbench.json`` states ``runs`` (arguments) of a program:

- an argument is a number of repetitions if its variable, its option or the usage text names it so: it becomes 2;
- other integers above 32 are sizes: the largest is halved, or divided by 10 if it is a round decimal number, until the
  product of all is at most ``ELEMENTS`` or the largest is below twice ``LEAST``;
- everything else is unchanged.

If sizes are in the source, ``edits`` in ``scripts/hecbench.json`` states for each file of the program the texts to
replace.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).with_name("hecbench.json")
ELEMENTS = 1 << 14  # the product of all sizes of a run is at most this
SMALL = 32  # numbers up to this one are not changed
LEAST = 8  # sizes are reduced only while the largest is at least twice this; 70 becomes 7
VARIANTS = 3  # runs of a Makefile, at most
# Names of arguments that say how often a kernel is launched.
_REPEATS = re.compile(r"rep|iter|trial|pass|run|time|step|loop|round|epoch|samples_num", re.IGNORECASE)
_ASSIGNED = re.compile(r"(\w+)\s*=[^;=]*?\bargv\s*\[\s*(\d+)\s*\]")  # a C statement: variable = .. argv[number]
_VARIABLE = re.compile(r"\w+=")  # an environment variable that a shell command sets before its program
_USAGE = re.compile(r"[Uu]sage[^;]*")  # a C statement that prints how to call the program
_SOURCE = (".cu", ".cpp", ".cc", ".c")  # endings of files that nvcc compiles
# Options of nvcc with a value of their own.
_VALUED = (
    "-Xcompiler", "-Xptxas", "-Xcudafe", "-Xlinker", "-x", "-maxrregcount", "--maxrregcount", "-rdc",
    "--default-stream", "-default-stream",
)  # fmt: skip
_COMPILERS = ("nvcc", "g++", "gcc", "cc", "c++")  # commands by which Makefiles compile


class NotRunnable(Exception):
    """The Makefile does not say how to build or run the program without further tools."""


class Run(NamedTuple):
    """A run of a program in a folder; ``flags`` are for nvcc, as a shell spells them."""

    folder: Path
    sources: list[Path]
    flags: str
    arguments: list[str]


@contextmanager
def runs_of(checkout: Path, program: str) -> Iterator[list[Run]]:
    """The runs of a program, in a copy of its folder where texts are replaced. Raises NotRunnable."""
    entry = json.loads(DATA.read_text())["programs"].get(program, {})
    original = checkout / "src" / f"{program}-cuda"
    if "edits" not in entry:
        yield _runs(original, entry)
        return
    # Beside the original, since programs read files by paths such as ../data/x.
    copy = original.with_name(f"{program}-cuda-smaller")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    try:
        _edit(copy, entry["edits"])
        yield _runs(copy, entry)
    finally:
        shutil.rmtree(copy)


def _edit(folder: Path, edits: dict[str, list[list[str]]]) -> None:
    """Replaces texts in files of a folder. Raises NotRunnable if a file does not have one of them."""
    for name, replacements in edits.items():
        text = (folder / name).read_text(errors="surrogateescape")
        for old, new in replacements:
            if old not in text:
                raise NotRunnable(f"{name}: no {old!r} to replace")
            text = text.replace(old, new)
        (folder / name).write_text(text, errors="surrogateescape")


def _runs(folder: Path, entry: dict[str, Any]) -> list[Run]:
    """The runs that a folder's Makefile states. ``entry``: the program's entry in ``DATA``. Raises NotRunnable."""
    if not (folder / "Makefile").exists():
        raise NotRunnable("no Makefile")
    steps = list(_steps(folder))
    compiled = [step for step in steps if Path(step.words[0]).name in _COMPILERS]
    sources = {
        (step.folder / word).resolve(): None for step in compiled for word in step.words if word.endswith(_SOURCE)
    }
    if missing := [path.name for path in sources if not path.exists()]:
        raise NotRunnable(f"no file {missing[0]}")
    if not sources:
        raise NotRunnable("its Makefile compiles nothing with nvcc")
    outputs = {Path(step.words[step.words.index("-o") + 1]).name for step in compiled if "-o" in step.words[:-1]}
    flags = shlex.join(dict.fromkeys(word for step in compiled for word in _flags(step)))
    commands = [step for step in steps if step not in compiled and step.program in outputs]
    if not commands:
        others = [step.words[0] for step in steps if step not in compiled]
        raise NotRunnable(f"started by {others[-1]}" if others else "its Makefile has no run")
    texts = " ".join(path.read_text(errors="replace") for path in sources)
    folders = [command.folder for command in commands]
    chosen = entry.get("runs") or [smaller_arguments(command.arguments, texts) for command in commands]
    distinct = dict.fromkeys(map(tuple, chosen))
    return [Run(folders[0], list(sources), flags, list(arguments)) for arguments in distinct][:VARIANTS]


class Step(NamedTuple):
    """A command of a Makefile, and the folder in which it is executed. Variables may be set before its program."""

    folder: Path
    words: list[str]

    @property
    def program(self) -> str:
        """The name of the program that the command starts."""
        return Path(next((word for word in self.words if not _VARIABLE.match(word)), "")).name

    @property
    def arguments(self) -> list[str]:
        """The words after the program."""
        return list(dropwhile(_VARIABLE.match, self.words))[1:]


def _steps(folder: Path) -> Iterator[Step]:
    """The commands of ``make run``, none of which is executed. Raises NotRunnable."""
    command = ["make", "--dry-run", "--always-make", "run", "CC=nvcc", "ARCH=sm_80"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode:
        raise NotRunnable(process.stderr.strip().splitlines()[-1])
    # ``place``: the folder of the make process that prints the next line. Lines that begin with make[N] announce a
    # change of it; the commands of one line are executed one after the other, each after the cd before it.
    place = folder
    for line in re.sub(r"\\\n", " ", process.stdout).splitlines():
        if entered := re.match(r"make\[\d+\]: Entering directory '(.*)'", line):
            place = Path(entered[1])
            continue
        if line.startswith("make["):
            place = folder
            continue
        within = place
        for part in re.split(r"&&|;", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue
            if words[:1] == ["cd"]:
                within = within / words[-1]
            elif words:
                yield Step(within, words)


def _flags(step: Step) -> Iterator[str]:
    """Flags for nvcc: folders absolute, option and value joined."""
    of_nvcc = Path(step.words[0]).name == "nvcc"
    words = iter(step.words[1:])
    for word in words:
        if word == "-o":
            next(words, None)
        elif word in ("-I", "-L", "-D", "-l"):
            word += next(words, "")
        elif word in _VALUED:
            word = f"{word}={next(words, '')}"
        if word.startswith(("-I", "-L")):
            yield word[:2] + str((step.folder / word[2:]).resolve())
        elif word.startswith("-") and word not in ("-c", "-o") and (of_nvcc or word.startswith(("-D", "-l", "-std"))):
            yield word


def smaller_arguments(arguments: list[str], texts: str) -> list[str]:
    """Arguments with fewer repetitions and smaller sizes, by the rules of this module. ``texts``: the program's
    source."""
    result = list(arguments)
    # The name of each argument by its index: the variable that gets argv[index + 1], and the word in the usage text.
    names = {int(number) - 1: name for name, number in _ASSIGNED.findall(texts)}
    described = re.findall(r"<([^<>]*)>", usage[0]) if (usage := _USAGE.search(texts)) else []
    if len(described) == len(arguments):
        names = {index: f"{names.get(index, '')} {name}" for index, name in enumerate(described)}
    sizes = {}  # the sizes by the index of their argument
    for index, word in enumerate(arguments):
        option, value = _value(word)
        if not value.isdecimal():
            continue
        option_before = arguments[index - 1] if index and arguments[index - 1].startswith("-") else ""
        name = option or option_before or names.get(index, "")
        if _REPEATS.search(name) or name in ("-i", "-r", "--i="):
            result[index] = option + str(min(int(value), 2))
        elif int(value) > SMALL:
            sizes[index] = int(value)
    while sizes and math.prod(sizes.values()) > ELEMENTS:
        largest = max(sizes, key=lambda index: sizes[index])
        size = sizes[largest]
        if size < 2 * LEAST:
            break
        is_round_decimal = size % 10 == 0 and size & (size - 1) and size % 256
        sizes[largest] = size // 10 if is_round_decimal else size // 2
    for index, size in sizes.items():
        result[index] = _value(arguments[index])[0] + str(size)
    return result


def _value(word: str) -> tuple[str, str]:
    """The option in ``--option=value``, including '=', and the value; no option for a word without '='."""
    option, sign, value = word.partition("=")
    return (option + sign, value) if sign else ("", word)
