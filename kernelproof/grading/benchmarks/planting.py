"""Makes the inputs with which a solution is called, by planting values in inputs that the reference drew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernelproof.grading import inputs
from kernelproof.grading.benchmarks import wire
from kernelproof.grading.formats import FORMATS, Array

# The formats of torch's floating-point types, by their names.
_FORMATS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}

SHARE_OF_ZEROS = 0.3  # of "some zeros": most rows then have both zeros and other values


@dataclass
class Draw:
    """The inputs of a call and what the reference computes from them.

    ``kind`` says how the inputs were drawn. ``own`` has the reference's outputs in its own types, ``exact`` those in
    fp64 if it can compute them, ``work`` the amount of each kind of work that its operators do. ``inputs`` and ``tree``
    are the nested inputs and outputs, in which numbers stand for the tensors of ``arrays`` and ``own``. ``plain``: for
    each array, whether it was only drawn. Other arrays may be triangular, symmetric or normalised, and a solution may
    rely on that, so nothing is planted in them. ``depends``: the arrays on which the outputs depend.
    """

    kind: str
    seed: int
    inputs: Any
    arrays: list[wire.Tensor]
    plain: Sequence[bool] = ()
    own: list[wire.Tensor] = field(default_factory=list)
    exact: list[wire.Tensor] | None = None
    tree: Any = None
    work: dict[str, int] = field(default_factory=dict)
    depends: Sequence[int] = ()


def planted_draws(draw: Draw, rng: np.random.Generator) -> Iterator[Draw]:
    """Yields draws with planted values: one element replaced by another one, equal or permuted rows, or zeros.

    Except for the zeros, all values are those of the draw, so that they are in the range for which an operation is
    defined.
    """
    places = _places(draw)
    if not places:
        return
    kinds: dict[str, Callable[[Array], Array]] = {
        "one changed element": lambda bits: _with_changed_element(bits, rng), "equal rows": _with_equal_rows,
        "permuted rows": lambda bits: rng.permutation(bits) if bits.ndim > 1 else bits,
        "some zeros": lambda bits: np.where(rng.random(bits.shape) < SHARE_OF_ZEROS, np.zeros_like(bits), bits),
        "eight zeros at the start": _with_zeros_at_start,
    }  # fmt: skip
    for kind, change in kinds.items():
        arrays = list(draw.arrays)
        # Equal rows in one array alone often leave the outputs with different rows, so all arrays get them.
        chosen: Sequence[int] = places[:1] if kind != "equal rows" else places
        for place in chosen:
            arrays[place] = arrays[place]._replace(bits=change(arrays[place].bits))
        yield replace(draw, kind=kind, arrays=arrays)


def _with_changed_element(bits: Array, rng: np.random.Generator) -> Array:
    """The array with its largest pattern of bits, which is a value of the draw, in one more, random place."""
    out = bits.copy().reshape(-1)
    out[int(rng.integers(out.size))] = out[int(np.argmax(out))]
    return out.reshape(bits.shape)


def _with_equal_rows(bits: Array) -> Array:
    """The array with its first row in place of all others; a vector is unchanged."""
    return np.ascontiguousarray(np.broadcast_to(bits[:1], bits.shape)) if bits.ndim > 1 else bits


def _with_zeros_at_start(bits: Array) -> Array:
    """The array with zeros in its first eight elements."""
    out = bits.copy().reshape(-1)
    out[:8] = 0
    return out.reshape(bits.shape)


def with_constants(draw: Draw, kind: str, constants: Sequence[float], rng: np.random.Generator) -> Draw:
    """A draw with constants planted in all inputs. ``kind``: ``inputs.IN_TURN`` or one of ``inputs.DIRECTED``."""
    arrays = list(draw.arrays)
    for place in _places(draw):
        item = arrays[place]
        values = inputs.planted(np.array(item.values(), np.float64), kind, rng, constants)
        arrays[place] = item._replace(bits=FORMATS[_FORMATS[item.type]].bits(values).view(item.bits.dtype))
    return replace(draw, kind=kind, arrays=arrays)


def _places(draw: Draw) -> list[int]:
    """The numbers of the arrays that may be changed."""
    numbered = enumerate(zip(draw.arrays, draw.plain, strict=True))
    return [n for n, (item, is_plain) in numbered if is_plain and item.is_float and item.bits.size > 1]
