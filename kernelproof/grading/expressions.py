"""Evaluates numbers that depend on a problem's shape: constants, expressions in its names, or functions of them.

Expressions are evaluated by walking their syntax tree, which allows only arithmetic; ``eval`` would execute any code.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from kernelproof.ground.errors import WrongInput, brief
from kernelproof.ground.integers import ceil_div

Shape = Mapping[str, int]
# 128, "ceil_div(m, 16)", or a function whose parameters are names of the shape.
Number = int | float | str | Callable[..., Any]

LARGEST_EXPONENT = 64  # so that no expression makes an integer of astronomical size
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": ceil_div,
    "min": min,
    "max": max,
    "abs": abs,
    "sqrt": math.sqrt,
    "log2": math.log2,
    "int": int,
}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def value(number: Number, shape: Shape) -> Any:
    """Evaluate a number for a shape. The result is an int, a float, or a tuple of them. Raises WrongInput."""
    if isinstance(number, int | float):
        return number
    try:
        if isinstance(number, str):
            return _evaluate(ast.parse(number.strip(), mode="eval").body, shape)
        return number(**{name: shape[name] for name in inspect.signature(number).parameters})
    except WrongInput:
        raise
    except Exception as error:
        text = brief(number) if isinstance(number, str) else getattr(number, "__name__", "a function")
        raise WrongInput(
            f"{text!r} of shape {dict(shape)}: {type(error).__name__}: {error}; names of the shape, numbers, "
            f"+ - * / // % ** and {', '.join(FUNCTIONS)} are allowed"
        ) from None


def extents(number: Number | list[Number] | tuple[Number, ...], shape: Shape) -> tuple[int, ...]:
    """One to three positive integers, such as a grid's. Raises WrongInput."""
    parts = number if isinstance(number, list | tuple) else [number]
    flat: list[Any] = []
    for part in parts:
        result = value(part, shape)
        flat += result if isinstance(result, list | tuple) else [result]
    if not 1 <= len(flat) <= 3 or not all(isinstance(n, int) and n > 0 for n in flat):
        raise WrongInput(f"{number!r} of shape {dict(shape)} is {flat}: one to three positive integers are needed")
    return tuple(flat)


def _evaluate(node: ast.AST, shape: Shape) -> Any:
    """The value of a syntax tree. Raises WrongInput for everything but arithmetic and the allowed functions."""
    match node:
        case ast.Constant(value=int() | float() as constant):
            return constant
        case ast.Name(id=name):
            if name not in shape:
                raise WrongInput(f"the shape has no {name!r}; it has {', '.join(shape) or 'no names'}")
            return shape[name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_evaluate(part, shape) for part in parts)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _evaluate(left, shape), _evaluate(right, shape)
            if isinstance(op, ast.Pow) and abs(second) > LARGEST_EXPONENT:
                raise WrongInput(f"an exponent of {second}: at most {LARGEST_EXPONENT}")
            return _OPERATORS[type(op)](first, second)
        case ast.UnaryOp(op=op, operand=operand):
            return _OPERATORS[type(op)](_evaluate(operand, shape))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _OPERATORS[type(op)](_evaluate(left, shape), _evaluate(right, shape))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _evaluate(body if _evaluate(test, shape) else other, shape)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_evaluate(argument, shape) for argument in arguments))
    raise WrongInput(f"{ast.unparse(node)!r} is no arithmetic on numbers and names of the shape")
