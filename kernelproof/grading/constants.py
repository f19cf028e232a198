"""Finds the constants with which kernels compare values, by reading their PTX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from kernelproof.emulator.arithmetic import bf16_to_f32

# A comparison in PTX with the type and the operands, and a constant that is moved to a register.
_COMPARISON = re.compile(r"\bsetp?\.[\w.]*?\.(f64|f32|f16x2|f16|bf16x2|bf16|[bsu](?:16|32))\s+([^;]*);")
_CONSTANT = re.compile(r"\bmov\.\w+\s+(%\w+),\s*(0[fFdD][0-9a-fA-F]+|0[xX][0-9a-fA-F]+|-?\d+)\s*;")
LARGEST_CONSTANT = 1e4  # larger constants are limits of a type rather than values of inputs


@lru_cache(maxsize=64)
def compared_constants(text: str) -> tuple[float, ...]:
    """The numbers with which the instructions of a PTX text compare.

    A number is an operand, or the constant to which the text sets a register. If several kernels use a register's name,
    the last constant counts.
    """
    registers: dict[str, str] = dict(_CONSTANT.findall(text))
    out: dict[float, None] = {}
    for kind, operands in _COMPARISON.findall(text):
        for operand in re.split(r"[\s,|]+", operands.strip()):
            out |= dict.fromkeys(filter(is_plantable, _numbers(registers.get(operand, operand), kind)))
    return tuple(out)


def is_plantable(number: float) -> bool:
    """Whether a number may be the value of an input: zero and very large or small numbers are none."""
    return 1 / LARGEST_CONSTANT < abs(number) < LARGEST_CONSTANT


def _numbers(word: str, kind: str) -> Iterator[float]:
    """The floats that the bits of a constant may stand for in a comparison of type ``kind``; none for other words."""
    if word[:2].lower() in ("0f", "0d"):
        yield from readings(int(word[2:], 16), "f64" if word[1] in "dD" else "f32")
    elif re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", word):
        yield from readings(int(word, 0), kind.replace("64", "32"))  # an integer holds the bits of an f32


def readings(bits: int, kind: str) -> Iterator[float]:
    """The floats that the bits of an operand may stand for in a comparison of type ``kind``."""
    if kind.endswith("64"):
        yield float(np.array(bits & 0xFFFFFFFFFFFFFFFF, np.uint64).view(np.float64))
    elif "16" not in kind:
        yield float(np.array(bits & 0xFFFFFFFF, np.uint32).view(np.float32))
    else:
        # A 16-bit type without a format (b16, s16, u16) may hold a half or a bfloat16, so both readings count.
        half = np.array([bits & 0xFFFF], np.uint16)
        yield from [float(half.view(np.float16)[0])] if not kind.startswith("bf") else []
        yield from [float(bf16_to_f32(half)[0])] if not kind.startswith("f") else []
