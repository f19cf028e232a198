"""Proves that every fault planted in machine code is found in its schedule or in its results, or changes nothing.

The texts are drawn programs of four architectures, a product by TMA and wgmma (sm_90a), and two by tcgen05 (sm_100a).
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import EmulatorError, Memory, Options, Severity
from kernelproof.emulator.machine_code.lowering import UnknownMachineCode
from kernelproof.ground.errors import WrongInput
from kernelproof.sass import DisassemblyError, Function, disassemble, hazards
from tests.draws import THOROUGH
from tests.kernelproof.cubin_edits import edit_cubin
from tests.kernelproof.emulator import drawn_programs
from tests.kernelproof.emulator import test_hopper_mutants as hopper
from tests.kernelproof.emulator import test_tensor_memory as tensors
from tests.kernelproof.emulator.build import assemble, compile_file
from tests.kernelproof.emulator.hopper import FLAGS, gemm
from tests.kernelproof.emulator.machine_mutants import (
    KINDS,
    SCHEDULED,
    Mutant,
    changes_execution,
    mutants,
    reason,
    rescheduled_function,
)
from tests.kernelproof.emulator.machine_walks import Use, Walker
from tests.kernelproof.emulator.test_machine_code import launch_words

SEEDS = range(1000, 1044) if THOROUGH else range(1000, 1004)
LATER_SEEDS = range(1000, 1020) if THOROUGH else range(1000, 1001)  # on each of the other architectures
# The level of optimisation of ptxas, which seeds take in turns.
LEVELS = (3, 1, 2, 0)
MUTANTS_PER_KIND = 2  # the number of mutants of each kind and text
FIRST_LAUNCHES, FURTHER_LAUNCHES = 3, 24 if THOROUGH else 6  # launches of a drawn program
NEVER = 15 << 12  # the bits of the guard !PT
ROW_WORDS = drawn_programs.WORDS_OUT
# A thread's row of results, and a byte in it, at which addresses may overflow: buffers begin at multiples of 256.
ROWS = [(row, place) for row in range(drawn_programs.THREADS) for place in range(8, 4 * ROW_WORDS, 8)
        if (4 * row * ROW_WORDS + place) % 256 == 0]  # fmt: skip
# How a fault is found: by the check of schedules, by an execution, or as machine code that is refused.
FOUND = ("schedule", "execution", "refused")


@dataclass(frozen=True)
class Subject:
    """A kernel whose machine code gets faults. ``cubin``: its file, which is alone in its folder. ``first``: the first
    thing that is noticed about a cubin that is executed in its place; empty if nothing is. ``further``: the same for
    more launches, which take longer."""

    cubin: Path
    first: Callable[[Path], str]
    further: Callable[[Path], str] = lambda _: ""

    @cached_property
    def function(self) -> Function:
        """The decoded machine code."""
        (function,) = disassemble(self.cubin)
        return function

    @cached_property
    def uses(self) -> set[Use]:
        """The uses of results that the check of schedules finds."""
        return Walker(self.function, self.function).uses()

    def verdict(self, mutant: Mutant) -> str:
        """How a mutant is found (one of ``FOUND``), or why it changes nothing; empty if no reason is known."""
        before = self.function
        after = rescheduled_function(before, mutant)
        if mutant.kind in SCHEDULED and hazards(after):
            return "schedule"
        if mutant.kind not in SCHEDULED or changes_execution(before, mutant):
            path = self.cubin.with_name("mutant.cubin")
            path.write_bytes(edit_cubin(self.cubin.read_bytes(), before.name, mutant.codes))
            try:
                (after,) = disassemble(path)
                if hazards(after):
                    return "schedule"
                if self.first(path):
                    return "execution"
            except (DisassemblyError, UnknownMachineCode, EmulatorError, WrongInput):
                return "refused"
        why = reason(mutant, before, after, self.uses)
        if why or mutant.kind in SCHEDULED:
            return why
        if self.further(self.cubin.with_name("mutant.cubin")):
            return "execution"
        if mutant.kind == "register" and self._works_without(mutant):
            return "these launches do not depend on the instruction"
        return ""

    def _works_without(self, mutant: Mutant) -> bool:
        """Whether nothing is noticed if the changed instructions are never executed."""
        path = self.cubin.with_name("mutant.cubin")
        disabled = {address: code | NEVER for address, code in mutant.codes.items()}
        path.write_bytes(edit_cubin(self.cubin.read_bytes(), self.function.name, disabled))
        try:
            return self.first(path) == self.further(path) == ""
        except (DisassemblyError, UnknownMachineCode, EmulatorError):
            return False

    def verdicts(self, seed: int, each: int) -> list[tuple[str, str]]:
        """The kinds and verdicts of drawn mutants."""
        assert self.first(self.cubin) == ""
        drawn = mutants(self.function, random.Random(seed), each)
        return [(mutant.kind, self.verdict(mutant)) for mutant in drawn]


def drawn_subject(seed: int, target: str, folder: Path) -> Subject:
    """A drawn program. It is launched with three draws of its operands, and with
    ``FURTHER_LAUNCHES`` more if nothing shows."""
    made = assemble(drawn_programs.text(seed, target), LEVELS[seed % len(LEVELS)], target)
    cubin = Path(shutil.copy(made, folder / f"kernel{seed}.cubin"))
    right = emulator.load(cubin)
    expected: dict[int, np.ndarray] = {}  # by the number of the draw

    def first_finding(path: Path, draws: range) -> str:
        program = emulator.load(path)
        for draw in draws:
            words = drawn_programs.operands(seed + draw)
            if draw not in expected:
                expected[draw] = launch_words(right, words)[0]
            result, rules = (
                launch_words(program, words) if draw < FIRST_LAUNCHES else launch_across_overflows(program, words, draw)
            )
            if rules or drawn_programs.differs(expected[draw], result).any():
                return "".join(rules[:1]) or "wrong values"
        return ""

    return Subject(
        cubin,
        lambda path: first_finding(path, range(FIRST_LAUNCHES)),
        lambda path: first_finding(path, range(FIRST_LAUNCHES, FIRST_LAUNCHES + FURTHER_LAUNCHES)),
    )


def launch_across_overflows(program: emulator.Program, words: np.ndarray, draw: int) -> tuple[np.ndarray, list[str]]:
    """``launch_words`` with operands and results where the lower word of addresses overflows. For the results
    it overflows in the row of one thread, which depends on ``draw``."""
    memory = Memory()
    row, place = ROWS[draw % len(ROWS)]
    before = len(words) * drawn_programs.WORDS_IN * 2
    buffers = []
    for array, role, at in (
        (words, "input", before), (np.zeros((len(words), ROW_WORDS), np.uint32), "output", 4 * row * ROW_WORDS + place)
    ):  # fmt: skip
        memory.next += -(memory.base + memory.next + at) % (1 << 32)
        buffers.append(memory.upload(array, role))
    result = program.launch("k", 1, len(words), buffers, memory=memory)
    out = buffers[1].bytes().view(np.uint32).reshape(len(words), -1)
    return out.copy(), [report.kind for report in result.reports]


def cubin_without_lines(text: str, target: str) -> Path:
    """The cubin of a text without its ``.loc`` lines: a part of a file lacks the sections that these name."""
    return assemble(re.sub(r"(?m)^\s*\.loc\s.*$", "", text), target=target)


def wgmma_subject(folder: Path) -> Subject:
    """A product by TMA and wgmma, of a cluster of two CTAs."""
    made = cubin_without_lines(hopper.text_of_kernel("tma_gemm", 2), "sm_90a")
    library = compile_file("tma_gemm", ".so", *FLAGS, arch="sm_90a")

    def first_finding(path: Path, k: int) -> str:
        program = emulator.load(path, library)
        ran = gemm("tn_f16_2x1", (256, 136, k), 1, pdl=True, options=Options(loop_limit=2000), source=program)
        if ran.code or ran.session.refusals:
            return "refused"
        reports = [report.kind for report in ran.session.reports if report.severity is not Severity.BENIGN]
        return reports[0] if reports else "" if ran.exact else "wrong values"

    cubin = Path(shutil.copy(made, folder / "wgmma.cubin"))
    return Subject(cubin, lambda path: first_finding(path, 192), lambda path: first_finding(path, 448))


def tcgen05_subject(kernel: str, folder: Path) -> Subject:
    """A product in tensor memory, of one CTA (``tile``) or of a pair with TMA (``pair``)."""
    made = cubin_without_lines(tensors.text_of_kernel(kernel), "sm_100a")
    launch = tensors.tile if kernel == "tile" else tensors.pair
    return Subject(
        Path(shutil.copy(made, folder / f"{kernel}.cubin")), lambda path: tensors.first_finding(launch, path)
    )


def check_verdicts(found: list[tuple[str, str]]) -> None:
    """Checks that most mutants are found, and that the others are known to change nothing."""
    assert sum(how in FOUND for _, how in found) > len(found) // 2
    assert [kind for kind, how in found if not how] == []


@pytest.mark.slow
def test_planted_faults_are_found_or_change_nothing(tmp_path: Path) -> None:
    found = [item for seed in SEEDS for item in drawn_subject(seed, "sm_80", tmp_path).verdicts(seed, MUTANTS_PER_KIND)]
    assert {kind for kind, _ in found} == KINDS.keys()
    assert "schedule" in {how for kind, how in found if kind == "reuse"}
    check_verdicts(found)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
def test_planted_faults_are_found_on_later_architectures(target: str, tmp_path: Path) -> None:
    check_verdicts(
        [
            item
            for seed in LATER_SEEDS
            for item in drawn_subject(seed, target, tmp_path).verdicts(seed, MUTANTS_PER_KIND)
        ]
    )


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "wgmma": wgmma_subject,
    "tcgen05": lambda folder: tcgen05_subject("tile", folder),
    "tcgen05 of a pair": lambda folder: tcgen05_subject("pair", folder),
}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("subject", ["tcgen05", "wgmma", "tcgen05 of a pair"])
def test_planted_faults_are_found_in_asynchronous_kernels(subject: str, tmp_path: Path) -> None:
    check_verdicts(SUBJECTS[subject](tmp_path).verdicts(7, 12 if THOROUGH else 1))
