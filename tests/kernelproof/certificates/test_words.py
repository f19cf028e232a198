"""Proves that symbolic words agree with the arrays that they stand for, for all values of the named integers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.certificates import abstract
from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.polynomials import Lanes, Polynomial
from kernelproof.certificates.words import Word, polynomial

# Lanes of a word, and the largest x.
LANES, MOST = 4, 1000
# The least and greatest value of each symbol.
BOUNDS = {("x",): (0, MOST), ("y",): (1, 7)}
ARRAYS = st.lists(st.integers(0, 64), min_size=LANES, max_size=LANES).map(lambda v: np.array(v, "u4"))
NUMBERS = st.integers(0, 40)
Step = Callable[[Any, Any], Any]


class Bounded(Facts):
    """Facts that need no solver."""

    def refutation(self, value: Polynomial) -> dict[str, int] | None:
        """Finds none, as a solver that gives up."""
        raise NotCertified("not by bounds")


def steps(of: Callable[[Any, Any], Any], operands: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Step, Any]]:
    """Draws a step: an operation and its operands."""
    return st.tuples(st.just(of), operands)


def high_product(a: Any, b: Any) -> Any:
    """mul.hi.s32."""
    known = np.full(LANES, b, "i4")
    return abstract.names_of_arithmetic("f16")["mulhi"](a.view("i4"), known).view("u4")


def on_known_word(of: Step) -> Step:
    """The operation on a word whose value is known, instead of an array."""
    return lambda a, b: of(a, Word(Polynomial.of(b.astype(np.int64)), 32, a.facts) if isinstance(a, Word) else b)


# Steps that a drawn word goes through, and their operands.
SYMBOLS = st.sampled_from(("x", "y"))
OPERATIONS = st.one_of(
    steps(operator.add, ARRAYS | NUMBERS | SYMBOLS),
    steps(operator.sub, ARRAYS | NUMBERS | SYMBOLS),
    steps(operator.mul, st.integers(1, 9) | SYMBOLS),
    steps(operator.and_, st.sampled_from((1, 7, 15, 31, 0xFFFFFFF8, 0xFFFFFFE0))),
    steps(operator.or_, st.integers(0, 31) | st.sampled_from((0xFFFFFFF8, 0xFFFFFFC0, 0xFFFFF000, 65536, 0x90000000))),
    steps(operator.xor, st.integers(0, 31) | ARRAYS | st.sampled_from((64, 2048))),
    *(steps(on_known_word(each), ARRAYS) for each in (operator.xor, operator.or_, operator.and_)),
    steps(lambda a, b: ~a + b, NUMBERS),
    steps(operator.lshift, st.integers(0, 6)),
    steps(operator.rshift, st.integers(0, 6)),
    steps(lambda a, b: (a.view("i4") >> np.int32(b)).view("u4"), st.integers(0, 31)),
    steps(lambda a, b: a.view("i4").astype("i8").view("u8").astype("u4") + b, NUMBERS),
    steps(high_product, st.integers(0, (1 << 31) - 1)),
    steps(lambda a, b: abstract.select(a.view("i4") < b, a, a), NUMBERS),
)


def evaluate(value: Any, names: dict[str, int]) -> Lanes:
    """The bits of a word, or of an array, for these named integers."""
    if not isinstance(value, Word):
        return np.broadcast_to(value, LANES)
    out = np.zeros(LANES, np.int64)
    for monomial, coefficient in value.poly.terms.items():
        term = np.asarray(coefficient, np.int64)
        for name in monomial:
            term = term * names[name]
        out = out + term
    return (out & ((1 << value.bits) - 1)).astype(f"u{value.bits // 8}")


@given(st.lists(OPERATIONS, min_size=1, max_size=6), st.integers(0, MOST), st.integers(1, 7), ARRAYS)
def test_every_operation_is_that_of_numpy(program: list[tuple[Step, Any]], x: int, y: int, start: Lanes) -> None:
    names = {"x": x, "y": y}
    facts = Bounded(dict(BOUNDS))
    word: Any = Word(Polynomial.of(start.astype(np.int64)) + Polynomial.named("x", 32), 32, facts)
    array: Any = start + np.uint32(32 * x)
    for step, operand in program:
        known: Any = np.uint32(names[operand]) if isinstance(operand, str) else operand
        unknown: Any = Word(Polynomial.named(operand), 32, facts) if isinstance(operand, str) else operand
        if isinstance(known, int):
            known = np.uint32(known)
        try:
            word = step(word, unknown)
        except NotCertified:
            return
        except TypeError:
            # An array that replaces a word when nothing in it depends on the names any more.
            assert not isinstance(word, Word)
            return
        array = step(array, known)
        assert (evaluate(word, names) == np.broadcast_to(array, LANES)).all()


@given(st.integers(0, MOST), st.integers(0, 4000), ARRAYS)
def test_a_comparison_that_is_decided_is_right(x: int, other: int, start: Lanes) -> None:
    word = Word(Polynomial.of(start.astype(np.int64)) + Polynomial.named("x"), 32, Bounded(dict(BOUNDS)))
    for test in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        try:
            answer = test(word, other)
        except NotCertified:
            continue
        assert (np.broadcast_to(answer, LANES) == test(start.astype(np.int64) + x, other)).all()


@given(st.sampled_from(["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"]), st.sampled_from((8, 16, 32, 64)), st.data())
def test_integers_are_polynomials_and_nothing_else_is(kind: str, bits: int, data: st.DataObject) -> None:
    width = 8 * np.dtype(kind).itemsize
    numbers = data.draw(st.lists(st.integers(0, (1 << width) - 1), min_size=1, max_size=LANES))
    values = np.array(numbers, f"u{width // 8}").view(kind)
    terms = polynomial(values, bits).terms
    assert not terms.keys() - {()}
    exact = [int(value) % (1 << bits) for value in values]
    assert [int(value) % (1 << bits) for value in np.broadcast_to(terms.get((), 0), len(values))] == exact
    for other in (values.astype("f4"), values.astype("f8"), values.astype(object)):
        with pytest.raises(NotCertified):
            polynomial(other, bits)


def test_what_may_overflow_is_not_extended() -> None:
    facts = Facts({("m",): (0, 1 << 24), ("ld",): (0, 1 << 24)})
    m, ld = (Word(Polynomial.named(name), 32, facts) for name in ("m", "ld"))
    wide = m.view("i4").astype("i8") * ld.view("i4").astype("i8")
    assert wide.poly.terms == {("ld", "m"): 1}
    with pytest.raises(NotCertified) as error:
        (m * ld).view("i4").astype("i8")
    refuted = error.value.refuted
    assert refuted is not None
    assert refuted["m"] * refuted["ld"] >= 1 << 31


def test_quotients_are_found_among_names() -> None:
    facts = Facts({("q",): (0, 100), ("r",): (0, 30), ("rest",): (0, 50)})
    divisor = Polynomial.named("r") + Polynomial.named("rest") + 1
    dividend = Word(Polynomial.named("q") * divisor + Polynomial.named("r"), 32, facts, True)
    known = abstract.names_of_arithmetic("f16")
    assert known["divide"](dividend, Word(divisor, 32, facts, True)).poly.equals(Polynomial.named("q"))
    assert known["remainder"](dividend, Word(divisor, 32, facts, True)).poly.equals(Polynomial.named("r"))


def test_a_quotient_by_multiplication_is_found() -> None:
    """A compiler divides 96 * q + 95 by 96 in this way."""
    facts = Bounded({("q",): (0, 1 << 17)})
    dividend = Word(Polynomial.named("q", 96) + 95, 32, facts, True)
    high = abstract.names_of_arithmetic("f16")["mulhi"](dividend, np.full(LANES, 715827883, "i4"))
    assert ((high >> 4) + (high.view("u4") >> 31)).poly.equals(Polynomial.named("q"))


def test_sums_beyond_64_bits_have_no_bounds() -> None:
    facts = Bounded({("x",): (0, 1 << 40), ("y",): (0, 1 << 40)})
    top = Polynomial.of((1 << 64) - 1)
    for product in (Polynomial({("x", "y"): 1}), Polynomial({("x", "y"): np.array([1, 2])})):
        assert (facts.known(top - product) == -1).all()
        assert (facts.known(product - top) == -1).all()
