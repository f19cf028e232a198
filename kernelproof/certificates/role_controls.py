"""The controls of a role: numbers at the head of its loop over items that are known, such as its place in the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import bits_of, is_number, poly_of
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.role_state import RoleState
from kernelproof.certificates.words import Word


def of_lanes(state: RoleState, lanes: Lanes, size: int) -> RoleState:
    """A state for some of its ``size`` lanes."""
    out = state.copied()
    for register, value in out.registers.items():
        if isinstance(value, Word):
            out.registers[register] = Word(value.poly.of_lanes(lanes), value.bits, value.facts, value.signed)
        elif isinstance(value, Cells) or (isinstance(value, np.ndarray) and value.shape == (size,)):
            out.registers[register] = value.of_lanes(lanes) if isinstance(value, Cells) else value[lanes]
    return out


def number_key(value: Any) -> tuple[int, bytes | int]:
    """What distinguishes a known number from others."""
    constant = poly_of(value).constant
    return bits_of(value), constant if isinstance(constant, int) else constant.tobytes()


def is_known(value: Any) -> bool:
    """Whether a register holds a number that is known in each lane."""
    return is_number(value) and poly_of(value).is_constant


def known_number(value: Any) -> Lanes:
    """A known number as an array, which belongs to no facts."""
    if not is_known(value):
        raise NotCertified("a number at the head of a loop depends on the problem")
    if isinstance(value, Word):
        constant = np.atleast_1d(np.asarray(value.poly.constant, np.int64))
        return constant.astype(f"i{value.bits // 8}").view(f"u{value.bits // 8}")
    return np.asarray(value)


@dataclass
class Controls:
    """The controls at the head of the loop over items: numbers in ``registers``, and the role's track in ``state``."""

    registers: dict[str, Any]
    state: RoleState

    @property
    def key(self) -> object:
        numbers = tuple((name, number_key(value)) for name, value in sorted(self.registers.items()))
        track = self.state.track
        return numbers, track.position, track.item, track.stores.key
