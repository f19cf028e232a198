"""Proves that a division by a multiplication, as ``Reciprocal`` states it, is exact, and which of them a proof accepts.

Why it is exact: let s = floor(log2(d)), so that 2^s <= d < 2^(s + 1), and M = floor((2^(32 + s) - 1) / d). Then M is
below 2^32, and 2^(32 + s) / d - 1 <= M < 2^(32 + s) / d. For x = q * d + r with r < d, the value

    (x + 1) * M / 2^(32 + s)

is less than (x + 1) / d <= q + 1, and at least (x + 1) / d - (x + 1) / 2^(32 + s). That is at least q if (x + 1) * d is
at most 2^(32 + s), which holds for x + 1 <= 2^31. So its floor is q.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelproof.certificates import abstract
from kernelproof.certificates.facts import Facts, NotCertified, Reciprocal
from kernelproof.certificates.polynomials import Polynomial
from kernelproof.certificates.words import Word

named = Polynomial.named
MOST = (1 << 31) - 1  # the largest dividend


def constants(divisor: int) -> tuple[int, int]:
    """The multiplier and the shift of a divisor."""
    shift = divisor.bit_length() - 1
    return ((1 << (32 + shift)) - 1) // divisor, shift


@given(st.data())
def test_quotients_by_a_reciprocal_are_exact(data: st.DataObject) -> None:
    divisor = data.draw(st.one_of(st.integers(1, 65), st.integers(1, MOST), st.integers(0, 30).map(lambda x: 1 << x)))
    multiplier, shift = constants(divisor)
    assert multiplier < 1 << 32
    # A quotient changes at multiples of the divisor, so these and their neighbours are tried.
    multiple = data.draw(st.integers(0, MOST // divisor)) * divisor
    for dividend in (0, multiple - 1, multiple, multiple + 1, MOST // divisor * divisor, MOST):
        if 0 <= dividend <= MOST:
            assert ((dividend + 1) * multiplier >> 32) >> shift == dividend // divisor, (dividend, divisor)


def facts() -> Facts:
    """Facts of a number d * q + r with r < d, of a reciprocal of d, and of a number x."""
    bounds = {("d",): (1, 64), ("q",): (0, 100), ("r",): (0, 63), ("x",): (0, MOST), ("M",): (1, (1 << 32) - 1)}
    bounds |= {("s",): (0, 31), ("t",): (0, 31), ("N",): (1, (1 << 32) - 1)}
    return Facts(bounds, [named("d") - 1 - named("r")], reciprocals=[Reciprocal(named("d"), "M", "s")])


def quotient(factor: Polynomial, multiplier: str = "M", shift: str = "s", signed: bool = False) -> Word:
    """The word that a kernel gets from mul.hi and shr."""
    known = facts()
    a, b, count = (Word(x, 32, known, signed) for x in (factor, named(multiplier), named(shift)))
    functions = abstract.names_of_arithmetic("f16")
    result = functions["shr"](functions["mulhi"](a, b).view("u4"), count)
    assert isinstance(result, Word)
    return result


def test_a_kernel_divides_by_a_multiplication() -> None:
    dividend = named("d") * named("q") + named("r")
    assert quotient(dividend + 1).poly.equals(named("q"))


@pytest.mark.parametrize("case", [
    {"factor": named("d") * named("q") + named("r")},  # without the 1: it may be 0
    {"factor": named("x") + 1},  # no known quotient
    {"factor": named("d") * named("q") + named("r") + 1, "shift": "t"},  # a shift by another number
    {"factor": named("d") * named("q") + named("r") + 1, "multiplier": "N"},  # a number that is no multiplier
    {"factor": named("d") * named("q") + named("r") + 1, "signed": True},  # mul.hi.s32
])  # fmt: skip
def test_other_products_and_shifts_are_not_known(case: dict[str, object]) -> None:
    with pytest.raises(NotCertified):
        quotient(**case)  # type: ignore[arg-type]


@pytest.mark.parametrize(("most", "exact"), [(MOST, True), (MOST + 1, False)])
def test_a_dividend_must_have_31_bits(most: int, exact: bool) -> None:
    known = Facts({("x",): (0, most), ("M",): (1, (1 << 32) - 1), ("s",): (0, 31)},
                  reciprocals=[Reciprocal(Polynomial.of(1), "M", "s")])  # fmt: skip
    functions = abstract.names_of_arithmetic("f16")
    factor, multiplier = Word(named("x") + 1, 32, known), Word(named("M"), 32, known)
    if exact:
        product = functions["mulhi"](multiplier, factor)
        assert functions["shr"](product, Word(named("s"), 32, known)).poly.equals(named("x"))
    else:
        with pytest.raises(NotCertified):
            functions["mulhi"](multiplier, factor)
