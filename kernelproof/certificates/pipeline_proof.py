"""Proves a kernel's pipeline: what all threads do first, then each of the roles into which they part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernelproof.certificates.accumulators import check_accumulators
from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.loops import Case
from kernelproof.certificates.pipelines import WARP, Pipeline, Protocol
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_loops import loops_of
from kernelproof.certificates.role_state import CONSUMER, NONE, PRODUCER, SETUP, RoleState, Split
from kernelproof.certificates.roles import Role, of_lanes
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.warpgroup_machine import WarpgroupMachine


class PipelineProof:
    """Proves a kernel's pipeline under a contract. ``invariants``: of the producer, then of each group."""

    def __init__(
        self, program: Program, contract: Contract, pipeline: Pipeline, invariants: tuple[Invariant, ...] = (),
        guesses: bool = True,
    ) -> None:  # fmt: skip
        if program.graph.spin_heads:
            raise NotCertified("a loop that waits for memory is not covered")
        self.program, self.contract, self.pipeline = program, contract, pipeline
        self.invariants, self.guesses = list(invariants), guesses
        self.kinds = Kinds()

    def cases(self) -> Iterator[Case]:
        """Every role, proven. Raises NotCertified at the first that is not."""
        check_accumulators(self.program)
        threads = np.arange(self.contract.lanes)
        size = self.contract.shared_bytes + self.program.layout.shared_static
        protocol = Protocol(-(-size // ELEMENT), self.pipeline)
        machine = WarpgroupMachine(self.program, self.pipeline.entry, self.kinds, protocol, threads, SETUP)
        try:
            state = machine.run(machine.start(), self._barrier())
        except Split:
            raise NotCertified("threads go different ways before the CTA's barrier") from None
        if not isinstance(state, RoleState):
            raise NotCertified("a CTA ends before its barrier")
        yield Case(covers="all threads, up to their barrier", instructions=machine.steps)
        found: list[Invariant] = []
        groups = self.pipeline.groups
        parts = [threads[first:end] for first, end in ((0, groups[0][0]), *groups)]
        # All roles are found before the first one is proven, so that setmaxnreg and ends of threads are known.
        entries = [self._entries(protocol, of_lanes(state, part, len(threads)), part) for part in parts]
        for number, (part, reached) in enumerate(zip(parts, entries, strict=True)):
            title = f"group {number} of consumers" if number else "the producer"
            if len(reached) != 1:
                raise NotCertified(f"{len(reached)} roles where {title} is expected")
            (lanes, entry), group = reached[0], number - 1 if number else None
            given = self.invariants[number] if number < len(self.invariants) else None
            role = Role(self.program, self.contract, protocol, self.kinds, lanes, group, given, self.guesses)
            if entry.block != role.items or len(lanes) != (len(part) if number else 1):
                raise NotCertified(f"{title}: {len(lanes)} threads, or threads that do something else")
            role.prove(entry)
            assert role.invariant is not None
            found.append(role.invariant)
            yield Case(covers=f"{title}, any item and any number of k-tiles", instructions=role.instructions)
        self.invariants = found
        protocol.check(len(parts[1]) // WARP, len(groups))
        self._check_registers(protocol, machine)

    def _barrier(self) -> int:
        """The block behind the CTA's barrier."""
        blocks = [x for x in self.program.blocks if any(ins.base in ("bar", "barrier") for ins in x.all())]
        blocks = [x for x in blocks if any(ins.op.startswith(("bar.sync", "barrier.sync")) for ins in x.all())]
        if len(blocks) != 1 or blocks[0].end != "wait":
            raise NotCertified("a CTA without one barrier of all its threads before they have roles")
        return blocks[0].targets[0]

    def _entries(self, protocol: Protocol, state: RoleState, threads: Lanes) -> list[tuple[Lanes, RoleState]]:
        """The states in which some threads reach a loop over items; those that end before have no part in it."""
        stops = {loops_of(self.program, role)[0] for role in (PRODUCER, CONSUMER)}
        todo, out = [(threads, state)], []
        while todo:
            lanes, at = todo.pop()
            machine = WarpgroupMachine(self.program, self.pipeline.entry, self.kinds, protocol, lanes, NONE)
            try:
                reached = machine.run(at, *stops)
            except Split as split:
                for block, taken in split.sides:
                    some = np.flatnonzero(taken)
                    left = RoleState(block, split.registers, machine.memory.state, machine.slices.left)
                    todo.append((lanes[some], of_lanes(RoleState.of(left, machine.track), some, len(lanes))))
                continue
            if isinstance(reached, RoleState):
                out.append((lanes, reached))
        return out

    def _check_registers(self, protocol: Protocol, machine: WarpgroupMachine) -> None:
        """Check that warpgroups do not wait for more registers than their CTA has."""
        if not protocol.registers:
            return
        groups, entry = -(-machine.lanes // (4 * WARP)), machine.registers_at_entry()
        wanted = sum(protocol.registers.get(group, entry) for group in range(groups))
        if wanted > groups * entry:
            raise NotCertified(f"setmaxnreg waits for ever: {wanted} registers of {groups * entry} are wanted")
