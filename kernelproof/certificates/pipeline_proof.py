"""Proves a pipelined kernel: first what all threads do before their barrier, then each role into which they split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernelproof.certificates.accumulators import check_accumulators
from kernelproof.certificates.cells import Kinds
from kernelproof.certificates.cluster_sum_proof import ClusterSumProof
from kernelproof.certificates.contract import Contract
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.loops import Case
from kernelproof.certificates.pipelines import WARP, Pipeline, Protocol
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_controls import of_lanes
from kernelproof.certificates.role_loops import loops_of
from kernelproof.certificates.role_state import CONSUMER, NONE, PRODUCER, SETUP, RoleState, Split
from kernelproof.certificates.roles import Role
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.sum_proof import SumProof
from kernelproof.certificates.warpgroup_machine import WarpgroupMachine


class PipelineProof:
    """Proves a kernel's pipeline under a contract. ``invariants``: of the producer, then of each group of consumers. In
    a cluster, those of all CTAs' producers come first."""

    def __init__(
        self, program: Program, contract: Contract, pipeline: Pipeline, invariants: tuple[Invariant, ...] = (),
        guesses: bool = True,
    ) -> None:  # fmt: skip
        if program.graph.spin_heads and pipeline.parts is None:
            raise NotCertified("a loop that waits for memory is not covered")
        self.program, self.contract, self.pipeline = program, contract, pipeline
        self.invariants, self.guesses = list(invariants), guesses
        self.kinds = Kinds()

    def cases(self) -> Iterator[Case]:
        """Prove every role, and yield its case. Raises NotCertified at the first that cannot be proven."""
        check_accumulators(self.program)
        size = self.contract.shared_bytes + self.program.layout.shared_static
        ctas = [_Cta(self, *each, size) for each in ((self.contract, self.pipeline), *self.pipeline.peers)]
        for cta in ctas:
            cta.protocol.cluster = [each.protocol for each in ctas]
        found: list[Invariant] = []
        for cta in ctas:
            yield cta.begin(self._barrier())
        # All producers are proven first, since consumers read what producers of other CTAs load.
        for cta in ctas:
            yield cta.prove(0, found)
        for cta in ctas:
            cta.protocol.check_stages()
        for cta in ctas:
            for number in range(1, len(cta.parts)):
                yield cta.prove(number, found)
        self.invariants = found
        for cta in ctas:
            cta.check()
        if self.pipeline.adds:
            adding = [(cta.contract, cta.pipeline, cta.protocol, cta.adding) for cta in ctas]
            yield from ClusterSumProof(self.program, self.kinds, adding).cases()
        if self.pipeline.parts is not None:
            yield from SumProof(self.program, self.contract, self.pipeline, ctas[0].protocol, self.kinds).cases()

    def _barrier(self) -> int:
        """The block after the barrier of the CTA, or of its cluster. A barrier within a loop is not that one: groups
        that add partial sums have such barriers."""
        waits = ("barrier.cluster.wait",) if self.pipeline.ranks > 1 else ("bar.sync", "barrier.sync")
        blocks = [x for x in self.program.blocks if any(ins.op.startswith(waits) for ins in x.all())]
        if self.pipeline.parts is not None:
            looped = set[int]().union(*self.program.loops.values())
            blocks = [block for block in blocks if block.index not in looped]
        if len(blocks) != 1 or blocks[0].end != "wait":
            raise NotCertified("a CTA without one barrier of all its threads before they have roles")
        return blocks[0].targets[0]


class _Cta:
    """Proves the roles of one CTA. ``size``: its bytes of shared memory."""

    def __init__(self, proof: PipelineProof, contract: Contract, pipeline: Pipeline, size: int) -> None:
        self.proof, self.program, self.kinds = proof, proof.program, proof.kinds
        self.contract, self.pipeline = contract, pipeline
        self.protocol = Protocol(-(-size // ELEMENT), pipeline)
        threads, groups = np.arange(contract.lanes), pipeline.groups
        self.parts = [threads[first:end] for first, end in ((0, groups[0][0]), *groups)]
        self.adding: list[RoleState] = []  # in which its consumers begin to add
        self.title = f" of CTA {pipeline.rank} of a cluster" if pipeline.ranks > 1 else ""

    def begin(self, barrier: int) -> Case:
        """Prove all threads up to the barrier, and find for each role the states in which it reaches its items."""
        threads = np.arange(self.contract.lanes)
        machine = WarpgroupMachine(self.program, self.pipeline.entry, self.kinds, self.protocol, threads, SETUP)
        try:
            state = machine.run(machine.start(), barrier)
        except Split:
            raise NotCertified("threads go different ways before the CTA's barrier") from None
        if not isinstance(state, RoleState):
            raise NotCertified("a CTA ends before its barrier")
        self.machine = machine
        # This is done for all roles before the first one is proven, so that every setmaxnreg has been executed.
        self.entries = [self._entries(of_lanes(state, part, len(threads)), part) for part in self.parts]
        return Case(covers=f"all threads{self.title}, up to their barrier", instructions=machine.steps)

    def prove(self, number: int, found: list[Invariant]) -> Case:
        """Prove a role: the producer's, or that of a group of consumers. ``found``: invariants of the roles before it,
        to which it adds its own."""
        reached, stated = self.entries[number], self.proof.invariants
        title = f"group {number} of consumers{self.title}" if number else f"the producer{self.title}"
        if len(reached) != 1:
            raise NotCertified(f"{len(reached)} roles where {title} is expected")
        (lanes, entry), group = reached[0], number - 1 if number else None
        given = stated[len(found)] if len(found) < len(stated) else None
        role = Role(
            self.program, self.contract, self.protocol, self.kinds, lanes, group, given, self.proof.guesses
        )  # fmt: skip
        if entry.block != role.items or len(lanes) != (len(self.parts[number]) if number else 1):
            raise NotCertified(f"{title}: {len(lanes)} threads, or threads that do something else")
        role.prove(entry)
        self.adding += role.adding
        assert role.invariant is not None
        found.append(role.invariant)
        return Case(covers=f"{title}, any item and any number of k-tiles", instructions=role.instructions)

    def check(self) -> None:
        """Check what concerns several roles, after all have been proven."""
        self.protocol.check(len(self.parts[1]) // WARP, len(self.pipeline.groups))
        self._check_registers()

    def _entries(self, state: RoleState, threads: Lanes) -> list[tuple[Lanes, RoleState]]:
        """The states in which threads reach a loop over items, each with those threads. Threads that end before are
        left out."""
        stops = {loops_of(self.program, role, not self.pipeline.adds)[0] for role in (PRODUCER, CONSUMER)}
        todo, out = [(threads, state)], []
        while todo:
            lanes, at = todo.pop()
            machine = WarpgroupMachine(self.program, self.pipeline.entry, self.kinds, self.protocol, lanes, NONE)
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

    def _check_registers(self) -> None:
        """Check that warpgroups do not wait for more registers than their CTA has."""
        protocol, machine = self.protocol, self.machine
        if not protocol.registers:
            return
        groups, entry = -(-machine.lanes // (4 * WARP)), machine.registers_at_entry()
        wanted = sum(protocol.registers.get(group, entry) for group in range(groups))
        if wanted > groups * entry:
            raise NotCertified(f"setmaxnreg waits for ever: {wanted} registers of {groups * entry} are wanted")
