"""Evaluates the formulas of a contract file, such as a grid of ``m / 128`` CTAs.

``execution`` evaluates them for known sizes, and ``launches`` as polynomials for sizes that are not known.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from kernelproof.certificates.polynomials import Polynomial
from kernelproof.ground.errors import WrongInput, brief, printable

LONGEST = 200  # limit on the characters of a formula
_RULE = "write sizes and numbers with +, -, *, parentheses, and / by a number"


def names(formula: str | int) -> set[str]:
    """The sizes that a formula names. Raises WrongInput if the formula cannot be parsed, or is longer than LONGEST."""
    return {node.id for node in ast.walk(_tree(formula)) if isinstance(node, ast.Name)}


def number(formula: str | int, sizes: Mapping[str, int]) -> int:
    """The value of a formula for known sizes. ``sizes`` gives a number for every name in the formula.

    Raises WrongInput as ``names`` does, for an operation that is not covered, and if ``/`` leaves a remainder.
    """
    value = polynomial(formula, {name: Polynomial.of(size) for name, size in sizes.items()})
    return int(value.constant)


def polynomial(formula: str | int, sizes: Mapping[str, Polynomial]) -> Polynomial:
    """The value of a formula for sizes that are polynomials. ``sizes`` gives one for every name in the formula.

    Raises WrongInput as ``names`` does, for an operation that is not covered, and if ``/`` may leave a remainder.
    """
    return _value(_tree(formula), sizes)


def _tree(formula: str | int) -> ast.expr:
    """A formula, parsed as an expression of Python. Raises WrongInput as ``names`` does."""
    text = str(formula)
    try:
        if len(text) > LONGEST:
            raise SyntaxError
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise WrongInput(f"{brief(printable(text))!r} is no formula; {_RULE}") from None


def _value(node: ast.expr, sizes: Mapping[str, Polynomial]) -> Polynomial:
    """The value of a part of a formula. Raises WrongInput, as ``polynomial`` does."""
    match node:
        case ast.Constant(value=int() as literal) if not isinstance(literal, bool):
            return Polynomial.of(literal)
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, sizes) + _value(right, sizes)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left, sizes) - _value(right, sizes)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left, sizes) * _value(right, sizes)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as divisor)) if divisor > 0:
            quotient, rest = _value(left, sizes).divided(divisor)
            if rest.terms:
                raise WrongInput(
                    f"{ast.unparse(node)} may leave a rest; make the sizes in it multiples of {divisor}, in [sizes]"
                )
            return quotient
    raise WrongInput(f"{brief(printable(ast.unparse(node)))!r} is not covered; {_RULE}")
