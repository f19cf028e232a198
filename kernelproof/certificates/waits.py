"""Executes waits for mbarriers, which threads repeat until they succeed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.machine import Machine
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_loops import is_wait

MOST_BYTES = (1 << 20) - 1  # the most bytes that an mbarrier can expect in a phase (PTX ISA)
# Instructions that a thread may execute between two tries of a wait: they change nothing but registers.
_PURE = frozenset(("emu_waited", "selp", "setp", "mov", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor"))
_MOST_BLOCKS = 8  # the most blocks between two tries of a wait


class WaitingMachine(Machine):
    """A machine whose waits succeed at once. What threads do after a wait that fails is executed too. ``polled``: the
    block has waited; a wait sets it."""

    def __init__(self, program: Program, contract: Contract, kinds: Kinds) -> None:
        super().__init__(program, contract, kinds)
        self.success, self.polled = True, False

    def waits(self) -> Lanes:
        """Whether the last wait has succeeded, for each lane. It fails only while ``_check_tries`` runs."""
        return np.full(self.lanes, self.success)

    def _next(self, block: int, registers: dict[str, Any]) -> int | None:
        """The block that follows; after a test of an mbarrier, the branch must try again until the test succeeds."""
        following = super()._next(block, registers)
        if self.polled:
            self.polled = False
            assert following is not None
            self._check_tries(block, following, registers)
        return following

    def _check_tries(self, block: int, following: int, registers: dict[str, Any]) -> None:
        """Check that a wait which fails is tried again: threads come back to it with the same registers, and have done
        nothing else."""
        mine = dict(registers)
        if any(not is_wait(ins) and ins.base not in _PURE for ins in self.program.blocks[block].all()):
            raise NotCertified("between two tries of a wait, threads do more than to compute")
        self.success = False
        self._try_again(following, mine, block)
        self.success = True
        for register in self.program.live(block):
            name = self.program.emitter.variable(register)
            a, b = registers.get(name), mine.get(name)
            if a is not b and not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)):
                raise NotCertified(f"a wait is tried again with another {register}")

    def _try_again(self, at: int | None, registers: dict[str, Any], block: int) -> None:
        """Execute from ``at``, the block after a wait that has failed, until the wait's own block is reached."""
        for _ in range(_MOST_BLOCKS):
            if at is None or any(ins.base not in _PURE for ins in self.program.blocks[at].all()):
                break
            at = super()._next(at, registers)
            if at == block:
                return
        raise NotCertified("a wait that fails is not tried again")
