"""Executes one symbolic thread that stands for all threads of a group, to prove what they store to D.

The thread's number is a polynomial in named integers, as the sizes of the problem are: for example, any lane of a warp
is ``lane_odd + 2 * lane_pair + 4 * row_odd + 8 * row_pair``. If the condition of a branch holds for some threads or
problems only, both sides are executed up to the block at which they meet, each with its condition as a fact.

``machine`` executes all lanes of a CTA, with a coefficient per lane. This machine has one lane. ``sum_machine`` and
``cluster_sum_proof`` derive from it, to prove how partial sums are added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from kernelproof.certificates import abstract
from kernelproof.certificates.cells import UNKNOWN, Cells, Kinds
from kernelproof.certificates.conditions import Condition, Multiple, OpenFacts, chosen, settled
from kernelproof.certificates.contract import Contract, Matrix
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.invariants import bits_of, is_number, poly_of
from kernelproof.certificates.machine import Machine
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.program import Program
from kernelproof.certificates.progress import Progress, Stored
from kernelproof.certificates.slices import Partial
from kernelproof.certificates.words import Word, polynomial
from kernelproof.emulator import arithmetic
from kernelproof.emulator.state.arrays import Mask

Registers = dict[str, Any]  # variable of the emulator's text -> value
Reached = Callable[[int | None, Registers], None]  # see ``ThreadMachine.follow``


class AnyThread(Protocol):
    """A thread that stands for several.

    ``thread``: its number in the CTA. ``lane``: its number in the warp. ``lane_names``: the names in these numbers,
    whose values select the thread. ``names_in_warp``: those of them that differ between lanes of a warp.
    """

    @property
    def thread(self) -> Polynomial: ...

    @property
    def lane(self) -> Polynomial: ...

    @property
    def lane_names(self) -> set[str]: ...

    @property
    def names_in_warp(self) -> set[str]: ...


class ThreadMachine(Machine, ABC):
    """The machine of one thread that stores sums to D.

    ``progress``: what the thread has done so far on the path that is executed. ``depth``: the number of enclosing
    branches whose condition depends on the thread's number. ``proven_loops``: head of a loop -> a function that gets
    the head and the registers there, proves the loop, and returns the block after it and the registers there.
    """

    facts: OpenFacts

    def __init__(self, program: Program, contract: Contract, facts: OpenFacts, kinds: Kinds, thread: AnyThread) -> None:
        super().__init__(program, replace(contract, lanes=1, slices=None, facts=facts), kinds)
        self.thread = thread
        self.progress, self.depth = Progress(), 0
        self.proven_loops: dict[int, Callable[[int, Registers], tuple[int, Registers]]] = {}
        # The text calls these names. They are replaced so that conditions which are not decided yet stay symbolic.
        arithmetic_names = abstract.names_of_arithmetic(contract.type_of("D"))
        pack = arithmetic_names["pack_f32"]
        arithmetic_names |= {
            "divide": self.divide, "mulhi": partial(abstract.high_product, quotient_of=self.divide),
            "pack_f32": lambda *x: pack(*map(settled, x)),
        }  # fmt: skip
        select: Callable[..., Any] = lambda test, yes, no: chosen(test, yes, no, abstract.select)  # noqa: E731
        split: Callable[..., Any] = self.scope["SPLIT"]  # type: ignore[assignment]
        self.scope |= {
            "SEL": select, "WHERE": select, "SPLIT": lambda value, *rest: split(settled(value), *rest),
            "A": abstract.Named(arithmetic_names, arithmetic),
            "np": abstract.Named({"minimum": least, "where": select}, np),
        }  # fmt: skip

    # --- running

    def follow(
        self, block: int, registers: Registers, until: int | None, stops: Iterable[int], reached: Reached
    ) -> Any:
        """Execute from a block to block ``until`` (None: no block), and return the registers there; None if all paths
        end before. A path ends at the kernel's end or at a block of ``stops``, except if that is the first block.
        ``reached`` is called for each such end, with the block (None at the kernel's end) and the registers. Raises
        NotCertified."""
        first = True
        while block != until or first:
            if block in stops and not first:
                reached(block, registers)
                return None
            if block in self.proven_loops and not first:
                block, registers = self.proven_loops[block](block, registers)
                continue
            first = False
            following = self._step(block, registers)
            if following is None:
                reached(None, registers)
                return None
            if isinstance(following, int):
                block = following
                continue
            join = self.program.joins[block]
            after = self._both_sides(block, following, registers, stops, reached)
            if after is None:
                return None
            assert join is not None
            block, registers = join, after
        return registers

    def _step(self, block: int, registers: Registers) -> int | Condition | None:
        """Execute a block. Returns the block that follows, None at the end, or the condition under which the first of
        the block's targets follows."""
        node, piece = self.program.blocks[block], self.program.pieces[block]
        end = self._end_of(block, registers)
        if end != "cond":
            return None if end == "exit" else node.targets[0]
        test = settled(registers.get(piece.condition or ""))
        if isinstance(test, Condition):
            return ~test if piece.negated else test
        values = np.asarray(test)
        if values.dtype != bool or values.size != 1:
            return self.unknown_branch()
        return node.targets[0 if bool(values.flat[0]) != piece.negated else 1]

    def unknown_branch(self) -> Condition:
        """The condition of a branch by a predicate that is not known. Raises NotCertified where there may be none."""
        raise NotCertified("a branch by a predicate that is not known")

    def _both_sides(
        self, block: int, test: Condition, registers: Registers, stops: Iterable[int], reached: Reached
    ) -> Registers | None:
        """Execute both sides of a branch, ``test`` being the condition of its first target. Returns the registers at
        the block where the sides meet; None if both end before. A register in which they differ is unknown there.
        Raises NotCertified if the condition depends on the thread and the sides do not meet."""
        join, before = self.program.joins[block], self.progress
        by_thread = bool(test.names() & self.thread.lane_names)
        sides: list[tuple[Condition, Any, Progress]] = []
        self.depth += by_thread
        for target, side in zip(self.program.blocks[block].targets, (test, ~test), strict=True):
            with self.facts.side(side):
                self.progress = before.copied()
                # A side without blocks leads to the meeting point at once.
                mine = dict(registers)
                after = mine if target == join else self.follow_side(target, mine, join, stops, reached)
                sides.append((side, after, self.progress))
        self.depth -= by_thread
        alive = [side for side in sides if side[1] is not None]
        if by_thread and len(alive) < 2:
            raise NotCertified("threads of a group diverge and do not meet again")
        if not alive:
            return None
        self.progress = alive[0][2] if len(alive) == 1 else self._met_progress(sides)
        if len(alive) == 1:
            self.facts.assume(alive[0][0])  # the other side has ended
            return dict(alive[0][1])
        out = dict(registers)
        for register in self.program.live(join if join is not None else block):
            name = self.program.emitter.variable(register)
            a, b = (side[1].get(name) for side in sides)
            out[name] = a if same_value(a, b) else UNKNOWN
        return out

    def follow_side(
        self, block: int, registers: Registers, until: int | None, stops: Iterable[int], reached: Reached
    ) -> Any:
        """As ``follow``, but the first block may also be a stop or the head of a proven loop."""
        if block in stops:
            reached(block, registers)
            return None
        if block in self.proven_loops:
            block, registers = self.proven_loops[block](block, registers)
            return registers if block == until else self.follow_side(block, registers, until, stops, reached)
        return self.follow(block, registers, until, stops, reached)

    def _met_progress(self, sides: list[tuple[Condition, Any, Progress]]) -> Progress:
        """The progress where the sides of a branch meet. ``sides``: the condition, registers and progress of each. A
        sum that only one side stores must lie beyond D on the other one; else NotCertified is raised."""
        (_, _, a), (_, _, b) = sides
        out = a.copied()
        for key in a.stored.keys() | b.stored.keys():
            stored = a.stored.get(key) or b.stored[key]
            for test, _, progress in sides:
                if key not in progress.stored:
                    with self.facts.side(test):
                        self._check_beyond(stored)
            out.stored[key] = replace(stored, exactly=True)
        return out

    def _check_beyond(self, stored: Stored) -> None:
        """Raise NotCertified unless facts show that a sum need not be stored."""
        if not any(self.facts.truth(gap) for gap in self.beyond(stored)):
            raise NotCertified(f"D({stored.row}, {stored.col}) may not be stored")

    def beyond(self, stored: Stored) -> tuple[Polynomial, ...]:
        """Polynomials, of which at least one must be at least 0 where a sum is not stored: then it lies beyond D."""
        d = self.matrix("D")
        return stored.row - d.rows, stored.col - d.cols

    def matrix(self, name: str) -> Matrix:
        """The operand with a name, which must exist."""
        return next(x for x in self.contract.matrices if x.name == name)

    # --- values

    def lanes_of(self, name: str) -> Any:
        """The value of a special register that may differ between threads."""
        if name == "%tid.x":
            return Word(self.thread.thread, 32, self.facts)
        if name == "%laneid":
            return Word(self.thread.lane, 32, self.facts)
        return np.zeros(1, "u4") if name in ("%tid.y", "%tid.z") else self._special(name)

    def shuffle(self, mode: str, value: Any, lane: Any, clamp: Any, members: Any, m: Mask, _site: int) -> Any:
        """shfl.sync from lane 0 to all lanes of a warp, of a value that is the same in all of them: the value, and that
        its source was in range. Raises NotCertified for any other shuffle."""
        is_broadcast = mode == "idx" and not self._number(lane).any() and (self._number(clamp) == 31).all()
        if m is not None or self.depth or not is_broadcast or (self._number(members) != 0xFFFFFFFF).any():
            raise NotCertified("a shuffle other than a broadcast of the warp's first lane")
        if not is_number(value) or set(poly_of(value).names()) & self.thread.names_in_warp:
            raise NotCertified("a shuffle of what differs between the lanes of a warp")
        return value, np.ones(1, bool)

    def divide(self, a: Any, b: Any) -> Any:
        """As ``abstract.divide``, but the quotient may also be a name that ``facts.fractions`` defines as this one."""
        word = a if isinstance(a, Word) else b
        if isinstance(word, Word):
            x, y = (Word(polynomial(each, word.bits), word.bits, self.facts, word.signed).number() for each in (a, b))
            if (defined := self.facts.fraction(x, y)) is not None:
                # The quotient is at most the dividend, which fits the word.
                self.facts.learn(Polynomial.of((1 << min(word.bits - word.signed, 62)) - 1) - defined[0])
                return Word(defined[0], word.bits, self.facts, word.signed)
        return abstract.divide(a, b)

    # --- D

    def store(self, address: Any, value: Any, size: int, m: Mask, _site: int = 0, strength: int = 0) -> None:
        """st.global. Raises NotCertified if it is predicated and the predicate is not decided on this path."""
        test = settled(m)
        if isinstance(test, Condition):
            raise NotCertified("a store under a predicate that depends on the problem")
        if test is None or test.any():
            self.store_sums(address, settled(value), size, strength)

    def store_sums(self, address: Any, value: Any, size: int, _strength: int) -> None:
        """Store ``size`` bytes of sums from a byte address of D on. Raises NotCertified unless they are complete sums
        of D's type, and the access is aligned."""
        d = self.matrix("D")
        if not isinstance(value, Cells) or isinstance(value, Partial):
            raise NotCertified("what is stored to D is not a sum over all slices")
        if value.width != d.width or value.bytes != size:
            raise NotCertified("what is stored to D is not a sum of its type")
        if size > d.width and Multiple(polynomial(address, 64), size, True).truth(self.facts) is not True:
            raise NotCertified(f"a store of {size} bytes to D may not be aligned")
        for i in range(size // d.width):
            self.store_sum(address + i * d.width, value.part(i, i + 1), d)

    @abstractmethod
    def store_sum(self, address: Any, value: Cells, d: Matrix) -> None:
        """Note in ``progress`` that one sum is stored to D. Raises NotCertified unless it belongs to the element at the
        byte address, and is stored for the first time."""


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a register are known to be the same."""
    if a is b:
        return True
    return is_number(a) and is_number(b) and bits_of(a) == bits_of(b) and poly_of(a).equals(poly_of(b))


def least(a: Any, b: Any) -> Any:
    """The smaller one of two numbers in each lane. Raises NotCertified if facts do not decide which one that is."""
    if not isinstance(a, Word) and not isinstance(b, Word):
        return np.minimum(a, b)
    if (smaller := abstract.defined_least(a, b)) is not None:
        return smaller
    for first, second in ((a, b), (b, a)):
        test = settled(first <= second)
        if isinstance(test, np.ndarray):
            return abstract.select(test, first, second)
    raise NotCertified(f"the smaller one of {a} and {b} is not known")
