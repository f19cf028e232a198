"""Replaces functions that the emulator's text calls by ones that also accept words and elements.

The text calls units, NumPy's functions and the emulator's arithmetic by names; ``names`` returns the replacements. A
function without a replacement accepts known numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, joined
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.reductions import Terms
from kernelproof.certificates.words import Word, polynomial, quotient
from kernelproof.emulator import arithmetic
from kernelproof.emulator.frontend.translate import NAMESPACE

HALVES = ("f16", "bf16")


class Named:
    """An object that has these functions as attributes, and all others of ``rest``, which then accept known numbers
    only. If ``rest`` is None, every other attribute raises NotCertified."""

    def __init__(self, functions: dict[str, Any], rest: Any = None) -> None:
        self.__dict__.update(functions)
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        if self._rest is None:
            raise NotCertified(f"{name} is not covered")
        return _concrete(getattr(self._rest, name), name)


def _concrete(function: Any, name: str) -> Any:
    """Wrap a function of the emulator that takes arrays only: it gets known words as arrays, and raises NotCertified
    for other words and for elements."""
    if not callable(function):
        return function

    def call(*arguments: Any) -> Any:
        known = [_known(each) for each in arguments]
        if any(isinstance(each, Word | Cells) for each in known):
            raise NotCertified(f"{name} of what depends on the problem")
        return function(*known)

    return call


def _known(value: Any) -> Any:
    """A value; an array in place of a word whose value is known in each lane."""
    if isinstance(value, Word) and value.poly.is_constant and isinstance(value.poly.constant, np.ndarray):
        return value.poly.constant.astype(f"i{value.bits // 8}").view(
            f"{'i' if value.signed else 'u'}{value.bits // 8}"
        )
    return value


def select(test: Any, yes: Any, no: Any) -> Any:
    """Choose, lane by lane, one value where a test holds and another elsewhere."""
    test = np.asarray(test)
    if test.all() or not test.any():
        value = yes if test.all() else no
        return np.atleast_1d(value) if isinstance(value, np.generic) else value
    if isinstance(yes, Word) or isinstance(no, Word):
        word = yes if isinstance(yes, Word) else no
        return Word(polynomial(yes, word.bits).where(test, polynomial(no, word.bits)), word.bits, word.facts)
    if isinstance(yes, Terms):
        return yes.where(test, no)
    if isinstance(no, Terms):
        return no.where(~test, yes)
    if isinstance(yes, Cells) and isinstance(no, Cells):
        return yes.where(test, no)
    if isinstance(yes, Cells) or isinstance(no, Cells) or no is None:
        raise NotCertified("some lanes get elements, and others numbers")
    return np.where(test, yes, no)


def _surely_at_most(low: Any, high: Any) -> bool:
    """Whether bounds of names suffice to say that one number is at most another one in every lane."""
    word = low if isinstance(low, Word) else high
    x, y = (Word(polynomial(each, word.bits), word.bits, word.facts, word.signed).number() for each in (low, high))
    return bool(word.facts.known(y - x).min() == 1)


def _extreme(largest: bool) -> Callable[[Any, Any], Any]:
    """The function that returns the larger, or the smaller, of two numbers. It must be known which that is."""

    def extreme(a: Any, b: Any) -> Any:
        if not isinstance(a, Word) and not isinstance(b, Word):
            return (np.maximum if largest else np.minimum)(a, b)
        low, high = (b, a) if largest else (a, b)
        # Try bounds in both directions first: asked about the false one, the solver may not end.
        if _surely_at_most(low, high):
            return a
        if _surely_at_most(high, low):
            return b
        try:
            return select(low <= high, a, b)
        except NotCertified:
            return select(high <= low, b, a)

    return extreme


def _insert(a: Any, b: Any, start: Any, length: Any) -> Any:
    """bfi: insert the low ``length`` bits of ``a`` into ``b`` from bit ``start`` on. All must be known, except for an
    ``a`` whose bits reach the top of the register."""
    at, count = _one(start) & 255, _one(length) & 255
    if not isinstance(a, Word) and not isinstance(b, Word):
        return arithmetic.bfi(a, b, start, length)
    if not isinstance(b, Word) and isinstance(a, Word) and at + count >= a.bits:
        return (a << at) | (b & ((1 << at) - 1))
    raise NotCertified("bits of what depends on the problem are inserted")


def _one(value: Any) -> int:
    """A known number that is the same in all lanes."""
    numbers = np.asarray(value)
    if not (numbers == numbers.flat[0]).all():
        raise NotCertified("lanes insert at different places")
    return int(numbers.flat[0])


def _high_product(a: Any, b: Any) -> Any:
    """The high half of a product."""
    if not isinstance(a, Word) and not isinstance(b, Word):
        return arithmetic.mulhi(a, b)
    word = a if isinstance(a, Word) else b
    factors = [Word(polynomial(each, word.bits), word.bits, word.facts, word.signed).number() for each in (a, b)]
    if any(not each.same_in_all_lanes for each in factors):
        raise NotCertified("the high half of a product that differs between lanes")
    product = factors[0] * factors[1]
    return Word(quotient(product, 1 << word.bits, word.facts), word.bits, word.facts, word.signed)


def divide(a: Any, b: Any) -> Any:
    """The quotient of two integers. If one is a word, both must not be negative, and the quotient is rounded down."""
    if isinstance(a, Word) or isinstance(b, Word):
        return _quotient(a, b)[0]
    return arithmetic.divide(a, b)


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, Word) or isinstance(b, Word):
        return _quotient(a, b)[1]
    return arithmetic.remainder(a, b)


def _quotient(a: Any, b: Any) -> tuple[Word, Word]:
    """Quotient and remainder of numbers that are not negative. The quotient is guessed among the names that occur. A
    guess is right if the remainder is then from 0 to below the divisor, which is checked."""
    word = a if isinstance(a, Word) else b
    facts = word.facts
    x, y = (Word(polynomial(each, word.bits), word.bits, facts, word.signed).number() for each in (a, b))
    if facts.holds(x) and facts.holds(y - 1):
        for quotient in _candidates(x, y):
            rest = x - y * quotient
            if facts.known(rest).min() == 1 and facts.known(y - 1 - rest).min() == 1:
                return Word(quotient, word.bits, facts, word.signed), Word(rest, word.bits, facts, word.signed)
    raise NotCertified(f"the quotient of {x} and {y} is not known")


def _candidates(x: Any, y: Any) -> Any:
    """Polynomials that may be the quotient of ``x`` and ``y``."""
    yield Polynomial.of(0)
    if y.is_constant and isinstance(y.constant, int):
        yield x.divided(y.constant)[0]
    for name in dict.fromkeys(x.names()):
        yield Polynomial.named(name)


def _split(values: Any, count: int, width: int, lanes: int) -> Any:
    """Split what a vector access has loaded into ``count`` registers of ``width`` bytes."""
    if isinstance(values, Cells):
        if width % values.width:
            raise NotCertified("an element is taken apart")
        step = width // values.width
        return [values.part(i * step, i * step + step) for i in range(count)]
    if isinstance(values, Word):
        raise NotCertified("a word that depends on the problem is taken apart")
    return NAMESPACE["SPLIT"](values, count, width, lanes)  # type: ignore[operator]


def _join(parts: tuple[Any, ...], width: int) -> Any:
    """Join registers of ``width`` bytes to what a vector access stores."""
    if all(isinstance(part, Cells) for part in parts):
        return joined(list(parts))
    if any(isinstance(part, Cells | Word) for part in parts):
        raise NotCertified("elements and numbers in one access")
    return NAMESPACE["JOIN"](parts, width)  # type: ignore[operator]


def _pack(output: str) -> Callable[[Any, Any, Any], Any]:
    """cvt.f16x2.f32 or cvt.bf16x2.f32, which rounds two sums to a pair of elements of D."""

    def pack(high: Any, low: Any, convert: Any) -> Any:
        if not (isinstance(high, Cells) and isinstance(low, Cells) and high.width == low.width == 4):
            raise NotCertified("a conversion of what are not sums")
        if output not in HALVES or convert is not _narrowing(output):
            raise NotCertified(f"a conversion that does not round to the nearest {output}")
        return joined([low, high]).of_width(2)

    return pack


_WIDEN = arithmetic.converter("f32", "f16", "rn", False, False)


def _widening(halves: set[str]) -> Callable[[Any], Any]:
    """cvt.f32.f16, which changes no number. ``halves``: the 16-bit types of A and D. Elements have no type of their
    own, so they are known to be of f16 only if no other type is among these."""

    def widen(value: Any) -> Any:
        if not isinstance(value, Cells):
            return _WIDEN(value)
        if halves != {"f16"} or value.width != 2:
            raise NotCertified("a conversion from f16 of what is none")
        return value.of_width(4)

    return widen


@cache
def _narrowing(output: str) -> Callable[[Any], Any]:
    """cvt of a sum in fp32 to an element of D, whose type ``output`` has 16 bits."""
    convert = arithmetic.converter(output, "f32", "rn", False, False)

    def narrow(value: Any) -> Any:
        if not isinstance(value, Cells):
            return convert(value)
        if value.width != 4:
            raise NotCertified("a conversion of what is no sum")
        return value.of_width(2)

    return narrow


def conversions(scope: dict[str, object], operands: str, output: str) -> dict[str, object]:
    """Replacements for the conversions in a text's scope, by their names there. ``operands``, ``output``: the types of
    A and of D."""
    widen = _widening({operands, output} & set(HALVES))
    known: dict[str, object] = {name: widen for name, value in scope.items() if value is _WIDEN}
    if output in HALVES:
        convert = arithmetic.converter(output, "f32", "rn", False, False)
        known |= {name: _narrowing(output) for name, value in scope.items() if value is convert}
    return known


def names_of_arithmetic(output: str) -> dict[str, Callable[..., Any]]:
    """Replacements for functions of the emulator's arithmetic, by their names there. ``output``: the type of D."""
    return {
        "bfi": _insert, "divide": divide, "remainder": _remainder, "mulhi": _high_product, "pack_f32": _pack(output),
    }  # fmt: skip


def names(lanes: int, units: dict[str, dict[str, Callable[..., Any]]], output: str) -> dict[str, object]:
    """The names of a text's scope whose values differ from the emulator's, for a CTA of so many lanes. ``units``: name
    of a unit -> its methods. ``output``: the type of D."""

    def numbers(value: Any, width: int) -> Any:
        """A number in all lanes; predicates have width 0."""
        if isinstance(value, Word | Cells):
            return value
        return np.full(lanes, value, f"u{width}" if width else bool)

    numpy = {"where": select, "minimum": _extreme(False), "maximum": _extreme(True), "negative": lambda a: -a}
    return {
        "K": numbers,
        "SEL": select,
        "WHERE": select,
        "SPLIT": _split,
        "JOIN": _join,
        "FORCE": lambda value: value,
        "np": Named(numpy, np),
        "A": Named(names_of_arithmetic(output), arithmetic),
        **{name: Named(dict(methods)) for name, methods in units.items()},
    }
