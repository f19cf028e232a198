"""The controls of a role: the registers whose numbers are known at the head of its loop over items, such as a stage.

A producer or consumer of a pipeline counts its stages and parities in registers, which repeat after some items.
``item_roles`` and ``roles`` execute the loop's body for each value of these controls, and for any item.
"""

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
    """A copy of a state that has only some of its ``size`` lanes. ``lanes``: their numbers, or a mask."""
    out = state.copied()
    for register, value in out.registers.items():
        if isinstance(value, Word):
            out.registers[register] = Word(value.poly.of_lanes(lanes), value.bits, value.facts, value.signed)
        elif isinstance(value, Cells) or (isinstance(value, np.ndarray) and value.shape == (size,)):
            out.registers[register] = value.of_lanes(lanes) if isinstance(value, Cells) else value[lanes]
    return out


def number_key(value: Any) -> tuple[int, bytes | int]:
    """A key of a known number, equal for equal numbers of the same width."""
    constant = poly_of(value).constant
    return bits_of(value), constant if isinstance(constant, int) else constant.tobytes()


def is_known(value: Any) -> bool:
    """Whether a register holds a number that is known in each lane, so that it does not depend on the problem."""
    return is_number(value) and poly_of(value).is_constant


def known_number(value: Any) -> Lanes:
    """A known number as an array, which unlike a ``Word`` refers to no facts. It has one element if a word is the same
    in all lanes. Raises NotCertified if the number depends on the problem."""
    if not is_known(value):
        raise NotCertified("a number at the head of a loop depends on the problem")
    if isinstance(value, Word):
        constant = np.atleast_1d(np.asarray(value.poly.constant, np.int64))
        return constant.astype(f"i{value.bits // 8}").view(f"u{value.bits // 8}")
    return np.asarray(value)


@dataclass
class Controls:
    """The controls at the head of the loop over items. ``registers``: the known numbers. ``state``: the role's state
    there, whose track says how far it is in the ring."""

    registers: dict[str, Any]
    state: RoleState

    @property
    def key(self) -> object:
        """A key that is equal for equal numbers and an equal position, item and stores of the role's track."""
        track = self.state.track
        return self.numbers, track.position, track.item, track.stores.key

    @property
    def numbers(self) -> object:
        """A key that is equal for equal numbers."""
        return tuple((name, number_key(value)) for name, value in sorted(self.registers.items()))
