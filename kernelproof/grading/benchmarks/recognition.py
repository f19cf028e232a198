"""Recognises the format of a reference by the names that its text defines. Nothing is executed."""

from __future__ import annotations

import ast
from typing import Literal

from kernelproof.ground.errors import WrongInput

Format = Literal["KernelBench", "GPU MODE", "robust-kbench", "FlashInfer-Bench"]


def names(text: str) -> set[str]:
    """The names that a Python text defines at its outermost level, including those inside ``if`` and ``try``.

    Raises WrongInput if the text is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise WrongInput(f"it is no Python: {type(error).__name__}: {error}") from None
    return set(_defined_names(tree.body))


def _defined_names(body: list[ast.stmt]) -> list[str]:
    """The names that statements define, with those in the branches of ``if`` and ``try``."""
    out: list[str] = []
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                out.append(name)
            case ast.Assign(targets=targets):
                out += [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                out += [alias.asname or alias.name for alias in aliases]
            case ast.If(body=inner, orelse=other):
                out += _defined_names([*inner, *other])
            case ast.Try(body=inner, handlers=handlers, orelse=other):
                out += _defined_names([*inner, *(part for handler in handlers for part in handler.body), *other])
    return out


def format_of_reference(text: str) -> Format:
    """The format of a reference. Raises WrongInput if it is unknown."""
    known = names(text)
    if {"Model", "get_inputs"} <= known:
        return "robust-kbench" if "get_init_inputs" in known and "forward_fn" in text else "KernelBench"
    if {"ref_kernel", "generate_input"} <= known:
        return "GPU MODE"
    raise WrongInput(
        "the reference has neither Model and get_inputs (KernelBench) nor ref_kernel and generate_input (GPU MODE)"
    )
