"""Writes changed instructions into a cubin: other control words, other registers, another order.

The places of fields are those of CuAssembler (cloudcores/CuAssembler) and of Jia et al., "Dissecting the NVIDIA Volta
GPU Architecture via Microbenchmarking" (arXiv 1804.06826): an instruction has 128 bits, with the number of its result
register in bits 16 to 23, those of operands A, B and C in 24, 32 and 64 and the seven after, and the control word in
105 to 125.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelproof.ground.errors import WrongInput
from kernelproof.sass.decoding import BYTES, Instruction
from kernelproof.sass.elf import sections

RESULT, OPERANDS = 16, (24, 32, 64)  # first bits of the numbers of registers


def rescheduled(instruction: Instruction, **changes: Any) -> int:
    """The 128 bits of an instruction with other fields of its control word, by their names in ``Control``."""
    upper = replace(instruction.control, **changes).encode(instruction.code >> 64)
    return upper << 64 | instruction.code & (1 << 64) - 1


def with_register(code: int, first: int, number: int) -> int:
    """The bits of an instruction with another register in the field that begins at bit ``first``."""
    return code & ~(255 << first) | number << first


def edited(cubin: bytes, function: str, codes: Mapping[int, int]) -> bytes:
    """A cubin with other instructions at some addresses of a function. Raises WrongInput if it has no such function."""
    section = next((item for item in sections(cubin) if item.name == f".text.{function}"), None)
    if section is None:
        raise WrongInput(f"the cubin has no function {function}")
    changed = bytearray(cubin)
    for address, code in codes.items():
        at = section.offset + address
        changed[at : at + BYTES] = code.to_bytes(BYTES, "little")
    return bytes(changed)
