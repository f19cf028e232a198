"""Rounds results of f32 and f64 toward zero, up or down, by switching the processor's rounding mode around NumPy's
operations."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kernelproof.emulator.state.arrays import Array
from kernelproof.emulator.state.reports import EmulatorError

# The arguments of C's fesetround, by processor. On both processors, 0 is round to nearest.
_X86 = {"rn": 0, "rm": 0x400, "rp": 0x800, "rz": 0xC00}
_ARM = {"rn": 0, "rp": 0x400000, "rm": 0x800000, "rz": 0xC00000}
_DIRECTIONS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}


@cache
def libm() -> Any:
    """The mathematical library of C."""
    return ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")


@contextmanager
def _rounding(mode: str) -> Iterator[None]:
    """A context in which the thread's operations on f32 and f64 round by ``mode`` (rz, rm or rp). Operations on f16 are
    not affected. Raises EmulatorError if the processor is not supported."""
    directions = _DIRECTIONS.get(platform.machine())
    if directions is None or libm().fesetround(directions[mode]):
        raise EmulatorError(f"directed rounding is not modelled on this processor ({platform.machine()})")
    try:
        yield
    finally:
        libm().fesetround(directions["rn"])


def toward(mode: str, function: Callable[..., Array], *operands: Array) -> Array:
    """Calls ``function(*operands)`` with every f32 and f64 operation rounded by ``mode``: rz toward zero, rm down, rp
    up.

    ``function`` may round twice, since rounding to more bits and then to fewer, in the same direction, equals rounding
    once. Raises EmulatorError if the processor is not supported.
    """
    with _rounding(mode):
        return function(*operands)
