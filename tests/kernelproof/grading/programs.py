"""Describes programs to grade: their buffers, launches and reference, and the rules that they have to break."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kernelproof.grading import Limits, Tolerance, Verdict, check_source

Table = dict[str, "Program"]  # by name
FOLDER = Path(__file__).parent


@cache
def text(name: str) -> str:
    """The text of a CUDA file in this folder."""
    return (FOLDER / name).read_text()


@dataclass(frozen=True)
class Program:
    """A program to grade. ``launches``: of kernels in the file ``file``. ``rules``: a cheat has to break one of them;
    () for honest programs. ``options``: further ones of ``check_source``."""

    file: str
    reference: Callable[..., Any]
    shapes: Sequence[Mapping[str, int]]
    buffers: Mapping[str, str]
    launches: Sequence[Mapping[str, Any]]
    rules: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def verdict(self, **limits: Any) -> Verdict:
        """The verdict on the program. ``limits``: those of ``Limits``."""
        return check_source(
            text(self.file), self.reference, self.shapes, buffers=self.buffers, launches=self.launches,
            limits=Limits(**limits), **self.options,
        )  # fmt: skip


@dataclass(frozen=True)
class Form:
    """The parts that programs of one operation share: reference, shapes, buffers, and the arguments, grid and block of
    a launch."""

    reference: Callable[..., Any]
    shapes: Sequence[Mapping[str, int]]
    buffers: Mapping[str, str]
    args: Sequence[Any]
    grid: Any
    block: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def program(self, entry: str, *rules: str, file: str = "honest.cu", **changes: Any) -> Program:
        """A program of this form. ``changes``: of the reference, shapes or buffers, of the launch (grid, block, smem,
        args), all ``launches``, or else of the options."""
        own = {name: changes.pop(name) for name in ("reference", "shapes", "buffers") if name in changes}
        geometry = {name: changes.pop(name) for name in ("grid", "block", "smem", "args") if name in changes}
        launch = {"entry": entry, "grid": self.grid, "block": self.block, "args": list(self.args), **geometry}
        launches = changes.pop("launches", [launch])
        reference, shapes = own.get("reference", self.reference), own.get("shapes", self.shapes)
        return Program(
            file, reference, shapes, own.get("buffers", self.buffers), launches, rules, {**self.options, **changes},
        )  # fmt: skip


def binary(kind: str, function: Callable[..., Any], **changes: Any) -> Form:
    """z (n) of x (n) and y (n)."""
    buffers = {"x": f"in:{kind}[n]", "y": f"in:{kind}[n]", "z": f"out:{kind}[n]"}
    return Form(function, [{"n": 300}, {"n": 257}], buffers, ["x", "y", "z", "n"], 3, 128, changes)


def unary(kind: str, function: Callable[..., Any], **changes: Any) -> Form:
    """y (n) of x (n)."""
    buffers = {"x": f"in:{kind}[n]", "y": f"out:{kind}[n]"}
    return Form(function, [{"n": 300}, {"n": 257}], buffers, ["x", "y", "n"], 3, 128, changes)


def rows(kind: str, function: Callable[..., Any], output: str = "", block: Any = 64, **changes: Any) -> Form:
    """y from the rows of x (m, n), with a block for each row."""
    buffers = {"x": f"in:{kind}[m, n]", "y": output or f"out:{kind}[m, n]"}
    return Form(function, [{"m": 5, "n": 100}, {"m": 3, "n": 77}], buffers, ["x", "y", "n"], "m", block, changes)


def product(kind: str, output: str = "", bias: bool = False, **changes: Any) -> Form:
    """D (m, n) = A (m, k) B (k, n), CTAs of 16 x 16 threads."""
    buffers = {"a": f"in:{kind}[m, k]", "b": f"in:{kind}[k, n]"} | ({"c": f"in:{kind}[n]"} if bias else {})
    shapes = [{"m": 33, "n": 40, "k": 48}, {"m": 17, "n": 21, "k": 35}]
    return Form(
        (lambda a, b, c: a @ b + c) if bias else (lambda a, b: a @ b),
        shapes, {**buffers, "d": f"out:{output or kind}[m, n]"}, [*buffers, "d", "m", "n", "k"],
        "ceil_div(n, 16), ceil_div(m, 16)", (16, 16),
        {"tolerance": Tolerance(terms="k + 1" if bias else "k"), "flops": "2 * m * n * k", **changes},
    )  # fmt: skip


def product_tn(kind: str, output: str, **changes: Any) -> Form:
    """D (m, n) = A (m, k) B^T (n, k) of whole tiles, with a warp for each tile."""
    return Form(
        lambda a, b: a @ b.T, [{"m": 32, "n": 48, "k": 64}, {"m": 16, "n": 32, "k": 80}],
        {"a": f"in:{kind}[m, k]", "b": f"in:{kind}[n, k]", "d": f"out:{output}[m, n]"}, ["a", "b", "d", "n", "k"],
        "n // 16, m // 16", 32, {"tolerance": Tolerance(terms="k"), **changes},
    )  # fmt: skip


def softmax(x: Any) -> Any:
    """The softmax of each row."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """The layer norm of each row."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def attention(q: Any, k: Any, v: Any) -> Any:
    """Attention with one head."""
    return softmax(q @ k.T / np.sqrt(q.shape[1])) @ v


def causal(q: Any, k: Any, v: Any) -> Any:
    """Attention in which a row sees no later one."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    return softmax(np.where(np.tri(len(q)) > 0, scores, -np.inf)) @ v


# Forms of which there are several programs.
NORM = Form(
    layer_norm, [{"m": 4, "n": 96}, {"m": 3, "n": 75}],
    {"x": "in:f32[m, n]", "weight": "in:f32[n]", "bias": "in:f32[n]", "y": "out:f32[m, n]"},
    ["x", "weight", "bias", "y", "n", 1e-5], "m", 64,
)  # fmt: skip
ATTENTION = Form(
    attention, [{"n": 24, "d": 16}, {"n": 37, "d": 20}],
    dict.fromkeys("qkv", "in:f32[n, d]") | {"o": "out:f32[n, d]"}, ["q", "k", "v", "o", "n", "d"], "n", 64,
    {"flops": "4 * n * n * d"},
)  # fmt: skip
WHOLE_SUM = Form(
    lambda x: x.sum(keepdims=True), [{"n": 700}, {"n": 333}], {"x": "in:f32[n]", "y": "out:f32[1]"},
    ["x", "y", "n"], 3, 64, {"tolerance": Tolerance(terms="n")},
)  # fmt: skip
ROW_SUM = rows("f32", lambda x: x.sum(1), "out:f32[m]", 32, tolerance=Tolerance(terms="n"))
