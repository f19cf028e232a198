"""Proves one CTA of a pipelined kernel: what all threads do before their barrier, then each role that they have."""

from __future__ import annotations

import numpy as np

from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.loops import Case
from kernelproof.certificates.pipelines import Pipeline, Protocol
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_controls import of_lanes
from kernelproof.certificates.role_loops import loops_of
from kernelproof.certificates.role_machine import RoleMachine
from kernelproof.certificates.role_state import CONSUMER, NONE, PRODUCER, SETUP, RoleState, Split
from kernelproof.certificates.roles import Role
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.tensor_machine import machine_of
from kernelproof.ground.chips import WARP


class CtaProof:
    """Proves the roles of one CTA. ``size``: its bytes of shared memory. ``stated``: the invariants that a certificate
    states, in the order of the roles. ``guesses``: whether the invariants of other roles are guessed."""

    def __init__(
        self, program: Program, kinds: Kinds, stated: list[Invariant], guesses: bool, contract: Contract,
        pipeline: Pipeline, size: int,
    ) -> None:  # fmt: skip
        self.program, self.kinds, self.stated, self.guesses = program, kinds, stated, guesses
        self.contract, self.pipeline = contract, pipeline
        self.protocol = Protocol(-(-size // ELEMENT), pipeline)
        threads, groups = np.arange(contract.lanes), pipeline.groups
        # The threads of the producer, then those of each group of consumers.
        self.role_threads = [threads[first:end] for first, end in ((0, groups[0][0]), *groups)]
        self.adding_states: list[RoleState] = []  # those in which its consumers begin to add partial sums
        self.title = f" of CTA {pipeline.rank} of a cluster" if pipeline.ranks > 1 else ""

    def begin(self, barrier: int) -> Case:
        """Prove all threads up to the barrier, and find for each role the states in which it reaches its items. Raises
        NotCertified."""
        threads = np.arange(self.contract.lanes)
        machine = self._machine(threads, SETUP)
        try:
            state = machine.run(machine.start(), barrier)
        except Split:
            raise NotCertified("threads go different ways before the CTA's barrier") from None
        if not isinstance(state, RoleState):
            raise NotCertified("a CTA ends before its barrier")
        if self.pipeline.ranks > 1 and not state.track.gathered:
            raise NotCertified("the CTAs of a cluster do not wait for each other before they have roles")
        self.machine = machine
        # This is done for all roles before the first one is proven, so that every setmaxnreg has been executed.
        self.entries = [self._entries(of_lanes(state, part, len(threads)), part) for part in self.role_threads]
        return Case(covers=f"all threads{self.title}, up to their barrier", instructions=machine.steps)

    def _machine(self, threads: Lanes, role: str) -> RoleMachine:
        """A machine for threads that have no items yet."""
        return machine_of(self.pipeline)(
            self.program, self.pipeline.entry, self.kinds, self.protocol, threads, role
        )  # fmt: skip

    def prove(self, number: int, found: list[Invariant]) -> Case:
        """Prove a role: the producer's, or that of a group of consumers. ``found``: invariants of the roles before it,
        to which it adds its own. Raises NotCertified."""
        reached = self.entries[number]
        title = f"group {number} of consumers{self.title}" if number else f"the producer{self.title}"
        if len(reached) != 1:
            raise NotCertified(f"{len(reached)} roles where {title} is expected")
        lanes, entry = reached[0]
        role = Role(
            self.program, self.contract, self.protocol, self.kinds, lanes, CONSUMER if number else PRODUCER,
            max(0, number - 1), self.given(found), self.guesses,
        )  # fmt: skip
        if entry.block != role.items or len(lanes) != (len(self.role_threads[number]) if number else 1):
            raise NotCertified(f"{title}: {len(lanes)} threads, or threads that do something else")
        role.prove(entry)
        self.adding_states += role.states_after
        assert role.invariant is not None
        found.append(role.invariant)
        return Case(covers=f"{title}, any item and any number of k-tiles", instructions=role.instructions)

    def given(self, found: list[Invariant]) -> Invariant | None:
        """The invariant that the certificate states of the next role."""
        return self.stated[len(found)] if len(found) < len(self.stated) else None

    @property
    def roles(self) -> range:
        """The numbers of the roles after the producer's."""
        return range(1, len(self.role_threads))

    def check(self) -> None:
        """Check what concerns several roles, after all have been proven."""
        self.protocol.check(len(self.role_threads[1]) // WARP, len(self.pipeline.groups))
        self._check_registers()

    @property
    def stops(self) -> set[int]:
        """The blocks at which threads have their roles: the heads of loops over items."""
        return {loops_of(self.program, role, not self.pipeline.adds)[0] for role in (PRODUCER, CONSUMER)}

    def _entries(self, state: RoleState, threads: Lanes) -> list[tuple[Lanes, RoleState]]:
        """The states in which threads reach one of ``stops``, each after the numbers of those threads. Threads that end
        before are left out. ``state``: that in which all ``threads`` begin."""
        stops = self.stops
        todo, out = [(threads, state)], []
        while todo:
            lanes, at = todo.pop()
            if at.block in stops:
                out.append((lanes, at))
                continue
            machine = self._machine(lanes, NONE)
            try:
                reached = machine.run(at, *stops)
            except Split as split:
                for block, taken in split.sides:
                    some = np.flatnonzero(taken)
                    left = RoleState(block, split.registers, machine.memory.state, machine.slices.contents)
                    todo.append((lanes[some], of_lanes(RoleState.of(left, machine.track), some, len(lanes))))
                continue
            if isinstance(reached, RoleState):
                out.append((lanes, reached))
        return out

    def _check_registers(self) -> None:
        """Check that warpgroups do not wait for more registers than their CTA has."""
        protocol, machine = self.protocol, self.machine
        if not protocol.registers:
            return
        groups, entry = -(-machine.lanes // (4 * WARP)), machine.registers_at_entry()
        wanted = sum(protocol.registers.get(group, entry) for group in range(groups))
        if wanted > groups * entry:
            raise NotCertified(f"setmaxnreg waits for ever: {wanted} registers of {groups * entry} are wanted")
