"""Predicates that hold for some problems and threads only: a proof takes both sides of a branch by such a predicate.

A comparison that other facts cannot decide raises ``Undecided``. With ``OpenFacts`` it becomes a ``Condition``. A
branch or a predicated instruction assumes the condition on one side, and its negation on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelproof.certificates.facts import NO_BOUND, UNBOUNDED, Facts, NotCertified
from kernelproof.certificates.polynomials import Lanes, Monomial, Polynomial
from kernelproof.certificates.sieve import Sieve


@dataclass
class OpenFacts(Facts):
    """Facts of a problem, to which a side of a branch adds its condition. ``multiples``: polynomials, each with a power
    of two that divides it. ``by_lane``: polynomials that are at least 0, and differ between lanes. ``asks``: whether
    the solver is asked where bounds do not decide. ``private``: names that tell threads apart. ``names_of_high_bits``:
    (polynomial, number of low bits, number of all bits) -> the name of the number without its low bits."""

    multiples: list[tuple[Polynomial, int]] = field(default_factory=list)
    by_lane: list[Polynomial] = field(default_factory=list)
    asks: bool = True
    private: frozenset[str] = frozenset()
    names_of_high_bits: dict[object, str] = field(default_factory=dict)
    _sieved: tuple[list[Polynomial], Sieve, Sieve] | None = None
    _scaled_facts: dict[object, tuple[list[Polynomial], Sieve, list[Polynomial]]] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Facts, *assumed: Polynomial) -> OpenFacts:
        return cls(
            dict(facts.bounds), [*facts.assumed, *assumed], facts.questions, list(facts.quotients),
            list(facts.fractions), list(facts.minima), list(facts.reciprocals),
        )  # fmt: skip

    def learn(self, *assumed: Polynomial) -> None:
        """Assume that more polynomials are at least 0, up to the end of the side."""
        reduced = [_reduced(each) for each in assumed]
        self.assumed = [*self.assumed, *(each for each in reduced if each.same_in_all_lanes)]
        self.by_lane = [*self.by_lane, *(each for each in reduced if not each.same_in_all_lanes)]

    def _known(self, value: Polynomial, used: int) -> Lanes:
        """As in ``Facts``, but after division by the coefficients' common divisor, and also by sums of two facts."""
        value = _reduced(value)
        if not value.same_in_all_lanes:
            return self._known_by_lane(value)
        low, high = self.interval(value)
        if low >= 0 or high < 0:
            return np.array([int(low >= 0)])
        single, sums = self._sieves()
        # Either value >= sum >= 0, or value < -sum <= 0, for one fact or the sum of two.
        for sign, other in ((1, value), (0, -value - 1)):
            for number in sums.below(other):
                if self.interval(other - self._sum(single, number))[0] >= 0:
                    return np.array([sign])
        return super()._known(value, used)

    def _known_by_lane(self, value: Polynomial) -> Lanes:
        """The answer for a polynomial that differs between lanes: by the bounds of names and by one assumed polynomial,
        the newest first, since it decides most questions."""
        low, high = self.interval(value)
        answer = np.where(np.asarray(high) < 0, 0, np.where(np.asarray(low) >= 0, 1, -1))
        for each in (*reversed(self.by_lane), *reversed(self.assumed)):
            if (answer != -1).all():
                break
            # Either value >= each >= 0, or value < -each <= 0.
            answer = np.where((answer == -1) & (np.asarray(self.interval(value - each)[0]) >= 0), 1, answer)
            answer = np.where((answer == -1) & (np.asarray(self.interval(value + each + 1)[1]) <= 0), 0, answer)
        return answer

    def _sieves(self) -> tuple[Sieve, Sieve]:
        """Sieves of what is assumed, and of that with sums of two facts."""
        if self._sieved is None or self._sieved[0] is not self.assumed:
            single = Sieve(self.assumed, self._bounds_of)
            self._sieved = self.assumed, single, single.with_sums()
        return self._sieved[1:]

    def _sum(self, single: Sieve, number: int) -> Polynomial:
        """The polynomial with a number in the second sieve."""
        count = len(self.assumed)
        if number < count:
            return self.assumed[number]
        return self.assumed[int(single.first[number - count])] + self.assumed[int(single.second[number - count])]

    def _single(self, _value: Polynomial, _assumed: list[Polynomial]) -> Lanes:
        """No answer: ``_known`` has tried all single facts before."""
        return np.array([-1])

    def _products(self, value: Polynomial, assumed: list[Polynomial]) -> Iterator[Polynomial]:
        """As in ``Facts``, without those that cannot suffice."""
        linear = [each for each in assumed if all(len(monomial) < 2 for monomial in each.terms)]
        for name in dict.fromkeys(value.names()) if linear else ():
            key = name, tuple(map(id, linear))
            if key not in self._scaled_facts:
                rows = [each * Polynomial.named(name) for each in linear]
                self._scaled_facts[key] = rows, Sieve(rows, self._bounds_of), linear
            rows, sieve, _ = self._scaled_facts[key]
            yield from (value - rows[number] for number in sieve.below(value))

    def _bounds_of(self, monomial: Monomial) -> tuple[int, int]:
        """Bounds of a product of names. An upper bound that is not known is replaced by a number that outweighs every
        other term."""
        least, most = self._monomial(monomial)
        return least, NO_BOUND << 32 if most >= UNBOUNDED else most

    def interval(self, value: Polynomial) -> tuple[Any, Any]:
        """As in ``Facts``, but with exact integers, which do not wrap, if only the constant differs between lanes."""
        low = high = 0
        own: Any = 0  # the constant of each lane
        for monomial, coefficient in value.terms.items():
            if isinstance(coefficient, np.ndarray):
                if monomial or np.abs(coefficient).max() >= UNBOUNDED:
                    return super().interval(value)
                own = coefficient
                continue
            least, far = self._bounds_of(monomial) if monomial else (1, 1)
            a, b = (least, far) if coefficient > 0 else (far, least)
            low, high = low + int(coefficient) * a, high + int(coefficient) * b
        return (
            own + (max(low, -NO_BOUND) if low < UNBOUNDED else UNBOUNDED),
            own + (min(high, NO_BOUND) if high > -UNBOUNDED else -UNBOUNDED),
        )

    def higher(self, number: Polynomial, low: int, bits: int) -> Polynomial:
        """A name for a number of ``bits`` bits, divided by 2^low and rounded down. Raises NotCertified unless the
        number is the same in all threads."""
        if self.private & {*number.names()}:
            raise NotCertified(f"bits of {number} are not known")
        name = self.names_of_high_bits.setdefault((number.key, low, bits), f"above_{len(self.names_of_high_bits)}")
        self.bounds[(name,)] = (0, (1 << (bits - low)) - 1)
        return Polynomial.named(name)

    def holds(self, value: Polynomial) -> bool:
        """As in ``Facts``. While the solver is not asked, what bounds do not show counts as false."""
        return super().holds(value) if self.asks else self.truth(value) is True

    @contextmanager
    def without_solver(self) -> Iterator[None]:
        """Do not ask the solver within this context."""
        before, self.asks = self.asks, False
        try:
            yield
        finally:
            self.asks = before

    def truth(self, gap: Polynomial) -> bool | None:
        """Is a polynomial at least 0? None if that is not known without a solver."""
        known = self.known(gap)
        return None if (known == -1).any() else bool(known.all())

    def assume(self, condition: Condition) -> None:
        """Assume a condition from now on, up to the end of the side."""
        atoms = condition.implied()
        self.multiples = [
            *self.multiples,
            *((x.number, x.divisor) for x in atoms if isinstance(x, Multiple) and x.holds),
        ]
        self.learn(*(atom.gap for atom in atoms if isinstance(atom, AtLeast)))

    @contextmanager
    def side(self, condition: Condition) -> Iterator[None]:
        """Assume a condition within this context."""
        before = self.assumed, self.by_lane, self._answers, self.multiples
        self._answers = dict(self._answers)
        self.assume(condition)
        try:
            yield
        finally:
            self.assumed, self.by_lane, self._answers, self.multiples = before


def _reduced(value: Polynomial) -> Polynomial:
    """The polynomial divided by its coefficients' common divisor, and rounded down: it is at least 0 where the given
    one is."""
    coefficients = [np.ravel(np.asarray(c, object)) for monomial, c in value.terms.items() if monomial]
    common = int(np.gcd.reduce(np.concatenate([[0], *coefficients]), dtype=object))
    return Polynomial({monomial: c // common for monomial, c in value.terms.items()}) if common > 1 else value


@dataclass(frozen=True)
class AtLeast:
    """The statement that a polynomial is at least 0."""

    gap: Polynomial

    def negation(self) -> AtLeast:
        """The statement that this one is false."""
        return AtLeast(-self.gap - 1)

    def known(self, facts: OpenFacts) -> Lanes:
        """For each lane (or once for all) whether it is true: 1 yes, 0 no, -1 not known without a solver."""
        return facts.known(self.gap)

    @property
    def key(self) -> object:
        """A key that is equal for equal statements."""
        return self.gap.key

    def names(self) -> set[str]:
        """The names on which it depends."""
        return set(self.gap.names())


@dataclass(frozen=True)
class Multiple:
    """The statement that a number is a multiple of a power of two or, unless it ``holds``, that it is not."""

    number: Polynomial
    divisor: int
    holds: bool

    def negation(self) -> Multiple:
        return Multiple(self.number, self.divisor, not self.holds)

    def truth(self, facts: OpenFacts) -> bool | None:
        """Whether the condition holds by the facts; None if they do not say."""
        for number, divisor in facts.multiples:
            if divisor % self.divisor == 0 and number.equals(self.number):
                return self.holds
        if all(int(c) % self.divisor == 0 for c in self.number.terms.values()):
            return self.holds
        return None

    def known(self, facts: OpenFacts) -> Lanes:
        truth = self.truth(facts)
        return np.array([-1 if truth is None else int(truth)])

    @property
    def key(self) -> object:
        return self.number.key, self.divisor, self.holds

    def names(self) -> set[str]:
        return set(self.number.names())


@dataclass(frozen=True)
class Unstated:
    """A statement of which nothing is known. ``private``: names that tell threads apart; the statement may hold for
    some values of these and not for others."""

    private: frozenset[str]

    def negation(self) -> Unstated:
        return self

    def known(self, _: OpenFacts) -> Lanes:
        return np.array([-1])

    @property
    def key(self) -> object:
        return self.private

    def names(self) -> set[str]:
        return set(self.private)


@dataclass(frozen=True)
class Bits:
    """Some bits of a number, of which only a comparison with 0 is known: they are not all 0 where ``some`` holds."""

    facts: OpenFacts
    some: AtLeast | Multiple

    def __ne__(self, other: object) -> Any:
        if not (isinstance(other, int | np.integer) and other == 0):
            raise NotCertified("bits of a number that are not known are compared with others than 0")
        return Condition(self.facts, (self.some,)).settled()

    def __eq__(self, other: object) -> Any:
        return ~(self != other)

    __hash__ = None  # type: ignore[assignment]


class Condition:
    """A predicate: all of its atoms hold or, with ``any``, at least one. Atoms are ``AtLeast`` and ``Multiple``."""

    __array_ufunc__ = None
    __slots__ = ("any", "atoms", "facts")

    def __init__(self, facts: OpenFacts, atoms: tuple[Any, ...], any_of: bool = False) -> None:
        self.facts, self.atoms, self.any = facts, atoms, any_of

    def known(self) -> Lanes:
        """For each lane (or once for all) whether the condition holds: 1 yes, 0 no, -1 not known."""
        return self._joined([atom.known(self.facts) for atom in self.atoms])

    def _joined(self, answers: list[Lanes]) -> Lanes:
        """The answer for the condition, by those for its atoms."""
        out = answers[0]
        for each in answers[1:]:
            decisive = (out == int(self.any)) | (each == int(self.any))
            out = np.where(decisive, int(self.any), np.where((out == -1) | (each == -1), -1, int(not self.any)))
        return out

    def settled(self) -> Any:
        """The condition, or its truth in each lane (or once for all) if that is known by now. Atoms that hold in every
        lane, or with ``any`` in none, are left out."""
        answers = [atom.known(self.facts) for atom in self.atoms]
        known = self._joined(answers)
        if (known != -1).all():
            return known == 1
        left = [atom for atom, answer in zip(self.atoms, answers, strict=True) if (answer != int(not self.any)).any()]
        return Condition(self.facts, tuple(left), self.any and len(left) > 1)

    def implied(self) -> tuple[Any, ...]:
        """Atoms that hold where the condition does."""
        return () if self.any else self.atoms

    def names(self) -> set[str]:
        """The names on which it depends."""
        return set[str]().union(*(atom.names() for atom in self.atoms))

    @property
    def key(self) -> object:
        return self.any, frozenset(atom.key for atom in self.atoms)

    def __invert__(self) -> Condition:
        return Condition(self.facts, tuple(x.negation() for x in self.atoms), not self.any and len(self.atoms) > 1)

    def _combined(self, other: Any, any_of: bool) -> Any:
        """This predicate and another one or, with ``any_of``, this one or the other."""
        if isinstance(other, Condition):
            same = all(each.any is any_of or len(each.atoms) == 1 for each in (self, other))
            if not same:
                raise NotCertified("a predicate of conditions that are not all joined by and, or all by or")
            return Condition(self.facts, self.atoms + other.atoms, any_of).settled()
        values = np.asarray(other)
        if values.dtype != bool or values.size != 1:
            raise NotCertified("a predicate by what is not known")
        return np.array([any_of]) if bool(values.flat[0]) is any_of else self

    def __and__(self, other: Any) -> Any:
        return self._combined(other, False)

    def __or__(self, other: Any) -> Any:
        return self._combined(other, True)

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise NotCertified("a predicate that depends on the problem is taken for a number")

    def __repr__(self) -> str:
        return f"{'any' if self.any else 'all'} of {', '.join(map(str, self.atoms))}"


def at_least(facts: OpenFacts, *gaps: Polynomial) -> Condition:
    """The condition that some polynomials are at least 0."""
    return Condition(facts, tuple(AtLeast(gap) for gap in gaps))


def settled(value: Any) -> Any:
    """A value without those conditions and choices that its facts decide by now."""
    if isinstance(value, Condition):
        return value.settled()
    while isinstance(value, Chosen):
        test = value.test.settled()
        if isinstance(test, Condition) or test.any() != test.all():
            return value
        value = value.yes if test.all() else value.no
    return value


def chosen(test: Any, yes: Any, no: Any, select: Callable[[Any, Any, Any], Any]) -> Any:
    """One value where a test holds and another elsewhere: a ``Chosen``, or by ``select`` if the test is decided."""
    test = settled(test)
    return Chosen(test, yes, no) if isinstance(test, Condition) else select(test, settled(yes), settled(no))


class Chosen:
    """One value where a condition holds, and another elsewhere."""

    __array_ufunc__ = None
    __slots__ = ("no", "test", "yes")

    def __init__(self, test: Condition, yes: Any, no: Any) -> None:
        self.test, self.yes, self.no = test, yes, no

    def each(self, operation: Callable[[Any], Any]) -> Any:
        """The value after an operation on both of its alternatives."""
        value = settled(self)
        if isinstance(value, Chosen):
            return Chosen(value.test, operation(value.yes), operation(value.no))
        return operation(value)

    def view(self, kind: Any) -> Any:
        return self.each(lambda value: value.view(kind))

    def __add__(self, other: Any) -> Any:
        value, other = settled(self), settled(other)
        if isinstance(value, Chosen) and isinstance(other, Chosen):
            if value.test.key != other.test.key:
                raise NotCertified("values that depend on different conditions are added")
            return Chosen(value.test, value.yes + other.yes, value.no + other.no)
        return value.each(lambda value: value + other) if isinstance(value, Chosen) else value + other

    __radd__ = __add__

    def __bool__(self) -> bool:
        raise NotCertified("what depends on the problem is taken for a predicate")

    def __lshift__(self, count: Any) -> Any:
        return self.each(lambda value: value << count)

    def __ne__(self, other: object) -> Any:
        value = settled(self)
        if not isinstance(value, Chosen):
            return value != other
        sides = [np.asarray(each != other) for each in (value.yes, value.no)]
        if any(side.dtype != bool or side.size != 1 for side in sides):
            raise NotCertified("a predicate by what is not known")
        yes, no = (bool(side.flat[0]) for side in sides)
        return np.array([yes]) if yes is no else (value.test if yes else ~value.test)

    def __eq__(self, other: object) -> Any:
        different = self != other
        return ~different

    __hash__ = None  # type: ignore[assignment]
