"""Proves one CTA whose accumulators are in tensor memory: each of its roles, and the CTA's end.

At the end, all of its threads meet at a barrier after their last items.
"""

from __future__ import annotations

import numpy as np

from kernelproof.certificates.cta_proof import CtaProof
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import Invariant
from kernelproof.certificates.item_roles import ItemRole
from kernelproof.certificates.loops import Case
from kernelproof.certificates.polynomials import Lanes
from kernelproof.certificates.role_loops import after_items, registers_of
from kernelproof.certificates.role_state import CONSUMER, ENDING, MULTIPLIER, PRODUCER, RoleState
from kernelproof.certificates.roles import Role
from kernelproof.certificates.store_role import StoreRole
from kernelproof.certificates.tensor_loops import heads_of, meeting_of
from kernelproof.certificates.tensor_machine import TensorMachine
from kernelproof.emulator.frontend.flow.loops import reachable

ROLES = (PRODUCER, MULTIPLIER, CONSUMER)


class TensorCta(CtaProof):
    """Proves the roles of a CTA whose accumulators are in tensor memory.

    Role 0 is the producer, 1 the multiplier (if the CTA multiplies), 2 the group that stores. 3 stands for all threads
    after their items. ``heads``: role -> the head of its loop over items. ``meeting``: the block where all threads
    meet. ``reached``: role -> the threads that have reached its head, with their state there. ``ended``: the same for
    the block ``meeting``.
    """

    ended: list[tuple[Lanes, RoleState]]

    def begin(self, barrier: int) -> Case:
        """Executes the CTA's beginning, and sorts the lanes by the role whose code they reach."""
        self.heads, self.meeting = heads_of(self.program), meeting_of(self.program)
        case = super().begin(barrier)
        self.ended = []
        reached: dict[str, list[tuple[Lanes, RoleState]]] = {name: [] for name in ROLES}
        for lanes, state in (each for part in self.entries for each in part):
            role = next((x for x in ROLES if state.block == self.heads[x]), None)
            if role is None:
                self.ended.append((lanes, state))
            else:
                reached[role].append((lanes, state))
        self.reached = reached
        return case

    @property
    def stops(self) -> set[int]:
        return {*self.heads.values(), self.meeting}

    @property
    def roles(self) -> range:
        return range(1 if self.pipeline.leads else 2, 4)

    def prove(self, number: int, found: list[Invariant]) -> Case:
        """Proves the role of this number, or the CTA's end after the last role. Raises NotCertified."""
        if number == len(ROLES):
            return self._end()
        name = ROLES[number]
        title = ("the producer", "the thread that multiplies", "the group that stores")[number] + self.title
        if len(self.reached[name]) != 1 or (not self.pipeline.leads and self.reached[MULTIPLIER]):
            raise NotCertified(f"{len(self.reached[name])} roles where {title} is expected")
        ((lanes, entry),) = self.reached[name]
        if not np.array_equal(lanes, self.role_threads[1]) if name == CONSUMER else len(lanes) != 1:
            raise NotCertified(f"{title}: {len(lanes)} threads")
        roles = self._stores(lanes) if name == CONSUMER else [self._role(name, lanes, found)]
        for role in roles:
            role.prove(entry.copied())
            self.ended += [(lanes, self._met(state)) for state in role.states_after]
            if role.invariant is not None:
                found.append(role.invariant)
        steps = sum(role.instructions for role in roles)
        return Case(covers=f"{title}, any item and any number of k-tiles", instructions=steps)

    def _role(self, name: str, lanes: Lanes, found: list[Invariant]) -> ItemRole:
        return Role(
            self.program, self.contract, self.protocol, self.kinds, lanes, name, 0, self.given(found), self.guesses,
            self.meeting,
        )  # fmt: skip

    def _stores(self, lanes: Lanes) -> list[ItemRole]:
        """The group that stores: a role for each contract that the pipeline has for it."""
        items = self.heads[CONSUMER]
        after = after_items(self.program, items) if self.pipeline.parts else self.meeting
        return [
            StoreRole(self.program, contract, self.protocol, self.kinds, lanes, CONSUMER, 0, items, after)
            for contract in self.pipeline.stores or (self.contract,)
        ]  # fmt: skip

    def _met(self, state: RoleState) -> RoleState:
        """The state of a role at the block where all threads meet. Raises NotCertified if a group that adds partial
        sums before that block writes registers that are read there or later."""
        if state.block != self.meeting:
            between = reachable(self.program.blocks, [state.block], self.meeting)
            if set(self.program.live(self.meeting)) & registers_of(self.program, between)[1]:
                raise NotCertified("registers that are read where all threads meet are written after items")
            state = state.copied()
            state.block = self.meeting
        return state

    def _end(self) -> Case:
        """Prove what all threads do after their items, from the block where they meet to their end."""
        steps, threads = 0, set[int]()
        for lanes, state in self.ended:
            machine = TensorMachine(
                self.program, self.contract, self.kinds, self.protocol, lanes, ENDING
            )  # fmt: skip
            if machine.run(state) is not None:
                raise NotCertified("threads do not end after their items")
            steps += machine.steps
            threads.update(lanes.tolist())
        if threads != set(range(self.contract.lanes)):
            raise NotCertified("some threads do not come to where those of all roles meet")
        return Case(covers=f"all threads{self.title}, behind their items", instructions=steps)

    def check(self) -> None:
        super().check()
        if not self.protocol.tensor.freed:
            raise NotCertified("a CTA ends without giving back its tensor memory")
