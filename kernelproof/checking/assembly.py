"""Assembles the PTX that a check executes, and reports the errors of ptxas as findings.

A kernel that ptxas refuses has no machine code, even if its PTX runs without a fault on the emulator. Level -O1 usually
suffices and takes some tenths of a second; only a text that ptxas refuses at -O1 is assembled again at -O3, nvcc's
default. The answers are cached by content, in the user's cache folder.
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
TIME_LIMIT_S = 60.0  # time limit for one text; a text that takes longer counts as not assembled, and a note says so
LEVELS = ("-O1", "-O3")  # a text is refused if ptxas refuses it on both levels; the second is nvcc's default
_FATBINS = (".nv_fatbin", "__nv_relfatbin")  # sections of a library that hold PTX
_MESSAGE = re.compile(r"^ptxas (?:.*?, line (\d+); )?(?:error|fatal)\s*: (.*)$", re.MULTILINE)
_KERNEL_NAME = re.compile(r"(?:[Ff]unction|entry) '([\w$]+)'")
_CLOSING = "Ptx assembly aborted"  # the last message after every error
# Messages of a ptxas that is too old or too new for the text. They say nothing about the kernel.
_WRONG_VERSION = re.compile(
    r"Unsupported \.(?:version|target)|is not defined for option|PTX with target .* is not supported"
)
# Messages about what the architecture lacks. The first kind names the least architecture that has it.
_REQUIRED_TARGET = re.compile(r"requires \.target (sm_\d+)")
_UNSUPPORTED_INSTRUCTION = re.compile(r"'(\w+)[\w.:]*' not supported on \.target")
# The first architecture that has an instruction.
_FIRST_TARGETS = {"wgmma": "sm_90a", "setmaxnreg": "sm_90a", "tcgen05": "sm_100a"}
_UNRESOLVED = "Unresolved extern"


class Refusal(NamedTuple):
    """An error of ptxas: its message, the PTX line (0 if it names none), and the kernel (empty if it names none)."""

    message: str
    line: int
    kernel: str


@dataclass(frozen=True)
class PtxasAnswer:
    """The errors of ptxas for a PTX text.

    ``unable``: the reason why ptxas gave no answer, as the rest of a sentence; empty if it gave one.
    """

    refusals: tuple[Refusal, ...] = ()
    unable: str = ""


class AssemblyFindings(NamedTuple):
    """The findings of a plan's PTX texts, and notes on texts that could not be assembled."""

    findings: list[Report]
    notes: list[str]


def findings_of(plan: CheckPlan, foreign: bool = False) -> AssemblyFindings:
    """Assemble the PTX that a plan executes. ``foreign``: whether it is untrusted; ptxas then runs in a sandbox."""
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
    """Assemble a PTX text for a device, or return the stored answer for it."""
    try:
        ptxas = find_ptxas()
    except ToolchainError as error:
        return PtxasAnswer(unable=str(error))
    target = _target(text, device)
    key = hashlib.sha256("\0".join((_version(ptxas), target, *LEVELS, text)).encode()).hexdigest()[:32]
    stored = places.user_cache() / "check" / "assembled" / f"{key}.json"
    try:
        return _parsed(PtxasOutput(**json.loads(stored.read_text())))
    except (OSError, ValueError, TypeError):
        pass
    try:
        printed = _assemble(text, ptxas, target, foreign)
    except subprocess.TimeoutExpired:
        return PtxasAnswer(unable=f"it did not end within {TIME_LIMIT_S:.0f} s")
    stored.parent.mkdir(parents=True, exist_ok=True)
    files.write(stored, json.dumps(printed._asdict()))
    return _parsed(printed)


class PtxasOutput(NamedTuple):
    """How ptxas ended: its exit code and what it printed."""

    code: int
    output: str


def _assemble(text: str, ptxas: Path, target: str, foreign: bool) -> PtxasOutput:
    """Run ptxas on a text, by the levels of ``LEVELS`` until one accepts it. If the text uses functions of other files,
    ptxas leaves them to a linker (-c). Raises TimeoutExpired."""
    with TemporaryDirectory(prefix="kernelproof-ptxas-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        printed = PtxasOutput(0, "")
        for level in LEVELS:
            options = [level, f"-arch={target}"]
            printed = _run(ptxas, options, source, foreign)
            if _UNRESOLVED in printed.output:
                printed = _run(ptxas, [*options, "-c"], source, foreign)
            if not _parsed(printed).refusals:
                break
        return printed


def _run(ptxas: Path, options: Sequence[str], source: Path, foreign: bool) -> PtxasOutput:
    """Run ptxas once; the cubin is written beside ``source``. Raises TimeoutExpired."""
    command = [str(ptxas), *options, str(source), "-o", str(source.with_suffix(".cubin"))]
    if foreign:
        box = sandbox.Sandbox((str(ptxas.resolve().parents[1]), str(ptxas)), (str(source.parent),))
        command = sandbox.command(box, command)
    return PtxasOutput(*process_tree.output(command, environment(), TIME_LIMIT_S))


def _parsed(printed: PtxasOutput) -> PtxasAnswer:
    """Parse the errors that ptxas printed."""
    if not printed.code:
        return PtxasAnswer()
    errors = [(int(line or 0), words) for line, words in _MESSAGE.findall(printed.output) if _CLOSING not in words]
    if not errors or any(_WRONG_VERSION.search(words) for _, words in errors):
        return PtxasAnswer(unable=errors[0][1] if errors else f"it ended with exit code {printed.code}")
    kernels = [match[1] if (match := _KERNEL_NAME.search(words)) else "" for _, words in errors]
    return PtxasAnswer(tuple(Refusal(words, line, name) for (line, words), name in zip(errors, kernels, strict=True)))


def _target(text: str, device: str) -> str:
    """The architecture for which a device's driver would assemble a text: the text's own target if that has a suffix
    (``a`` or ``f``), else the device's."""
    stated = re.search(r"^\s*\.target\s+(sm_\d+([af]?))", text, re.MULTILINE)
    if stated and stated[2]:
        return stated[1]
    major, minor = devices.device(device).capability
    return f"sm_{major}{minor}"


@cache
def _version(ptxas: Path) -> str:
    """What ptxas says about its version."""
    return process_tree.output([str(ptxas), "--version"])[1]


def _texts(plan: CheckPlan) -> Iterator[str]:
    """The PTX texts of a plan: its files, and those in its library that the device would assemble."""
    for path in plan.kernels:
        if path.suffix == ".ptx":
            with reading(path):
                yield path.read_text(errors="replace")
    if plan.library is not None:
        yield from embedded(plan.library, plan.device)


def embedded(library: Path, device: str) -> Iterator[str]:
    """The PTX texts in a library that a device would assemble: one for each fat binary without machine code for it.

    ``device``: a name as in ``devices``. A file that is no library has none. Raises WrongInput if it cannot be read.
    """
    with reading(library):
        content = library.read_bytes()
    if not is_elf(content):
        return
    chosen = devices.device(device)
    major, minor = chosen.capability
    for section in sections(content):
        data = section.data(content) if section.name in _FATBINS else b""
        # A fat binary begins with a header of 16 bytes: the header's own size is at byte 6, that of the rest at byte 8.
        # `entries` reads a fat binary by its address. 16 more bytes keep a read of the last header in the buffer.
        memory, at = ctypes.create_string_buffer(data, len(data) + 16), 0
        while at + 16 < len(data):
            header, size = struct.unpack_from("<HQ", data, at + 6)
            try:
                parts = entries(ctypes.addressof(memory) + at)
            except LaunchRefused:
                break
            # Machine code runs on devices of the same major number and a minor number that is no smaller.
            has_code = any(not part.ptx and part.sm // 10 == major and part.sm % 10 <= minor for part in parts)
            usable = [part for part in parts if part.text and runs(_stated_target(part.text), chosen)]
            if usable and not has_code:
                yield max(usable, key=lambda part: part.sm).text
            at += header + size


def _stated_target(text: str) -> str:
    """The architecture in a PTX text's ``.target``; empty if it has none."""
    match = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    return match[1] if match else ""


def _finding(text: str, refusal: Refusal) -> Report:
    """The finding that reports a refusal, with the instruction on its PTX line, its CUDA line and its kernel."""
    lines = text.splitlines()
    words = lines[refusal.line - 1].strip() if 0 < refusal.line <= len(lines) else ""
    owner, instruction = _instruction(text, refusal.line) if refusal.line else (None, None)
    site = Site(refusal.line, words, instruction.frames if instruction else ())
    kernel = refusal.kernel or (owner.name if owner else "")
    return Report(RULE, f"ptxas: {refusal.message}", kernel, Participant(site), hint=_hint(refusal.message))


def _hint(message: str) -> str:
    """What to do about a message of ptxas on what the architecture lacks; empty for other messages."""
    later, lacks = _REQUIRED_TARGET.search(message), _UNSUPPORTED_INSTRUCTION.search(message)
    sm = later[1] if later else _FIRST_TARGETS.get(lacks[1], "") if lacks else ""
    if not sm:
        return ""
    target = devices.target(devices.nearest(sm))
    return f"compile with --gpu {target}, which has it; a PTX file must be made again, by nvcc -ptx -arch={target}"


def _instruction(text: str, line: int) -> tuple[Function | None, Instr | None]:
    """The instruction on a PTX line and its function; None for both if there is no instruction or the text cannot be
    parsed."""
    try:
        module = load(text + "\n").module
    except (PtxError, EmulatorError):
        return None, None
    for function in (*module.kernels.values(), *module.functions.values()):
        for item in function.body:
            if isinstance(item, Instr) and item.line == line:
                return function, item
    return None, None
