"""Defines the functions that a kernel's Python text calls, such as selects and divisions, for symbolic registers.

The emulator translates PTX to Python text that calls NumPy's functions, the emulator's arithmetic and its units by
names. ``machine`` executes this text in a scope in which ``names`` has replaced these functions. The replacements also
accept words (``Word``: integers that depend on the problem) and elements (``Cells``: data known by their origin). A
function without a replacement accepts known numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from kernelproof.certificates.cells import Cells, joined
from kernelproof.certificates.facts import NotCertified, Reciprocal
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.reductions import Terms
from kernelproof.certificates.words import ScaledQuotient, Word, polynomial, quotient
from kernelproof.emulator import arithmetic
from kernelproof.emulator.frontend.translate import NAMESPACE

TYPES_16 = ("f16", "bf16")  # of 16 bits


class Named:
    """Stands for a module or unit in a text's scope. ``functions``: its attributes that are replaced. Other attributes
    are those of ``rest``, and accept known numbers only; if ``rest`` is None, they raise NotCertified."""

    def __init__(self, functions: dict[str, Any], rest: Any = None) -> None:
        self.__dict__.update(functions)
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        if self._rest is None:
            raise NotCertified(f"{name} is not covered")
        return _concrete(getattr(self._rest, name), name)


def _concrete(function: Any, name: str) -> Any:
    """Wrap a function of NumPy or the emulator that takes arrays only: words that ``_known`` converts become arrays;
    other words and elements raise NotCertified. Attributes that are no functions are returned as they are."""
    if not callable(function):
        return function

    def call(*arguments: Any) -> Any:
        known = [_known(each) for each in arguments]
        if any(isinstance(each, Word | Cells) for each in known):
            raise NotCertified(f"{name} of what depends on the problem")
        return function(*known)

    return call


def _known(value: Any) -> Any:
    """An array in place of a word without names whose constant differs between lanes; other values as they are."""
    if isinstance(value, Word) and value.poly.is_constant and isinstance(value.poly.constant, np.ndarray):
        return value.poly.constant.astype(f"i{value.bits // 8}").view(
            f"{'i' if value.signed else 'u'}{value.bits // 8}"
        )
    return value


def select(test: Any, yes: Any, no: Any) -> Any:
    """``yes`` in the lanes in which a test holds, ``no`` elsewhere. ``test``: a boolean per lane. If all lanes choose
    the same, the other value may be anything. ``no`` is None if an instruction under a predicate is the first to write
    a register. Raises NotCertified if some lanes get elements and others numbers or None."""
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
    """Whether ``low <= high`` in every lane follows from the bounds of names, without the solver."""
    word = low if isinstance(low, Word) else high
    x, y = (Word(polynomial(each, word.bits), word.bits, word.facts, word.signed).number() for each in (low, high))
    return bool(word.facts.known(y - x).min() == 1)


def defined_least(a: Any, b: Any) -> Word | None:
    """The smaller one of two numbers, if facts define a name as that."""
    word = a if isinstance(a, Word) else b
    if not word.facts.minima:
        return None
    x, y = (Word(polynomial(each, word.bits), word.bits, word.facts, word.signed) for each in (a, b))
    least = word.facts.minimum(x.poly, y.poly)
    if least is None:
        return None
    for each in (x, y):
        each.number()  # neither of the two has overflowed
    return Word(least, word.bits, word.facts, word.signed)


def _extreme(largest: bool) -> Callable[[Any, Any], Any]:
    """The function that returns the larger, or the smaller, of two numbers in each lane. It raises NotCertified unless
    facts decide for all problems which one that is."""

    def extreme(a: Any, b: Any) -> Any:
        if not isinstance(a, Word) and not isinstance(b, Word):
            return (np.maximum if largest else np.minimum)(a, b)
        if not largest and (least := defined_least(a, b)) is not None:
            return least
        low, high = (b, a) if largest else (a, b)
        # Bounds are tried in both directions before the solver is asked, since it may not decide a false inequality.
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
    """bfi: insert the low ``length`` bits of ``a`` into ``b`` from bit ``start`` on. Raises NotCertified unless both
    are known, or the bits of ``a`` reach the top of the register: ``a << start``, and the low bits of ``b``."""
    first, count = _one_number(start) & 255, _one_number(length) & 255  # PTX takes their low 8 bits
    if not isinstance(a, Word) and not isinstance(b, Word):
        return arithmetic.bfi(a, b, start, length)
    if first + count >= (a if isinstance(a, Word) else b).bits:
        return (a << first) | (b & ((1 << first) - 1))
    raise NotCertified("bits of what depends on the problem are inserted")


def _one_number(value: Any) -> int:
    """A known number that is the same in all lanes. Raises NotCertified if it is not the same."""
    numbers = np.asarray(value)
    if not (numbers == numbers.flat[0]).all():
        raise NotCertified("lanes insert at different places")
    return int(numbers.flat[0])


def high_product(a: Any, b: Any, quotient_of: Callable[[Any, Any], Word]) -> Any:
    """The high half of a product of two numbers of n bits: the product divided by 2^n, rounded down. Raises
    NotCertified if that is not known, or a factor differs between lanes. ``quotient_of``: ``divide``, or what replaces
    it."""
    if not isinstance(a, Word) and not isinstance(b, Word):
        return arithmetic.mulhi(a, b)
    word = a if isinstance(a, Word) else b
    for factor, multiplier in ((a, b), (b, a)):
        if isinstance(multiplier, Word) and (reciprocal := word.facts.reciprocal(multiplier.poly)) is not None:
            return _scaled_quotient(factor, reciprocal, word, quotient_of)
    factors = [Word(polynomial(each, word.bits), word.bits, word.facts, word.signed).number() for each in (a, b)]
    if any(not each.same_in_all_lanes for each in factors):
        raise NotCertified("the high half of a product that differs between lanes")
    for one, other in (factors, factors[::-1]):
        if one.is_constant and int(one.constant) < 0 and word.bits == 32:
            # The quotient by 2^32 of x times a negative number is that of x times the number plus 2^32, minus x.
            whole = quotient(other * (int(one.constant) + (1 << 32)), 1 << 32, word.facts) - other
            return Word(whole, word.bits, word.facts, word.signed)
    product = factors[0] * factors[1]
    return Word(quotient(product, 1 << word.bits, word.facts), word.bits, word.facts, word.signed)


def _scaled_quotient(
    factor: Any, reciprocal: Reciprocal, word: Word, quotient_of: Callable[[Any, Any], Word]
) -> ScaledQuotient:
    """The high half of ``factor`` times the multiplier of a reciprocal. ``word``: a word of the same type. Raises
    NotCertified unless the factor is an unsigned number of 32 bits, from 1 to 2^31."""
    number = Word(polynomial(factor, word.bits), word.bits, word.facts, word.signed).number()
    if word.bits != 32 or word.signed:
        raise NotCertified("a reciprocal is for unsigned numbers of 32 bits")
    dividend = number - 1
    for gap in (dividend, Polynomial.of((1 << 31) - 1) - dividend):
        if not word.facts.holds(gap):
            raise NotCertified(f"{dividend} is divided by a reciprocal, and may lie outside of 0 to 2^31 - 1")
    divisor = Word(reciprocal.divisor, 32, word.facts)
    return ScaledQuotient(quotient_of(Word(dividend, 32, word.facts), divisor), reciprocal.shift)


def _shift_right(a: Any, count: Any) -> Any:
    """shr by a number in a register. Raises NotCertified if that number or what is shifted depends on the problem,
    except for quotients by reciprocals."""
    return a.shifted(count) if isinstance(a, ScaledQuotient) else _concrete(arithmetic.shr, "shr")(a, count)


def divide(a: Any, b: Any) -> Any:
    """The quotient of two integers, as in PTX. If one of them is a word, NotCertified is raised unless the dividend is
    proven not to be negative, the divisor to be positive, and the quotient is known."""
    if isinstance(a, Word) or isinstance(b, Word):
        return _quotient(a, b)[0]
    return arithmetic.divide(a, b)


def _remainder(a: Any, b: Any) -> Any:
    """The remainder of two integers. Raises NotCertified as ``divide`` does."""
    if isinstance(a, Word) or isinstance(b, Word):
        return _quotient(a, b)[1]
    return arithmetic.remainder(a, b)


def _quotient(a: Any, b: Any) -> tuple[Word, Word]:
    """Quotient and remainder of a number that is not negative by a positive one.

    The quotient is guessed. A guess is right if it leaves a remainder from 0 to below the divisor, which is checked.
    For example, the row of a tile, (row * tiles_n + col) / tiles_n, is found as the name ``row``, since
    0 <= col < tiles_n. Raises NotCertified if no guess is right.
    """
    word = a if isinstance(a, Word) else b
    facts = word.facts
    x, y = (Word(polynomial(each, word.bits), word.bits, facts, word.signed).number() for each in (a, b))
    if (defined := facts.fraction(x, y)) is not None:
        return Word(defined[0], word.bits, facts, word.signed), Word(defined[1], word.bits, facts, word.signed)
    if facts.holds(x) and facts.holds(y - 1):
        for guess in _candidates(x, y):
            rest = x - y * guess
            if facts.known(rest).min() == 1 and facts.known(y - 1 - rest).min() == 1:
                return Word(guess, word.bits, facts, word.signed), Word(rest, word.bits, facts, word.signed)
    raise NotCertified(f"the quotient of {x} and {y} is not known")


def _candidates(x: Any, y: Any) -> Any:
    """Polynomials that may be the quotient of the polynomials ``x`` and ``y``: 0, for a constant ``y`` the quotients of
    coefficients, and each name in ``x``."""
    yield Polynomial.of(0)
    if y.is_constant and isinstance(y.constant, int):
        yield x.divided(y.constant)[0]
    for name in dict.fromkeys(x.names()):
        yield Polynomial.named(name)


def _split(values: Any, count: int, width: int, lanes: int) -> Any:
    """Split what a vector load has returned into ``count`` registers of ``width`` bytes. Raises NotCertified if that
    would cut an element, or a word that depends on the problem."""
    if isinstance(values, Cells):
        if width % values.width:
            raise NotCertified("an element is taken apart")
        step = width // values.width
        return [values.part(i * step, i * step + step) for i in range(count)]
    if isinstance(values, Word):
        raise NotCertified("a word that depends on the problem is taken apart")
    return NAMESPACE["SPLIT"](values, count, width, lanes)  # type: ignore[operator]


def _join(parts: tuple[Any, ...], width: int) -> Any:
    """Join registers of ``width`` bytes to the value that a vector store takes. Raises NotCertified for a mixture of
    elements and numbers."""
    if all(isinstance(part, Cells) for part in parts):
        return joined(list(parts))
    if any(isinstance(part, Cells | Word) for part in parts):
        raise NotCertified("elements and numbers in one access")
    return NAMESPACE["JOIN"](parts, width)  # type: ignore[operator]


def _pack(output: str) -> Callable[[Any, Any, Any], Any]:
    """The replacement of cvt.f16x2.f32 or cvt.bf16x2.f32, which rounds two fp32 sums to a pair of elements of D. It
    returns two elements of 2 bytes per lane, the low one first. ``output``: the type of D."""

    def pack(high: Any, low: Any, convert: Any) -> Any:
        if not (isinstance(high, Cells) and isinstance(low, Cells) and high.width == low.width == 4):
            raise NotCertified("a conversion of what are not sums")
        if output not in TYPES_16 or convert is not _narrowing(output):
            raise NotCertified(f"a conversion that does not round to the nearest {output}")
        return joined([low, high]).of_width(2)

    return pack


_WIDEN = arithmetic.converter("f32", "f16", "rn", False, False)


def _widening(types_16: set[str]) -> Callable[[Any], Any]:
    """The replacement of cvt.f32.f16, which changes no number. ``types_16``: those of 16 bits among the types of A and
    D. Elements have no type of their own, so one of 2 bytes is known to be f16 only if there is no other type."""

    def widen(value: Any) -> Any:
        if not isinstance(value, Cells):
            return _WIDEN(value)
        if types_16 != {"f16"} or value.width != 2:
            raise NotCertified("a conversion from f16 of what is none")
        return value.of_width(4)

    return widen


@cache
def _narrowing(output: str) -> Callable[[Any], Any]:
    """The replacement of the cvt that rounds a sum in fp32 to an element of D, whose type ``output`` has 16 bits."""
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
    widen = _widening({operands, output} & set(TYPES_16))
    # The emulator caches converters, so a conversion in the text is recognised by its identity.
    replaced: dict[str, object] = {name: widen for name, value in scope.items() if value is _WIDEN}
    if output in TYPES_16:
        convert = arithmetic.converter(output, "f32", "rn", False, False)
        replaced |= {name: _narrowing(output) for name, value in scope.items() if value is convert}
    return replaced


def names_of_arithmetic(output: str) -> dict[str, Callable[..., Any]]:
    """Replacements for functions of the emulator's arithmetic, by their names there. ``output``: the type of D."""
    return {
        "bfi": _insert, "divide": divide, "remainder": _remainder, "pack_f32": _pack(output), "shr": _shift_right,
        "mulhi": partial(high_product, quotient_of=divide),
    }  # fmt: skip


def names(lanes: int, units: dict[str, dict[str, Callable[..., Any]]], output: str) -> dict[str, object]:
    """The names of a text's scope whose values differ from the emulator's (``NAMESPACE`` and its units), for a CTA of
    ``lanes`` lanes. ``units``: name of a unit -> its methods; all other methods of the unit raise NotCertified.
    ``output``: the type of D."""

    def numbers(value: Any, width: int) -> Any:
        """``value`` as an array with the same number of ``width`` bytes in all lanes; predicates have width 0."""
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
