"""Defines ``Criteria``, by which a kernel's source is graded, and ``CheckedCall``, a call with its expected outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kernelproof.grading import inputs
from kernelproof.grading.contract import Contract
from kernelproof.grading.device import Call, RepeatedCalls
from kernelproof.grading.expressions import Number, Shape, value
from kernelproof.grading.formats import Array
from kernelproof.grading.reference import Reference
from kernelproof.grading.tolerance import Expected, Precision, Tolerance

# A function that makes fresh memory for the calls of a shape. Its keyword arguments are ``environment`` and
# ``is_elsewhere``.
DeviceFactory = Callable[..., RepeatedCalls]


@dataclass(frozen=True)
class Criteria:
    """Everything by which a source is graded, except for the shapes.

    ``factory``: makes the memory in which the source is called. ``checks_operands`` and ``checks_accumulator``: whether
    narrower types than ``precision`` are findings. ``flops``: the operations that the problem needs, as an expression
    of the shape; None derives them from ``tolerance``. ``kinds``: the kinds of inputs that are drawn. ``places``: how
    many elements of each input are changed, one at a time, to see whether the outputs follow. ``unstated``: a shape
    that the user did not state, on which the source need not be right.
    """

    factory: DeviceFactory
    contract: Contract
    reference: Reference
    tolerance: Tolerance
    precision: Precision
    checks_operands: bool = True
    checks_accumulator: bool = True
    flops: Number | None = None
    kinds: tuple[str, ...] = inputs.KINDS
    places: int = 4
    seed: int = 0
    unstated: Shape | None = None

    def flops_of(self, shape: Shape) -> float:
        """The number of operations that the problem needs for a shape. It is 0 if the user stated neither ``flops`` nor
        terms, or if the terms are not products of inputs."""
        if self.flops is not None:
            return float(value(self.flops, shape))
        if self.tolerance.terms is None:
            return 0.0
        terms = float(value(self.tolerance.terms, shape)) - 1  # one of them may be a bias
        return 2 * terms * float(np.prod(self.contract.outputs[0].shape(shape))) if self._multiplies(shape) else 0.0

    def _multiplies(self, shape: Shape) -> bool:
        """Whether the terms are products of inputs: if so, doubling all inputs more than doubles the reference.

        Inputs with stated bounds, such as indices, are not doubled.
        """
        bits = inputs.draw(self.contract, "normal", shape, np.random.default_rng(self.seed))
        arrays = [(item, item.format.values(bits[item.name])) for item in self.contract.inputs]
        simple = self.reference({item.name: array for item, array in arrays}, shape)
        double = self.reference({item.name: array if item.low else 2 * array for item, array in arrays}, shape)
        return not all(np.allclose(2 * sums, doubled) for sums, doubled in zip(simple, double, strict=True))

    @property
    def counts_integers(self) -> bool:
        """Whether integer arithmetic counts as work. It does if no input is a float, or if some input has elements of
        8 bits: quantised kernels compute in integers even if their scales are floats."""
        formats = [item.format for item in self.contract.inputs]
        return not any(item.is_float for item in formats) or any(item.dtype.itemsize == 1 for item in formats)


@dataclass
class CheckedCall:
    """A call with the kind and bits of its inputs, the expected outputs, and a mask of each output's wrong elements."""

    kind: str
    bits: dict[str, Array]
    call: Call
    expected: dict[str, Expected]
    wrong: dict[str, Array] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether no element of an output is wrong."""
        return not any(mask.any() for mask in self.wrong.values())
