"""The constants with which kernels compare what they load, as read from their PTX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from kernelproof.emulator.arithmetic import bf16_to_f32

_COMPARISON = re.compile(r"\bsetp?\.[\w.]*?\.(f64|f32|f16x2|f16|bf16x2|bf16|[bsu](?:16|32))\s+([^;]*);")
_CONSTANT = re.compile(r"\bmov\.\w+\s+(%\w+),\s*(0[fFdD][0-9a-fA-F]+|0[xX][0-9a-fA-F]+|-?\d+)\s*;")
LARGEST_CONSTANT = 1e4  # larger ones are limits, beyond which results overflow


@lru_cache(maxsize=64)
def compared_constants(text: str, instructions: str = "") -> tuple[float, ...]:
    """The numbers, neither zero nor very large or small, with which some instructions compare, directly or by registers
    that a PTX text sets to them. By default these are all instructions of the text.

    A register's name that several kernels use has the last of its constants.
    """
    known: dict[str, str] = dict(_CONSTANT.findall(text))
    out: dict[float, None] = {}
    for kind, operands in _COMPARISON.findall(instructions or text):
        for operand in re.split(r"[\s,|]+", operands.strip()):
            for number in _numbers(known.get(operand, operand), kind):
                if 1 / LARGEST_CONSTANT < abs(number) < LARGEST_CONSTANT:
                    out[number] = None
    return tuple(out)


def _numbers(word: str, kind: str) -> Iterator[float]:
    """The floats that a constant of a comparison of some type may be; none for words that are no constants."""
    if word[:2].lower() in ("0f", "0d"):
        wide = word[1] in "dD"
        bits = np.array(int(word[2:], 16), np.uint64 if wide else np.uint32)
        yield float(bits.view(np.float64 if wide else np.float32))
    elif re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+", word):
        integer = int(word, 0)
        if "16" not in kind:
            yield float(np.array(integer & 0xFFFFFFFF, np.uint32).view(np.float32))
            return
        half = np.array([integer & 0xFFFF], np.uint16)
        yield from [float(half.view(np.float16)[0])] if not kind.startswith("bf") else []
        yield from [float(bf16_to_f32(half)[0])] if not kind.startswith("f") else []
