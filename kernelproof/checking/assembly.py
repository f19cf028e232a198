"""Assembles the PTX that a check executes: what ptxas refuses has no machine code, however well its PTX runs.

The first optimisation level is enough for that and takes some tenths of a second; what it refuses is asked again as
nvcc would ask. Answers are cached by content, in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kernelproof.checking import devices
from kernelproof.checking.plan import CheckPlan
from kernelproof.emulator import EmulatorError, LaunchRefused, PtxError, Report, Site, load
from kernelproof.emulator.frontend.ptx import Function, Instr
from kernelproof.emulator.host.images import entries
from kernelproof.emulator.host.launch_limits import runs
from kernelproof.emulator.state.participants import Participant
from kernelproof.ground import files, places, process_tree, sandbox
from kernelproof.ground.errors import reading
from kernelproof.ground.toolchain import ToolchainError, environment, find_ptxas
from kernelproof.sass.elf import is_elf, sections

RULE = "does-not-assemble"
SECONDS = 60.0  # for one text; what takes longer is not assembled, and a note says so
# Levels of optimisation: the first refusal is believed if the second, nvcc's own, is one too.
LEVELS = ("-O1", "-O3")
_FATBINS = (".nv_fatbin", "__nv_relfatbin")  # sections of a library that hold PTX
_MESSAGE = re.compile(r"^ptxas (?:.*?, line (\d+); )?(?:error|fatal)\s*: (.*)$", re.MULTILINE)
_KERNEL = re.compile(r"(?:[Ff]unction|entry) '([\w$]+)'")
# What says nothing of the kernel: the end of the messages, and what this ptxas is too old or too new for.
_CLOSING = "Ptx assembly aborted"
_UNABLE = re.compile(r"Unsupported \.(?:version|target)|is not defined for option|PTX with target .* is not supported")
_UNRESOLVED = "Unresolved extern"


class Refusal(NamedTuple):
    """An error of ptxas: what it says, the PTX line (0 if it names none), and the kernel (empty if it names none)."""

    message: str
    line: int
    kernel: str


@dataclass(frozen=True)
class PtxasAnswer:
    """What ptxas says of a PTX text. ``unable``: why it gave no answer, as the rest of a sentence."""

    refusals: tuple[Refusal, ...] = ()
    unable: str = ""


class AssemblyFindings(NamedTuple):
    """The findings of a plan's texts, and notes on what was not assembled."""

    findings: list[Report]
    notes: list[str]


def assembled(plan: CheckPlan, foreign: bool = False) -> AssemblyFindings:
    """Assemble the PTX that a plan executes. ``foreign``: it is untrusted, so ptxas runs in a sandbox."""
    outcome = AssemblyFindings([], [])
    if plan.machine_code:
        return outcome
    for text in _texts(plan):
        answer = answer_of(text, plan.device, foreign)
        if answer.unable:
            outcome.notes.append(f"ptxas did not assemble the PTX: {answer.unable}")
        outcome.findings.extend(_finding(text, refusal) for refusal in answer.refusals)
    return outcome._replace(notes=list(dict.fromkeys(outcome.notes)))


def answer_of(text: str, device: str, foreign: bool) -> PtxasAnswer:
    """What ptxas says of a text for a device: the stored answer if there is one."""
    try:
        ptxas = find_ptxas()
    except ToolchainError as error:
        return PtxasAnswer(unable=str(error))
    target = _target(text, device)
    key = hashlib.sha256("\0".join((_version(ptxas), target, *LEVELS, text)).encode()).hexdigest()[:32]
    stored = places.user_cache() / "check" / "assembled" / f"{key}.json"
    try:
        return _answer(Printed(**json.loads(stored.read_text())))
    except (OSError, ValueError, TypeError):
        pass
    try:
        printed = _asked(text, ptxas, target, foreign)
    except subprocess.TimeoutExpired:
        return PtxasAnswer(unable=f"it did not end within {SECONDS:.0f} s")
    stored.parent.mkdir(parents=True, exist_ok=True)
    files.write(stored, json.dumps(printed._asdict()))
    return _answer(printed)


class Printed(NamedTuple):
    """How ptxas ended: its exit code and what it printed."""

    code: int
    output: str


def _asked(text: str, ptxas: Path, target: str, foreign: bool) -> Printed:
    """How ptxas ends on a text. Functions of other files are left to a linker if there are any. Raises
    TimeoutExpired."""
    with TemporaryDirectory(prefix="kernelproof-ptxas-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        printed = Printed(0, "")
        for level in LEVELS:
            options = [level, f"-arch={target}"]
            printed = _run(ptxas, options, source, foreign)
            if _UNRESOLVED in printed.output:
                printed = _run(ptxas, [*options, "-c"], source, foreign)
            if not _answer(printed).refusals:
                break
        return printed


def _run(ptxas: Path, options: Sequence[str], source: Path, foreign: bool) -> Printed:
    command = [str(ptxas), *options, str(source), "-o", str(source.with_suffix(".cubin"))]
    if foreign:
        box = sandbox.Sandbox((str(ptxas.resolve().parents[1]), str(ptxas)), (str(source.parent),))
        command = sandbox.command(box, command)
    return Printed(*process_tree.output(command, environment(), SECONDS))


def _answer(printed: Printed) -> PtxasAnswer:
    """What an end means."""
    if not printed.code:
        return PtxasAnswer()
    found = [(int(line or 0), said) for line, said in _MESSAGE.findall(printed.output) if _CLOSING not in said]
    if not found or any(_UNABLE.search(said) for _, said in found):
        return PtxasAnswer(unable=found[0][1] if found else f"it ended with exit code {printed.code}")
    return PtxasAnswer(tuple(Refusal(said, line, _kernel(said)) for line, said in found))


def _kernel(message: str) -> str:
    match = _KERNEL.search(message)
    return match[1] if match else ""


def _target(text: str, device: str) -> str:
    """The architecture for which a device's driver would assemble a text: the device's number, with the suffix (``a``
    or ``f``) of the text's target."""
    stated = re.search(r"^\s*\.target\s+(sm_\d+([af]?))", text, re.MULTILINE)
    if stated and stated[2]:
        return stated[1]
    major, minor = devices.device(device).capability
    return f"sm_{major}{minor}"


@cache
def _version(ptxas: Path) -> str:
    return process_tree.output([str(ptxas), "--version"])[1]


def _texts(plan: CheckPlan) -> Iterator[str]:
    """The PTX of a plan: its files, and what its library embeds for the device and without machine code for it."""
    for path in plan.kernels:
        if path.suffix == ".ptx":
            with reading(path):
                yield path.read_text(errors="replace")
    if plan.library is not None:
        yield from embedded(plan.library, plan.device)


def embedded(library: Path, device: str) -> Iterator[str]:
    """The PTX texts in a library that a device would assemble: where a fat binary has no machine code for it."""
    with reading(library):
        content = library.read_bytes()
    if not is_elf(content):
        return
    chosen = devices.device(device)
    major, minor = chosen.capability
    for section in sections(content):
        data = section.data(content) if section.name in _FATBINS else b""
        memory, at = ctypes.create_string_buffer(data, len(data) + 16), 0
        while at + 16 < len(data):
            header, size = struct.unpack_from("<HQ", data, at + 6)
            try:
                parts = entries(ctypes.addressof(memory) + at)
            except LaunchRefused:
                break
            own = any(not part.ptx and part.sm // 10 == major and part.sm % 10 <= minor for part in parts)
            usable = [part for part in parts if part.text and runs(_stated_target(part.text), chosen)]
            if usable and not own:
                yield max(usable, key=lambda part: part.sm).text
            at += header + size


def _stated_target(text: str) -> str:
    match = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    return match[1] if match else ""


def _finding(text: str, refusal: Refusal) -> Report:
    """A refusal as a finding: at the instruction of its line, with the CUDA line, in its kernel."""
    lines = text.splitlines()
    words = lines[refusal.line - 1].strip() if 0 < refusal.line <= len(lines) else ""
    owner, instruction = _instruction(text, refusal.line) if refusal.line else (None, None)
    site = Site(refusal.line, words, instruction.frames if instruction else ())
    kernel = refusal.kernel or (owner.name if owner else "")
    return Report(RULE, f"ptxas: {refusal.message}", kernel, Participant(site))


def _instruction(text: str, line: int) -> tuple[Function | None, Instr | None]:
    """The function of a PTX line and the instruction that stands there, as far as the text can be parsed."""
    try:
        module = load(text + "\n").module
    except (PtxError, EmulatorError):
        return None, None
    for function in (*module.kernels.values(), *module.functions.values()):
        for item in function.body:
            if isinstance(item, Instr) and item.line == line:
                return function, item
    return None, None
