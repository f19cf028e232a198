"""Writes changed instructions into a cubin, for tests: other control words, other registers, another order.

The places of fields are those of CuAssembler (cloudcores/CuAssembler) and of Jia et al., "Dissecting the NVIDIA Volta
GPU Architecture via Microbenchmarking" (arXiv 1804.06826). An instruction has 128 bits. The number of its result
register is in bits 16 to 23, those of operands A, B and C are in the eight bits from 24, 32 and 64, and the control
word is in bits 105 to 125.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelproof.ground.errors import WrongInput
from kernelproof.sass import Control, Instruction, sections
from kernelproof.sass.decoding import BYTES, NO_BARRIER

CONTROL, CONTROL_MASK = 105, (1 << 21) - 1  # the first bit of the control word, and a mask of its length
RESULT, OPERANDS = 16, (24, 32, 64)  # the first bit of each field that holds a register number


def control_word(control: Control) -> int:
    """The 21 bits of a control word, the inverse of ``Control.decode``."""
    write = NO_BARRIER if control.write_barrier is None else control.write_barrier
    read = NO_BARRIER if control.read_barrier is None else control.read_barrier
    waits = sum(1 << barrier for barrier in control.waits)
    return control.stall | (not control.yields) << 4 | write << 5 | read << 8 | waits << 11 | control.reuse << 17


def rescheduled_code(instruction: Instruction, **changes: Any) -> int:
    """Returns the 128 bits of an instruction after changes to its control word. ``changes``: new values of fields of
    ``Control``, by name."""
    word = control_word(replace(instruction.control, **changes))
    return instruction.code & ~(CONTROL_MASK << CONTROL) | word << CONTROL


def with_register(code: int, first: int, number: int) -> int:
    """Returns the 128 bits ``code`` with register ``number`` in the field that begins at bit ``first``."""
    return code & ~(255 << first) | number << first


def edit_cubin(cubin: bytes, function: str, codes: Mapping[int, int]) -> bytes:
    """Returns the cubin with some instructions of a function replaced. Raises WrongInput if it has no such function.

    ``codes``: the new 128 bits by address, in bytes from the start of the function.
    """
    section = next((item for item in sections(cubin) if item.name == f".text.{function}"), None)
    if section is None:
        raise WrongInput(f"the cubin has no function {function}")
    changed = bytearray(cubin)
    for address, code in codes.items():
        at = section.offset + address
        changed[at : at + BYTES] = code.to_bytes(BYTES, "little")
    return bytes(changed)
