"""Proves that every fault planted in machine code is found in its schedule or in its results, or changes nothing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator.machine_code.lowering import UnknownMachineCode
from kernelproof.sass import DisassemblyError, Function, disassemble, hazards
from kernelproof.sass.editing import edited
from tests.draws import THOROUGH
from tests.kernelproof.emulator import drawn_programs
from tests.kernelproof.emulator.build import assembled
from tests.kernelproof.emulator.machine_mutants import (
    KINDS,
    SCHEDULED,
    Mutant,
    mutants,
    reason,
    rescheduled_function,
)
from tests.kernelproof.emulator.test_machine_code import run

SEEDS = range(1000, 1044) if THOROUGH else range(1000, 1004)
LEVELS = (3, 1, 2, 0)
EACH = 2  # the number of mutants of each kind and text


def results(cubin: Path, seed: int) -> tuple[np.ndarray, list[str]]:
    """The words that a program writes for three draws of its operands, and the rules of its findings."""
    program = emulator.load(cubin)
    runs = [run(program, drawn_programs.operands(seed + draw)) for draw in range(3)]
    return np.concatenate([words for words, _ in runs]), [rule for _, rules in runs for rule in rules]


def verdict(cubin: Path, before: Function, mutant: Mutant, seed: int, expected: np.ndarray) -> str:
    """How a mutant is found (``schedule``, ``execution`` or ``refused``), or why it changes nothing.

    Control words change no value in the emulator, so mutants of them are not executed.
    """
    if mutant.kind in SCHEDULED:
        after = rescheduled_function(before, mutant)
        return "schedule" if hazards(after) else reason(mutant, before, after)
    path = cubin.with_name("mutant.cubin")
    path.write_bytes(edited(cubin.read_bytes(), before.name, mutant.codes))
    try:
        (after,) = disassemble(path)
        if hazards(after):
            return "schedule"
        result, findings = results(path, seed)
    except (DisassemblyError, UnknownMachineCode, emulator.EmulatorError):
        return "refused"
    if findings or drawn_programs.differs(expected, result).any():
        return "execution"
    return reason(mutant, before, after)


@pytest.mark.slow
def test_planted_faults_are_found_or_change_nothing(tmp_path: Path) -> None:
    found = []
    for seed in SEEDS:
        made = assembled(drawn_programs.text(seed), LEVELS[seed % len(LEVELS)])
        cubin = Path(shutil.copy(made, tmp_path / "kernel.cubin"))
        (function,) = disassemble(cubin)
        expected, findings = results(cubin, seed)
        assert findings == []
        found += [
            (mutant.kind, verdict(cubin, function, mutant, seed, expected))
            for mutant in mutants(function, random.Random(seed), EACH)
        ]
    assert {kind for kind, _ in found} == KINDS.keys()
    assert "schedule" in {how for kind, how in found if kind == "reuse"}
    assert sum(how in ("schedule", "execution", "refused") for _, how in found) > len(found) // 2
    # Mutants that are not noticed, without a known reason: they replace a register that has the same value in all lanes
    # of three runs, or a memory descriptor, whose content the emulator does not use.
    assert sum(not how for _, how in found) <= len(found) // 50
