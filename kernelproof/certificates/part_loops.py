"""Proves the loop over the parts of a tile, if a tile may have any number of them.

A thread adds a vector's partial sums in the order of parts, some of them in each iteration of this loop. Small numbers
of parts, which one iteration can load, are executed one after the other. For more parts the loop is proven by
induction: its first iteration is executed; then any iteration after which others follow; and then the last one, for
every number of parts that are left to it. The registers after the loop must be the same for all numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kernelproof.certificates.cells import UNKNOWN, Cells, same_elements
from kernelproof.certificates.conditions import Chosen, at_least
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import bits_of, is_number, poly_of
from kernelproof.certificates.polynomials import ZERO, Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.role_loops import exits_of, registers_of
from kernelproof.certificates.slices import Partial
from kernelproof.certificates.sum_machine import SumMachine
from kernelproof.certificates.thread_machine import Registers, same_value
from kernelproof.certificates.words import Word

TRIPS = "part_trips"  # the name of the number of iterations before the one that is executed


class PartLoop:
    """The loop over parts within a loop over vectors, whose head is ``vectors``. ``fewest``: the smallest number of
    parts with which it may be reached. Raises NotCertified unless there is one such loop."""

    def __init__(self, program: Program, machine: SumMachine, vectors: int) -> None:
        self.program, self.machine, self.count = program, machine, machine.share.count
        self.at_once = machine.share.parts.at_once
        few = (number for number in range(1, self.at_once + 1) if self._possible(number))
        self.fewest = next(few, self.at_once + 1)
        inner = [x for x in program.loops[vectors] if x in program.loops and x != vectors]
        if len(inner) != 1:
            raise NotCertified("the parts of a tile that are not added in one loop")
        (self.head,) = inner
        exits = exits_of(program, self.head)
        if len(exits) != 1:
            raise NotCertified("the loop over parts is left for different places")
        self.exit = exits[0]
        names = map(program.emitter.variable, registers_of(program, program.loops[self.head])[1])
        self.written = set(names)
        machine.facts.bounds[(TRIPS,)] = (1, 1 << 20)

    def prove(self, head: int, registers: Registers) -> tuple[int, Registers]:
        """Prove the loop from its head. Returns the block after it, and the registers there. Raises NotCertified."""
        few = [number for number in range(1, self.at_once + 1) if self._possible(number)]
        ends = [self._after_last_iteration(head, registers, Polynomial.of(number)) for number in few]
        facts, more = self.machine.facts, self.count - self.at_once - 1
        if facts.truth(more) is not False:
            with facts.side(at_least(facts, more)):
                ends += self._after_many(head, registers)
        return self.exit, registers | {
            name: ends[0].get(name) if all(_are_same(ends[0].get(name), end.get(name)) for end in ends) else UNKNOWN
            for name in self.written
        }

    def _possible(self, number: int) -> bool:
        """Whether a tile may have this number of parts, as far as facts say."""
        facts = self.machine.facts
        return not any(facts.truth(gap) is False for gap in (self.count - number, number - self.count))

    def _after_many(self, head: int, registers: Registers) -> Iterator[Registers]:
        """Prove all iterations if there are more parts than one of them loads. Yields the registers after the last
        one, for each number of parts that are left to it."""
        first = self._after_iteration(head, registers, True)
        trips = Polynomial.named(TRIPS)
        state, counting = self._head_registers(registers, first, trips)
        done, facts = trips * self.at_once, self.machine.facts
        with facts.side(at_least(facts, self.count - done - self.at_once - 1)):
            expected, _ = self._head_registers(registers, first, trips + 1)
            self._check(self._after_iteration(head, state, True), expected, counting)
        for left in range(1, self.at_once + 1):
            yield self._after_last_iteration(head, state, done + left)

    def _after_last_iteration(self, head: int, registers: Registers, count: Polynomial) -> Registers:
        """The registers after the loop, from the last iteration of a tile that has ``count`` parts."""
        facts, share = self.machine.facts, self.machine.share
        self.machine.share = replace(share, parts=replace(share.parts, count=count))
        counted = {name: _of_count(value, count) for name, value in registers.items()}
        with facts.side(at_least(facts, self.count - count, count - self.count)):
            out = self._after_iteration(head, counted, False)
        self.machine.share = share
        return out

    def _after_iteration(self, head: int, registers: Registers, again: bool) -> Registers:
        """The registers after an iteration. ``again``: whether it must lead to the loop's head again, or else out of
        the loop. Raises NotCertified if it does not."""
        found = []

        def reached(block: int | None, after: Registers) -> None:
            if block != (head if again else self.exit):
                raise NotCertified("the loop over parts does not end after the last part")
            found.append(after)

        del self.machine.proven_loops[head]
        self.machine.follow(head, dict(registers), None, (head, self.exit), reached)
        self.machine.proven_loops[head] = self.prove
        if len(found) != 1:
            raise NotCertified("an iteration over parts does not lead to one place")
        return found[0]

    def _head_registers(self, entry: Registers, first: Registers, trips: Polynomial) -> tuple[Registers, list[str]]:
        """The registers at the loop's head after ``trips`` iterations, and the names of those that the loop writes and
        that are known there. ``entry``, ``first``: the registers after none and after one."""
        out, known = dict(entry), list[str]()
        for name in map(self.program.emitter.variable, self.program.live(self.head)):
            if name not in self.written:
                continue
            before, after = entry.get(name), first.get(name)
            out[name] = UNKNOWN
            whole = isinstance(after, Partial) and not after.first.terms
            if isinstance(after, Partial) and whole and after.end.equals(Polynomial.of(self.at_once)):
                out[name] = Partial(after.whole, ZERO, trips * self.at_once, after.count)
                known.append(name)
            elif is_number(before) and is_number(after) and bits_of(before) == bits_of(after):
                step = poly_of(after) - poly_of(before)
                out[name] = Word(poly_of(before) + step * trips, bits_of(before), self.machine.facts)
                known.append(name)
        return out, known

    @staticmethod
    def _check(registers: Registers, expected: Registers, known: list[str]) -> None:
        """Raise NotCertified unless the registers that are known at the loop's head are the expected ones."""
        for name in known:
            if not _are_same(registers.get(name), expected[name]):
                raise NotCertified("an iteration over parts does not lead to the next one")


def _of_count(value: object, count: Polynomial) -> object:
    """A register's value if the tile has ``count`` parts."""
    return Partial(value.whole, value.first, value.end, count) if isinstance(value, Partial) else value


def _are_same(a: object, b: object) -> bool:
    """Whether two values of a register are known to be the same."""
    if isinstance(a, Partial) or isinstance(b, Partial):
        return (
            isinstance(a, Partial) and isinstance(b, Partial) and _are_same(a.whole, b.whole)
            and a.first.equals(b.first) and a.end.equals(b.end)
        )  # fmt: skip
    if isinstance(a, Cells) and isinstance(b, Cells):
        return a.width == b.width and same_elements(a, b)
    if isinstance(a, Chosen) and isinstance(b, Chosen):
        return a.test.key == b.test.key and _are_same(a.yes, b.yes) and _are_same(a.no, b.no)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return same_value(a, b)
