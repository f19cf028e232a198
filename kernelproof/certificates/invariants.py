"""Loop invariants: what holds of registers and shared memory at a loop's head in every iteration, and its check.

An invariant says by how much registers and elements change from one iteration to the next. So with the state of
iteration 0 it gives the state of every iteration. For example, if register r is ``a + 64`` in iteration 0 and has the
step 128, it is ``a + 64 + 128 * k_turn`` in iteration ``k_turn``; an element A(i, 0) whose kind has the step 32 is
A(i, 32 * k_turn).

An invariant may say less than is true: that a register or element is not known, or that an element of shared memory
may have been read by several threads. It is not trusted. ``guessing`` guesses it, or a certificate contains it; then
``loops``, ``roles`` and ``items`` show that it holds at the loop's entry and that an iteration preserves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kernelproof.certificates.cells import UNKNOWN, Cells, Kind, Kinds, SummedRange
from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.machine import State
from kernelproof.certificates.polynomials import ZERO, Lanes, Polynomial
from kernelproof.certificates.reductions import Terms
from kernelproof.certificates.shared_memory import ELEMENT, NOBODY, SEVERAL
from kernelproof.certificates.words import Word, polynomial
from kernelproof.ground.chips import WARP
from kernelproof.ground.schema import Schema

Spelled = dict[str, int]  # a polynomial as JSON (``Polynomial.spelled``)
Ranges = tuple[tuple[int, int], ...]  # runs of elements of shared memory: the numbers of the first and the last one


class SumPlaces(Schema):
    """The elements of D whose sums an accumulator holds. The register is zero in iteration 0: a sum of no products.

    ``row``, ``col``: the parts of their row and column that depend on the problem. ``rows``, ``cols``: for each warp
    the offsets of lane 0. Lane l is l / 4 rows and 2 * (l % 4) columns further, as in mma.sync. ``width``: bytes of a
    sum: 4, or 2 if the register has two sums of adjacent columns.
    """

    row: Spelled
    col: Spelled
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    width: int


class Invariant(Schema):
    """What is stated of the states at a loop's head. Registers have their names in the PTX. A live register that has no
    entry keeps its value, except that its elements move by the steps of their kinds."""

    words: Annotated[dict[str, Spelled], Field(description="register -> its step from one iteration to the next")]
    kinds: Annotated[
        dict[str, int], Field(description="elements of a kind -> the step in k; of a sum, how many products it gains")
    ]
    sums: Annotated[dict[str, SumPlaces], Field(description="accumulators that are zero in iteration 0")]
    terms: Annotated[dict[str, int], Field(description="sums of A's elements -> by how much their ``done`` grows")] = {}
    unknown: Annotated[tuple[str, ...], Field(description="registers of which nothing is stated")]
    unknown_places: Annotated[Ranges, Field(description="the same for elements of shared memory")]
    written: Annotated[Ranges, Field(description="elements that several threads may have written since the barrier")]
    read: Annotated[Ranges, Field(description="elements that several threads may have read since the barrier")]


@dataclass
class Turns:
    """The states at a loop's head in all its iterations ("turns"), by an invariant.

    ``first``: the state in iteration 0. ``live``: the registers that may be read later, which are checked.
    ``variable``: a register's name in the PTX -> its name in the emulator's text.
    """

    invariant: Invariant
    first: State
    live: Iterable[str]
    variable: Callable[[str], str]

    def at(self, turn: Polynomial, facts: Facts, kinds: Kinds) -> State:
        """The state in an iteration, as the invariant states it. ``turn``: the iteration's number, from 0 on.
        ``facts``: those that words of the state get, which must know the names in ``turn``."""
        steps = self.invariant.kinds

        def moved(number: int) -> int:
            """The kind that elements of a kind in iteration 0 have in this iteration."""
            kind = kinds[number]
            step = steps.get(kind.text, 0) if kind is not None else 0
            if kind is not None and kind.is_kept:
                return 0  # what one iteration has stored to shared memory is not known in another one
            if kind is None or not step:
                return number
            if kind.summed is not None:
                return kinds.number(
                    kind._replace(summed=SummedRange(kind.summed.done + turn * step, kind.summed.beyond))
                )
            return kinds.number(kind._replace(col=kind.col + turn * step))

        state = renumbered(self._stated(kinds), moved)
        for register, step in self.invariant.words.items():
            name = self.variable(register)
            value = state.registers[name]
            state.registers[name] = Word(poly_of(value) + Polynomial.parsed(step) * turn, bits_of(value), facts)
        for register, more in self.invariant.terms.items():
            name = self.variable(register)
            state.registers[name] = state.registers[name].settled().moved(turn * more)
        return rebound(state, lambda poly: poly, facts)

    def _stated(self, kinds: Kinds) -> State:
        """The state in iteration 0, weakened to what the invariant states: accumulators are sums of no products, what
        it calls unknown is unknown, and elements that several threads may have accessed are marked SEVERAL."""
        state = self.first.copied()
        for register, places in self.invariant.sums.items():
            state.registers[self.variable(register)] = _no_sums(places, kinds)
        for register in self.invariant.unknown:
            state.registers[self.variable(register)] = UNKNOWN
        invariant = self.invariant
        if invariant.unknown_places or invariant.written or invariant.read:
            state.shared.own()
        shared = state.shared
        for marks, ranges, mark in (
            (shared.kinds, self.invariant.unknown_places, 0),
            (shared.writer, self.invariant.written, SEVERAL),
            (shared.reader, self.invariant.read, SEVERAL),
        ):
            for start, last in ranges:
                marks[start : last + 1] = mark
        return state

    def check(self, turn: Polynomial, actual: State, facts: Facts, kinds: Kinds) -> None:
        """Raise NotCertified unless everything that is stated of iteration ``turn`` is true of the state ``actual``.

        In the statement, an unknown register or element may be anything, and SEVERAL covers any accesses. An element
        that nobody has accessed satisfies every statement about its accesses.
        """
        general = self.at(turn, facts, kinds)
        for register in sorted(self.live):
            a, b = general.registers.get(self.variable(register)), actual.registers.get(self.variable(register))
            if a is not UNKNOWN and a is not b and not _same_register(a, b, kinds):
                raise NotCertified(f"register {register} is not what turn after turn suggests: {a}, not {b}")
        # Shared memory: x is what is stated, y what is the case.
        x, y = general.shared, actual.shared
        if x.kinds.any():
            match = _elements_match(
                Cells(x.kinds, x.rows, x.cols, ELEMENT), Cells(y.kinds, y.rows, y.cols, ELEMENT), kinds
            )
            if not match[x.kinds != 0].all():
                raise NotCertified("shared memory does not hold what turn after turn suggests")
        for stated, found in ((x.writer, y.writer), (x.reader, y.reader)):
            if ((found != stated) & (stated != SEVERAL) & (found != NOBODY)).any():
                raise NotCertified("accesses to shared memory since the last barrier differ from turn to turn")
        same_groups = len(x.groups) == len(y.groups) and all(map(np.array_equal, x.groups, y.groups))
        if not same_groups or x.open or y.open or (x.pending != y.pending).any():
            raise NotCertified("the pending copies differ from turn to turn")


def _no_sums(places: SumPlaces, kinds: Kinds) -> Cells:
    """An accumulator to which no product has been added: elements of shape (WARP * warps, sums of a register)."""
    lane = np.arange(WARP)
    per_lane = 4 // places.width  # sums of a register, which has 4 bytes
    rows = (np.asarray(places.rows)[:, None] + lane // 4).reshape(-1, 1)
    cols = (np.asarray(places.cols)[:, None] + lane % 4 * 2).reshape(-1, 1) + np.arange(per_lane)
    kind = Kind("sum", Polynomial.parsed(places.row), Polynomial.parsed(places.col), SummedRange(ZERO, 0))
    return Cells(
        np.full(cols.shape, kinds.number(kind)), np.broadcast_to(rows, cols.shape), cols, places.width
    )  # fmt: skip


def _same_register(a: Any, b: Any, kinds: Kinds) -> bool:
    """Whether a register's value ``b`` is the stated one, ``a``. A zero ``b`` is a sum of no products."""
    if isinstance(a, Terms) or isinstance(b, Terms):
        return isinstance(a, Terms) and isinstance(b, Terms) and a.same(b)
    if isinstance(a, Cells):
        if isinstance(b, Cells):
            x, y = kinds[a.one_kind], kinds[b.one_kind]
            if a.rows is b.rows and a.cols is b.cols and x is not None and kind_step(x, y) == 0:
                return True
            return a.kinds.shape == b.kinds.shape and bool(_elements_match(a, b, kinds).all())
        kind = kinds[a.one_kind]
        nothing = kind is not None and kind.summed is not None and not kind.summed.beyond and not kind.summed.done.terms
        return nothing and is_zero(b) and a.bytes == b.dtype.itemsize
    return is_number(a) and is_number(b) and bits_of(a) == bits_of(b) and poly_of(a).equals(poly_of(b))


def kind_step(a: Kind | None, b: Kind | None) -> int | None:
    """By how much k is larger in elements of kind ``b`` than in those of kind ``a``: for elements of operands the
    difference of ``col``, for sums that of ``done``. None if they differ in anything else, or by no known number. 0 if
    both are None."""
    if a is None or b is None or a.source != b.source or not a.row.equals(b.row):
        return 0 if a is None and b is None else None
    if a.summed is None or b.summed is None:
        gap = b.col - a.col
        return int(gap.constant) if a.summed is b.summed and gap.is_constant else None
    gap = b.summed.done - a.summed.done
    same = a.col.equals(b.col) and a.summed.beyond == b.summed.beyond
    return int(gap.constant) if same and gap.is_constant else None


def kind_pairs(a: Lanes, b: Lanes) -> list[tuple[int, int]]:
    """The pairs of kinds that two arrays of the same shape have at the same index, in ascending order."""
    # Each pair becomes one number of 64 bits, since numpy.unique is fast on these.
    codes = np.unique(a.reshape(-1).astype(np.int64) << 32 | b.reshape(-1).astype(np.int64))
    return [(int(code) >> 32, int(code) & 0xFFFFFFFF) for code in codes]


def _elements_match(a: Cells, b: Cells, kinds: Kinds) -> Lanes:
    """A mask of the shape of ``a`` and ``b``: where both hold elements that are known and the same."""
    out = np.zeros(a.kinds.shape, bool)
    for x, y in kind_pairs(a.kinds, b.kinds):
        step = kind_step(kinds[x], kinds[y]) if x and y else None
        if step is not None:
            kind = kinds[x]
            # Kinds that differ in k by ``step`` hold the same elements where offsets of col make up for it. A sum's k
            # has no offset, so kinds of sums must have the same k.
            if step == 0 or kind is None or kind.summed is None:
                where = (a.kinds == x) & (b.kinds == y)
                out |= where & (b.rows == a.rows) & (b.cols + step == a.cols)
    return out


def is_number(value: Any) -> bool:
    """Whether a register's value is a word or an array of numbers."""
    return isinstance(value, Word) or (isinstance(value, np.ndarray) and value.dtype.kind in "iub")


def is_zero(value: Any) -> bool:
    """Whether a register is known to be zero in all lanes."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu" and not value.any()


def bits_of(value: Any) -> int:
    """The bits of a word or of an element of an array; 8 for booleans."""
    return value.bits if isinstance(value, Word) else max(8, value.dtype.itemsize * 8)


def poly_of(value: Any) -> Polynomial:
    """The value of a word or of an array of numbers, modulo 2^``bits_of``. Raises NotCertified for floats."""
    if isinstance(value, np.ndarray) and value.dtype == bool:
        value = value.astype(np.uint8)
    return polynomial(value, bits_of(value))


def renumbered(state: State, number: Callable[[int], int]) -> State:
    """A copy of a state in which elements of kind x have the kind ``number(x)``, in registers and shared memory."""
    table: dict[int, int] = {}  # the results of ``number``
    # id of an array -> the array and its result, since registers share arrays.
    seen: dict[int, tuple[Lanes, Lanes]] = {}

    def mapped(array: Lanes) -> Lanes:
        if id(array) not in seen:
            seen[id(array)] = array, renamed(array)
        return seen[id(array)][1]

    def renamed(array: Lanes) -> Lanes:
        if not array.any():
            return array  # elements that are not known remain unknown
        values, inverse = np.unique(array, return_inverse=True)
        new = [table[x] if x in table else table.setdefault(x, number(x)) for x in map(int, values)]
        return np.asarray(new, np.int64)[inverse].reshape(array.shape)

    out = state.copied()
    for register, value in out.registers.items():
        if isinstance(value, Cells) and not isinstance(value, Terms):
            out.registers[register] = Cells(mapped(value.kinds), value.rows, value.cols, value.width)
    out.shared.kinds = mapped(out.shared.kinds)
    return out


def rebound(state: State, change: Callable[[Polynomial], Polynomial], facts: Facts) -> State:
    """A copy of a state in which the polynomials of all words and sums of A are changed by a function, and words get
    other facts."""
    out = state.copied()
    for register, value in out.registers.items():
        if isinstance(value, Word):
            out.registers[register] = Word(change(value.poly), value.bits, facts, value.signed)
        elif isinstance(value, Terms):
            out.registers[register] = value.mapped(change)
    return out


def substituted(state: State, name: str, value: Polynomial, facts: Facts, kinds: Kinds) -> State:
    """A copy of a state, for the problems in which a name has a value: the value replaces the name in all registers
    and elements. ``facts``: those of these problems."""

    def replaced(poly: Polynomial) -> Polynomial:
        return poly.substituted(name, value)

    def number(old: int) -> int:
        kind = kinds[old]
        if kind is None or kind.is_kept:
            return 0  # a kept value is one of the execution that has stored it
        summed = SummedRange(replaced(kind.summed.done), kind.summed.beyond) if kind.summed else None
        return kinds.number(Kind(kind.source, replaced(kind.row), replaced(kind.col), summed))

    return rebound(renumbered(state, number), replaced, facts)
