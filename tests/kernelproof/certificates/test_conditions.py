"""Tests the conditions that a proof assumes on the sides of a branch: what they say of a symbol holds for its values.

Also tests the facts that decide conditions, and the names of the parts of a number (``rests``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.certificates import rests
from kernelproof.certificates.conditions import (
    AtLeast,
    Chosen,
    Condition,
    Multiple,
    OpenFacts,
    at_least,
    chosen,
    settled,
)
from kernelproof.certificates.facts import Facts, NotCertified
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.words import Word

MAX_X = 40  # the largest x
# Comparisons of words, which are also comparisons of numbers.
COMPARISONS: list[Callable[[Any, Any], Any]] = [
    operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip


def facts(low: int = 0, high: int = MAX_X) -> OpenFacts:
    """The facts about a name x within these bounds."""
    return OpenFacts.of(Facts({("x",): (low, high)}))


def word_of_x(known: OpenFacts) -> Word:
    """A 32-bit word with the value of x."""
    return Word(Polynomial.named("x"), 32, known)


def truth(condition: Any, value: int) -> bool:
    """The value of a predicate for a value of x."""
    if not isinstance(condition, Condition):
        return bool(np.asarray(condition).item())

    def atom(each: AtLeast | Multiple) -> bool:
        number = facts().evaluated(each.gap if isinstance(each, AtLeast) else each.number, {"x": value})
        return number >= 0 if isinstance(each, AtLeast) else (number % each.divisor == 0) is each.holds

    return (any if condition.any else all)(map(atom, condition.atoms))


# Numbers of three lanes, also beyond the bounds of x.
LANES = st.lists(st.integers(-MAX_X, 2 * MAX_X), min_size=3, max_size=3).map(np.array)


@given(LANES, LANES, LANES, st.booleans())
def test_an_answer_for_a_lane_holds_for_every_value(low: Any, high: Any, assumed: Any, negated: bool) -> None:
    """The condition is low <= x <= high or its negation, with other bounds in each lane. The side of a branch also
    assumes x >= ``assumed``. An answer is 1 (the condition holds), 0 (it does not) or -1 (not known)."""
    x, known = Polynomial.named("x"), facts()
    condition = at_least(known, x - Polynomial.of(low), Polynomial.of(high) - x)
    condition = ~condition if negated else condition
    side = at_least(known, x - Polynomial.of(assumed))
    without_side = np.broadcast_to(condition.known(), 3)
    with known.side(side):
        within_side = np.broadcast_to(condition.known(), 3)
    for lane in range(3):
        for answer, least in ((without_side[lane], 0), (within_side[lane], assumed[lane])):
            truths = {(low[lane] <= value <= high[lane]) != negated for value in range(max(0, least), MAX_X + 1)}
            assert not truths or answer == -1 or truths == {answer == 1}
    assert (np.broadcast_to(condition.known(), 3) == without_side).all(), "the side's facts must end with the side"


@given(LANES, st.integers(-MAX_X, MAX_X))
def test_one_bound_in_each_lane_is_decided_where_bounds_suffice(lanes: Any, assumed: int) -> None:
    x, known = Polynomial.named("x"), facts()
    condition = at_least(known, x - Polynomial.of(lanes))
    with known.side(at_least(known, x - assumed)):
        answers = np.broadcast_to(condition.known(), 3)
    least = max(0, assumed)
    assert all(answer == 1 for answer, each in zip(answers, lanes, strict=True) if each <= least)
    assert all(answer == 0 for answer, each in zip(answers, lanes, strict=True) if each > MAX_X)


def test_a_choice_by_the_problem_has_no_truth_value() -> None:
    known = facts()
    choice = chosen(word_of_x(known) < np.uint32(3), np.array([True]), np.array([False]), np.where)
    with pytest.raises(NotCertified):
        bool(choice)


@given(st.sampled_from(COMPARISONS), st.sampled_from(COMPARISONS), st.integers(0, 3), st.integers(0, 9))
def test_conditions_are_true_where_numbers_are(first: Any, second: Any, a: int, b: int) -> None:
    x = word_of_x(facts())
    for value in range(0, MAX_X, 3):
        mine, its = first(x, np.uint32(a)), second(x, np.uint32(b))
        assert truth(mine, value) is bool(first(value, a))
        for operation in (operator.and_, operator.or_):
            try:
                met = operation(mine, its)
            except NotCertified:
                continue
            assert truth(met, value) is bool(operation(first(value, a), second(value, b)))
        if isinstance(mine, Condition):
            assert truth(~mine, value) is not bool(first(value, a))


@pytest.mark.parametrize("mask", [1, 3, 7])
def test_low_bits_are_those_of_numbers(mask: int) -> None:
    for value in range(MAX_X):
        assert truth((word_of_x(facts()) & np.uint32(mask)) != 0, value) is (value & mask != 0)


def test_a_side_knows_its_condition_and_no_other_does() -> None:
    known = facts()
    x = word_of_x(known)
    test = x >= np.uint32(20)
    with known.side(test):
        assert settled(x > np.uint32(19)).all()
        with known.side(x < np.uint32(21)):
            assert settled(x == np.uint32(20)).all(), "both facts together leave one value"
        assert isinstance(x == np.uint32(20), Condition)
    with known.side(~test):
        assert not settled(x > np.uint32(19)).any()
    assert isinstance(x > np.uint32(19), Condition)


def test_two_facts_together_bound_a_sum() -> None:
    known = OpenFacts.of(Facts({("x",): (0, 99), ("y",): (0, 99)}))
    x, y = Polynomial.named("x"), Polynomial.named("y")
    assert known.truth(10 - x - y) is None
    known.learn(4 - x, 6 - y)
    assert known.truth(10 - x - y) is True
    assert known.truth(9 - x - y) is None


def test_a_chosen_value_is_the_one_of_its_side() -> None:
    known = facts()
    test = word_of_x(known) < np.uint32(5)
    value = chosen(test, np.array([1]), np.array([0]), np.where)
    assert isinstance(value, Chosen)
    assert (value != 0).key == test.key
    with known.side(test):
        assert settled(value) == [1]
    with known.side(~test):
        assert settled(value) == [0]


@pytest.mark.parametrize("size", [4, 6, 12, 20, 26, 96, 160, 208])
def test_each_number_below_a_size_is_spelled_in_one_way(size: int) -> None:
    """The values of the parts that keep all limits are in one-to-one correspondence with the numbers below the size."""
    names = rests.parts("x", size)
    values = np.stack(np.meshgrid(*(np.arange(most + 1) for _, most in names.values())), -1).reshape(-1, len(names))
    points = [dict(zip(names, map(int, value), strict=True)) for value in values]
    known = Facts(rests.bounds("x", size))
    within = [x for x in points if all(known.evaluated(limit, x) >= 0 for limit in rests.limits("x", size))]
    assert sorted(known.evaluated(rests.number("x", size), x) for x in within) == list(range(size))


def test_a_multiple_of_what_is_assumed_bounds_a_sum() -> None:
    half, rest = Polynomial.named("half"), Polynomial.named("rest")
    bounds = {("half",): (0, 1), ("rest",): (0, 2)}
    limit = 4 - half.scaled(3) - rest
    for least, answer in ((40, 1), (39, -1)):
        value = least - half.scaled(30) - rest.scaled(10)
        assert Facts(bounds, [limit]).known(value).tolist() == [answer]
        assert Facts(bounds).known(value).tolist() == [-1]


def test_what_is_known_of_a_multiple_is_known_of_the_number() -> None:
    known = facts()
    known.learn(Polynomial.named("x", -16) + 31)
    assert known.truth(Polynomial.named("x", -1) + 1) is True
    assert known.truth(-Polynomial.named("x")) is None
